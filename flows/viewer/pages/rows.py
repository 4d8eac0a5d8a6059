"""Rows of the buffer as a page shows them: a table, histograms, what the policy said last, and rows by meaning."""

import json
from typing import TYPE_CHECKING

import pyarrow as pa
from pydantic import Field

from agentrl.datastore.errors import UnknownTrajectoryError
from agentrl.datastore.table.writer import SCALARS
from agentrl.flows.viewer.pages.trajectory import last_words
from agentrl.flows.viewer.query import facets as histograms
from agentrl.flows.viewer.query.excerpts import with_excerpts
from agentrl.flows.viewer.query.facets import Facets
from agentrl.flows.viewer.query.tables import TEXT, column_of
from agentrl.flows.viewer.wire import Answer, AtVersion, Filtered, Query, RefusedError

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader


class Page(Filtered):
    sort: str = "created_at"
    desc: bool = True
    offset: int = Field(0, ge=0, lt=2**31)
    limit: int = Field(100, ge=1, le=1000)
    columns: str = Field("", max_length=1000)


class SomeRows(AtVersion):
    id: list[str] = Field(min_length=1, max_length=200)


class SearchQuery(Query):
    q: str = Field(min_length=1, max_length=4000)
    k: int = Field(20, ge=1, le=200)


class Answers(Answer):
    """What the policy said last in each of these rows, by id, cut after 300 characters; empty if it said nothing."""

    version: int
    answers: dict[str, str]


class Hit(Answer):
    trajectory_id: str
    score: float


class Hits(Answer):
    """Best first. ``version`` is that of the buffer which the index holds, and ``behind`` counts newer commits."""

    version: int
    behind: int
    hits: list[Hit]


def rows(reader: "StoreReader", question: Page) -> tuple[pa.Table, dict[str, str]]:
    """A page of rows, and the headers that go with it. Without ``columns`` it has all."""
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


def facets(reader: "StoreReader", question: Filtered) -> Facets:
    snapshot = reader.tables.at(question.at)
    part = reader.part(question, snapshot)
    return histograms.facets(snapshot, question.filter, part.mask if part else None)


def answers(reader: "StoreReader", question: SomeRows) -> Answers:
    """What the policy said last in these rows. Raises RefusedError if one is not there."""
    snapshot = reader.tables.at(question.at)
    try:
        messages = reader.read(question.id, ("messages",), snapshot)["messages"].to_pylist()
    except UnknownTrajectoryError as error:
        raise RefusedError(str(error), field="id", status=404) from None
    said_last = zip(question.id, map(last_words, messages), strict=True)
    return Answers(version=snapshot.version, answers={name: text[:TEXT] for name, text in said_last})


def search(reader: "StoreReader", question: SearchQuery) -> Hits:
    """The rows whose prompts are nearest. The index is only read. Raises RefusedError if there is none."""
    from agentrl.datastore.search.embedding import EMBEDDED
    from agentrl.datastore.search.index import SearchIndex

    buffer = reader.tables.buffer
    index = SearchIndex.of_store(buffer)
    state = index.state() if index else None
    without = index is not None and index.name == EMBEDDED and buffer.storage.read(f"{index.folder}/model.npz") is None
    if index is None or state is None or without:
        command = f"agentrl buffer index --store {reader.store}"
        raise RefusedError("this store has no search index", following=command, status=409)
    ranked = index.search(question.q, question.k, refresh=False)
    hits = [Hit(trajectory_id=hit["trajectory_id"], score=hit["score"]) for hit in ranked.to_dicts()]
    return Hits(version=state.table_version, behind=state.stale, hits=hits)
