"""What must not leave with an exported file: matches of the user's patterns, in texts and in decoded tokens.

A match is replaced wherever it stands, also where its pattern alone would not find it: in other rows and fields, and
inside JSON, which writes some characters otherwise. Of a token that holds a part of a match there remain neither its
id nor its text, length or log-probs.
"""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.wire.export import Redactions

MARK = "[redacted]"
CLOSED = 4
"""Characters from which on a match is replaced wherever it stands. A shorter one would stand in many words."""
TOLD_BY = ("logprob", "ref_logprob", "train_logprob", "entropy")
"""Columns of tokens from which a guess of the text can be confirmed."""


class Redactor:
    """The patterns, and what they matched. First all rows are learned, then cleaned."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises StoreError if a pattern is wrong, or matches the empty text."""
        self._patterns = [_compiled(text) for text in patterns]
        self._literals: set[str] = set()
        self._sorted: list[str] = []
        self.counts = Redactions(patterns=len(self._patterns), places=0, rows=0, tokens=0, rows_without_tokens=0)

    @contextmanager
    def row(self) -> Iterator[None]:
        """Within it one row is cleaned, which counts if that changes it."""
        before = self.counts.model_copy()
        yield
        self.counts.rows += self.counts != before

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def learn(self, value: Any) -> None:
        """Note what the patterns match in a text, in texts inside JSON, and in all texts of lists and mappings."""
        for text in _texts(value):
            self._literals |= {match for match in self._matches(text) if len(match) >= CLOSED}

    def learned(self) -> None:
        """All rows are learned."""
        forms = {form for literal in self._literals for form in _written(literal)}
        self._sorted = sorted(forms, key=lambda form: (-len(form), form))

    def _matches(self, text: str) -> Iterator[str]:
        return (match[0] for pattern in self._patterns for match in pattern.finditer(text) if match[0])

    def places(self, text: str) -> list[tuple[int, int]]:
        """Where matches stand: the characters from a start to an end. They are in order and do not touch."""
        spans = [
            (match.start(), match.end()) for pattern in self._patterns for match in pattern.finditer(text) if match[0]
        ]
        if self._sorted and text:
            ends = _characters_before(text)
            [bytes_] = pl.Series([text]).str.find_many(self._sorted, overlapping=True).to_list()
            [which] = pl.Series([text]).str.extract_many(self._sorted, overlapping=True).to_list()
            starts = [int(ends[start]) for start in bytes_]
            spans += [(start, start + len(literal)) for start, literal in zip(starts, which, strict=True)]
        joined: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((start, end))
        return joined

    def text(self, text: str) -> str:
        """The text with a mark in place of each match."""
        spans = self.places(text)
        self.counts.places += len(spans)
        for start, end in reversed(spans):
            text = text[:start] + MARK + text[end:]
        return text

    def clean(self, value: Any, inside: bool = False) -> Any:
        """A value with all of its texts cleaned. A text of JSON is cleaned ``inside`` too, with its names and numbers;
        names of other mappings are ours."""
        if isinstance(value, str):
            return self.text(self._of_json(value))
        if isinstance(value, dict):
            return {self.text(name) if inside else name: self.clean(inner, inside) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.clean(inner, inside) for inner in value]
        return MARK if inside and self.places(json.dumps(value)) else value

    def _of_json(self, text: str) -> str:
        """A text of JSON, cleaned inside; any other text as it is."""
        value = _parsed(text)
        cleaned = self.clean(value, inside=True)
        return text if cleaned == value else json.dumps(cleaned, ensure_ascii=False)

    def column(self, column: pl.Series) -> pl.Series:
        """A column of texts, cleaned; other columns as they are."""
        if column.dtype != pl.String:
            return column
        known = {value: self.clean(value) for value in column.drop_nulls().unique().to_list()}
        return column.replace_strict(known, default=None, return_dtype=pl.String) if known else column

    def tokens(self, table: pa.Table, text: bytes | None) -> tuple[pa.Table, bytes | None]:
        """The tokens of a row, and their text. A row whose tokenizer is not known loses its tokens, since their ids
        may stand for anything."""
        if text is None:
            if not table.num_rows:
                return table, None
            self.counts.rows_without_tokens += 1
            reason = "its tokens are left out: their tokenizer is not known, so nothing could be redacted"
            return table.slice(0, 0).replace_schema_metadata(
                {**table.schema.metadata, b"reason": reason.encode()}
            ), None
        start, length = table["start"].to_numpy().astype(np.int64), table["length"].to_numpy().astype(np.int64)
        hidden = _touched(start, length, _in_bytes(text.decode(), self.places(text.decode())))
        if not hidden.any():
            return table, text
        self.counts.tokens += int(hidden.sum())
        return _without(table, text, hidden)


