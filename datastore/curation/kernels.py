"""What rules make of the text of a row: sketches, n-grams, digests and verdicts. Each depends on the row alone."""

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from agentrl.datastore.curation.contamination import HeldOut
from agentrl.datastore.curation.odd_sketches import odd_sketches
from agentrl.datastore.curation.shingles import shingles
from agentrl.datastore.curation.sketches import sketches
from agentrl.datastore.curation.text import Part, first_question, part_leaves, part_text, units

NGRAM = 3
CALLS = [f"messages.list.element.tool_calls.list.element.{field}" for field in ("name", "arguments")]


@dataclass(frozen=True)
class _OfParts:
    """What is made of parts of a conversation."""

    compare: tuple[Part, ...]
    version: ClassVar[int] = 1

    @property
    def columns(self) -> Sequence[str]:
        return list(dict.fromkeys(leaf for part in self.compare for leaf in part_leaves(part)))

    @property
    def name(self) -> str:
        return "-".join([type(self).__name__.lower(), *self.compare, str(self.version)])

    def grams(self, rows: pa.Table) -> list[list[np.ndarray]]:
        """The hashes of the word n-grams of each part of each row, sorted and each once."""
        texts = [text for row in _conversations(rows) for text in self.texts(row, str)]
        sets, count = shingles(texts, NGRAM), len(self.compare)
        return [sets[start : start + count] for start in range(0, len(sets), count)]

    def texts(self, row: dict[str, Any], *clean: type[str]) -> list[str]:
        return [part_text(part, row.get("prompt", ""), row["messages"], *clean) for part in self.compare]


class Sketch(_OfParts):
    """The sketch of a row's n-grams, how many each part has, and odd sketches of the parts."""

    version: ClassVar[int] = 2

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        grams = self.grams(rows)
        sizes = np.array([list(map(len, parts)) for parts in grams], np.uint32)
        columns = {"sketch": sketches(grams), "sizes": sizes}
        arrays = [pa.FixedSizeListArray.from_arrays(values.ravel(), values.shape[1]) for values in columns.values()]
        odd = odd_sketches([members for parts in grams for members in parts], len(self.compare))
        return pa.RecordBatch.from_arrays([*arrays, odd], [*columns, "odd"])


class Grams(_OfParts):
    """The n-grams of each part of a row, by which a similarity is computed."""

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        grams = self.grams(rows)
        columns = [_lists([parts[number] for parts in grams]) for number in range(len(self.compare))]
        return pa.RecordBatch.from_arrays(columns, [f"part {number}" for number in range(len(columns))])


class Digest(_OfParts):
    """A digest of a row's parts, in which white space and the order of arguments do not count."""

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        digests = [_digest(self.texts(row)) for row in _conversations(rows)]
        return pa.RecordBatch.from_arrays([pa.array(digests, pa.binary(16))], ["digest"])


@dataclass(frozen=True)
class CallCheck:
    """Whether a row's calls are valid (:class:`Verdict`), and why a schema could not be used."""

    @property
    def name(self) -> str:
        return "calls-1"

    @property
    def columns(self) -> Sequence[str]:
        return [*CALLS, "tools"]

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        from agentrl.datastore.curation.calls import Declared  # other rules need no JSON Schema

        verdicts, problems = [], []
        declared = Declared()
        for row in _conversations(rows):
            declared.problem = ""
            verdicts.append(declared.verdict(row["messages"], row["tools"]))
            problems.append(declared.problem or None)
        arrays = [pa.array(verdicts, pa.uint8()), pa.array(problems, pa.string())]
        return pa.RecordBatch.from_arrays(arrays, ["verdict", "problem"])


@dataclass(frozen=True)
class CalledTools:
    """The names of the tools that a row calls, in their order."""

    @property
    def name(self) -> str:
        return "tools-1"

    @property
    def columns(self) -> Sequence[str]:
        return ["messages.list.element.role", CALLS[0]]

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        called = [
            [
                call["name"]
                for message in row["messages"]
                if message["role"] == "assistant"
                for call in message["tool_calls"]
            ]
            for row in _conversations(rows)
        ]
        return pa.RecordBatch.from_arrays([pa.array(called, pa.list_(pa.string()))], ["tools"])


@dataclass(frozen=True)
class Leaks:
    """Whether a held-out task stands in a row. ``heldout``: a file with what is held out, a pickled :class:`HeldOut`,
    whose name is its digest."""

    heldout: Path
    overlap: float

    @property
    def name(self) -> str:
        return f"leaks-{self.heldout.stem}-{self.overlap}-1"

    @property
    def columns(self) -> Sequence[str]:
        return [
            "prompt",
            *(f"messages.list.element.{field}" for field in ("role", "content", "reasoning")),
            *CALLS,
        ]

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        heldout, leaks = _heldout(self.heldout), []
        for row in _conversations(rows):
            question = first_question(row["prompt"], row["messages"])
            leaks.append(heldout.in_conversation(question, units(row["prompt"], row["messages"]), self.overlap))
        return pa.RecordBatch.from_arrays([pa.array(leaks, pa.bool_())], ["leaks"])


@dataclass(frozen=True)
class FirstQuestion:
    """A row's question."""

    @property
    def name(self) -> str:
        return "question-1"

    @property
    def columns(self) -> Sequence[str]:
        return ["prompt", "messages.list.element.role", "messages.list.element.content"]

    def sketch(self, rows: pa.Table) -> pa.RecordBatch:
        questions = [first_question(row["prompt"], row["messages"]) for row in _conversations(rows)]
        return pa.RecordBatch.from_arrays([pa.array(questions, pa.string())], ["question"])


@lru_cache(maxsize=1)
def _heldout(path: Path) -> HeldOut:
    with path.open("rb") as file:
        return pickle.load(file)


def _conversations(rows: pa.Table) -> Iterator[dict[str, Any]]:
    yield from rows.to_pylist()


def _lists(sets: Sequence[np.ndarray]) -> pa.Array:
    ends = np.cumsum([0, *map(len, sets)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(np.concatenate([np.empty(0, np.uint64), *sets])))


def _digest(texts: Sequence[str]) -> bytes:
    """A digest of texts, in which where one ends counts."""
    digest = hashlib.blake2b(digest_size=16)
    for text in map(str.encode, texts):
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()
