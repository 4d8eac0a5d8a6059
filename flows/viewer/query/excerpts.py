"""Where the words of a search stand in rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

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