def _compiled(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise StoreError(f"--redact is no regular expression: {error}") from None
    if pattern.match(""):
        raise StoreError(
            "--redact matches the empty text, which stands everywhere; write a pattern that needs a character"
        )
    return pattern


def _texts(value: Any, inside: bool = False) -> Iterator[str]:
    """All texts of a value; ``inside`` JSON also names and numbers."""
    if isinstance(value, str):
        yield value
        yield from _texts(_parsed(value), inside=True)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if inside:
                yield name
            yield from _texts(inner, inside)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, inside)
    elif inside and value is not None:
        yield json.dumps(value)


def _parsed(text: str) -> Any:
    """The list or mapping that a text of JSON holds; None if it is none."""
    if text[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _written(literal: str) -> Iterator[str]:
    """A text as it stands in texts, in JSON, and in JSON inside JSON."""
    yield literal
    for plain in (False, True):
        once = json.dumps(literal, ensure_ascii=plain)[1:-1]
        yield once
        yield json.dumps(once, ensure_ascii=plain)[1:-1]


def _characters_before(text: str) -> np.ndarray:
    """How many characters of a text begin before each of its bytes, [bytes + 1]."""
    first = np.frombuffer(text.encode(), np.uint8) & 0xC0 != 0x80
    return np.concatenate([[0], np.cumsum(first)])


def _in_bytes(text: str, places: list[tuple[int, int]]) -> np.ndarray:
    """Places in characters as places in bytes, [places, 2]."""
    sizes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    wide = 1 + (sizes >= 0x80).astype(np.int64) + (sizes >= 0x800) + (sizes >= 0x10000)
    before = np.concatenate([[0], np.cumsum(wide)])
    return before[np.array(places, np.int64).reshape(-1, 2)]


def _touched(start: np.ndarray, length: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Which tokens hold a part of these places, [tokens]; a token without text inside of one does too."""
    hidden = np.zeros(len(start), dtype=bool)
    for low, high in places:
        hidden |= (start < high) & (np.maximum(start + length, start + 1) > low)
    return hidden


def _without(table: pa.Table, text: bytes, hidden: np.ndarray) -> tuple[pa.Table, bytes]:
    """Tokens without ids, texts and log-probs where they are hidden. The first of several has the mark."""
    starts, lengths = table["start"].to_numpy(), table["length"].to_numpy()
    first = hidden & ~np.concatenate([[False], hidden[:-1]])
    mark = MARK.encode()
    parts = [
        mark if opens else b"" if gone else text[start : start + length]
        for opens, gone, start, length in zip(first, hidden, starts, lengths, strict=True)
    ]
    sizes = np.array([len(part) for part in parts], np.int32)
    columns = {
        "start": pa.array(np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int32)),
        "length": pa.array(sizes),
        "joined": pa.array(table["joined"].to_numpy(zero_copy_only=False) & ~hidden),
    }
    for name in ("id", *TOLD_BY):
        if name in table.column_names:
            values = table[name].combine_chunks()
            columns[name] = pa.array(
                np.where(hidden, 0, values.fill_null(0).to_numpy()),
                values.type,
                mask=hidden | ~values.is_valid().to_numpy(zero_copy_only=False),
            )
    kept = [columns.get(name, table[name]) for name in table.column_names]
    return pa.Table.from_arrays(kept, schema=table.schema), b"".join(parts)
