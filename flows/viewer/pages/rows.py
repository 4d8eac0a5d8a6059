"""Rows of the buffer as a page shows them: a table, histograms, and what the policy said last."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic import Field

from agentrl.datastore.errors import UnknownTrajectoryError
from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.pages.trajectory import last_words
from agentrl.flows.viewer.query import facets as histograms
from agentrl.flows.viewer.query.facets import Facets
from agentrl.flows.viewer.query.tables import TEXT, column_of
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, AtVersion, Filtered, RefusedError


class Page(Filtered):
    sort: str = "created_at"
    desc: bool = True
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(100, ge=1, le=1000)
    columns: str = Field("", max_length=1000)


class SomeRows(AtVersion):
    id: list[str] = Field(min_length=1, max_length=200)


class Answers(Answer):
    """What the policy said last in each of these rows, by id, cut after 300 characters; empty if it said nothing."""

    version: int
    answers: dict[str, str]


def rows(reader: StoreReader, question: Page) -> tuple[pa.Table, dict[str, str]]:
    """A page of rows, and the headers that go with it. Without ``columns`` it has all, which ``x-columns`` lists; texts
    are cut. ``x-absent`` counts rows of an artifact that this version of the buffer does not have. If the filter asks
    for words, ``x-words`` has them, and each row says where they stand (:data:`COLUMNS`)."""
    snapshot = reader.tables.at(question.at)
    part = reader.part(question, snapshot)
    asked = [name for name in question.columns.split(",") if name] or SCALARS
    names = dict.fromkeys(["trajectory_id", *(column_of(name, "columns") for name in asked)])
    sorting = (question.filter, column_of(question.sort, "sort"), question.desc, question.offset, question.limit)
    table, total = snapshot.page(*sorting, list(names), part.mask if part else None)
    words = snapshot.words(question.filter)
    if words and table.num_rows:
        ids = table["trajectory_id"].to_pylist()
        messages = reader.read(ids, ("trajectory_id", "messages"), snapshot)["messages"].to_pylist()
        table = with_excerpts(table, messages, words)
    counts = {"x-total": total, "x-version": snapshot.version, "x-absent": part.absent if part else 0}
    return table, {name: str(count) for name, count in counts.items()} | {
        "x-columns": ",".join(SCALARS),
        "x-words": json.dumps(words),
    }


BEFORE, AFTER = 40, 120
"""Characters that an excerpt has before and after the first match."""

COLUMNS = {"match": pa.string(), "match_message": pa.int32()}
"""Of a row in which words stand: the text around the first of them, and the number of its message."""


def with_excerpts(table: pa.Table, messages: Sequence[Sequence[Mapping[str, Any]]], words: Sequence[str]) -> pa.Table:
    """A page of rows with :data:`COLUMNS`; null where a word is written in other letters than the search found it in,
    such as accents. ``messages`` are those of each row."""
    pattern = pattern_of(words)
    matches = [excerpt(each, pattern) for each in messages]
    for number, (name, kind) in enumerate(COLUMNS.items()):
        table = table.append_column(name, pa.array([match and match[number] for match in matches], kind))
    return table


def pattern_of(words: Sequence[str]) -> re.Pattern[str]:
    """What finds any of the words, each whole and in any case; the words of a phrase may have signs between them."""
    each = (r"[\W_]+".join(map(re.escape, re.findall(r"[^\W_]+", word))) for word in words)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(filter(None, each))})(?![^\W_])", re.IGNORECASE)


def excerpt(messages: Sequence[Mapping[str, Any]], pattern: re.Pattern[str]) -> tuple[str, int] | None:
    for number, message in enumerate(messages):
        for text in _texts(message):
            if match := pattern.search(text):
                start, end = max(0, match.start() - BEFORE), match.end() + AFTER
                around = f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
                return f"{message['role']}: {' '.join(around.split())}", number
    return None


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    yield from filter(None, (message["content"], message["reasoning"]))
    for call in message["tool_calls"]:
        yield f"{call['name']} {call['arguments']}"


def facets(reader: StoreReader, question: Filtered) -> Facets:
    snapshot = reader.tables.at(question.at)
    part = reader.part(question, snapshot)
    return histograms.facets(snapshot, question.filter, part.mask if part else None)


def answers(reader: StoreReader, question: SomeRows) -> Answers:
    """What the policy said last in these rows. Raises RefusedError if one is not there."""
    snapshot = reader.tables.at(question.at)
    try:
        messages = reader.read(question.id, ("messages",), snapshot)["messages"].to_pylist()
    except UnknownTrajectoryError as error:
        raise RefusedError(str(error), field="id", status=404) from None
    said_last = zip(question.id, map(last_words, messages), strict=True)
    return Answers(version=snapshot.version, answers={name: text[:TEXT] for name, text in said_last})
