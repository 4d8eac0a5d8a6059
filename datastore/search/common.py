"""Words that very many rows hold, and pairs of them that stand side by side.

A question of such words is about a large part of the table. tantivy gives each row that it finds as an object of
Python, and reads for a phrase where its words stand in all rows that hold them; both take longer the more rows there
are. So an index of many rows knows its common words, chosen from a sample when it is made. Of each data file it has,
beside tantivy's files, one bit for each row and each common word (and each common pair of words), and each pair of the
most common words is a word of a field of its own. A file's bits follow from the file and the choice alone, and what
holds them is named after both.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

SHARE = 1 / 8
"""Of the rows of a sample: a word or a pair of words in so many is common."""
WORDS, PAIRED, PAIRS = 256, 96, 128
"""Common words at most; those of them, the most frequent, of which pairs are indexed; and common pairs at most."""
FILE = "common.json"
_TEXT_ENDS, _ROW_ENDS = " \x00 ", " \x01 "
"""Between texts as the index reads them, which hold neither sign."""


@dataclass(frozen=True)
class Common:
    """Common words, the most frequent first, and the common pairs of the first :data:`PAIRED` of them. An index of few
    rows has chosen none."""

    words: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    chosen: bool = False

    @classmethod
    def of(cls, rows: Sequence[Sequence[str]]) -> "Common":
        """Choose from a sample of rows, each given as its texts as the index reads them."""
        counts, held_by, pairs_held_by = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
        split = [[text.split() for text in texts] for texts in rows]
        for texts in split:
            in_row = [word for text in texts for word in text]
            counts.update(in_row)
            held_by.update(set(in_row))
        least = SHARE * len(rows)
        words = sorted(
            (word for word, held in held_by.items() if held >= least), key=lambda word: (-counts[word], word)
        )
        paired = frozenset(words[:PAIRED])
        for texts in split:
            near = {pair for text in texts for pair in pairwise(text)}
            pairs_held_by.update(pair for pair in near if pair[0] in paired and pair[1] in paired)
        pairs = sorted(pair for pair, held in pairs_held_by.items() if held >= least)
        pairs.sort(key=lambda pair: -pairs_held_by[pair])
        return cls(tuple(words[:WORDS]), tuple(pairs[:PAIRS]), chosen=True)

    @classmethod
    def read(cls, folder: Path) -> "Common":
        """Those of an index. Raises ValueError if they cannot be read."""
        try:
            held = json.loads((folder / FILE).read_bytes())
            return cls(tuple(held["words"]), tuple((first, second) for first, second in held["pairs"]), held["chosen"])
        except (OSError, KeyError, TypeError) as error:
            raise ValueError(f"{FILE}: {error}") from error

    def write(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps({"words": self.words, "pairs": self.pairs, "chosen": self.chosen}))

    @cached_property
    def digest(self) -> str:
        return xxh3_64_hexdigest(json.dumps([self.words, self.pairs]).encode())

    def pair(self, first: str, second: str) -> str | None:
        """The word of the field of pairs that stands for these two side by side; None if they are not in it."""
        numbers = self._numbers.get(first, 0), self._numbers.get(second, 0)
        return str(_pair_number(*numbers)) if all(0 < number <= PAIRED for number in numbers) else None

    def bit(self, terms: Sequence[str]) -> int | None:
        """Which of the bits of a row says whether it holds this word, or these two side by side; None if none does."""
        if len(terms) == 1:
            return self._numbers[terms[0]] - 1 if terms[0] in self._numbers else None
        return self._pair_bits.get(tuple(terms))

    def marks(self, rows: Sequence[Sequence[str]]) -> tuple[np.ndarray, list[str]]:
        """Bits of rows, given as for :meth:`of`, bool [words and pairs, rows], and the text of each row for the
        field of pairs."""
        tokens = _ROW_ENDS.join(_TEXT_ENDS.join(texts) for texts in rows).split()
        codes = np.fromiter(map(self._codes.get, tokens, repeat(0)), np.int16, len(tokens))
        row_of = np.cumsum(codes < 0, dtype=np.int32)
        bits = np.zeros((len(self.words) + len(self.pairs), len(rows)), bool)
        known = np.flatnonzero(codes > 0)
        bits[codes[known] - 1, row_of[known]] = True
        paired = (codes > 0) & (codes <= PAIRED)
        first = np.flatnonzero(paired[:-1] & paired[1:])
        numbers, rows_of_pairs = _pair_number(codes[first].astype(np.int32), codes[first + 1]), row_of[first]
        for (left, right), bit in self._pair_bits.items():
            bits[bit, rows_of_pairs[numbers == _pair_number(self._numbers[left], self._numbers[right])]] = True
        ends = np.searchsorted(rows_of_pairs, np.arange(len(rows) + 1)).tolist()
        names = list(map(str, numbers.tolist()))
        return bits, [" ".join(names[start:end]) for start, end in pairwise(ends)]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The number of each common word from 1."""
        return {word: number for number, word in enumerate(self.words, 1)}

    @cached_property
    def _codes(self) -> dict[str, int]:
        return self._numbers | {_ROW_ENDS.strip(): -1}

    @cached_property
    def _pair_bits(self) -> dict[tuple[str, ...], int]:
        return {pair: bit for bit, pair in enumerate(self.pairs, len(self.words))}


def _pair_number(first: Any, second: Any) -> Any:
    """The number of a pair of numbered words, of one or of arrays of them."""
    return first * (PAIRED + 1) + second


class Bits:
    """The bits of the rows of data files, in the folder of an index."""

    def __init__(self, folder: Path, common: Common) -> None:
        self.folder, self.common = folder, common
        self._opened: dict[str, np.ndarray] = {}

    def path(self, name: str) -> Path:
        """The file of a data file's bits."""
        return self.folder / f"{Path(name).name}.{self.common.digest}.npy"

    def write(self, name: str, groups: Sequence[np.ndarray]) -> None:
        """Keep the bits of a data file, given by group of its rows. They are durable before this returns."""
        with self.path(name).open("wb") as file:
            np.save(file, np.packbits(np.concatenate(groups, 1), 1))
            file.flush()
            os.fsync(file.fileno())

    def remove(self, name: str) -> None:
        self._opened.pop(name, None)
        self.path(name).unlink(missing_ok=True)

    def of(self, name: str, bit: int, rows: int) -> np.ndarray:
        """One bit of each row of a data file, bool [rows]. Raises ValueError if they cannot be read."""
        try:
            if name not in self._opened:
                self._opened[name] = np.load(self.path(name), mmap_mode="r")
        except (OSError, EOFError) as error:
            raise ValueError(str(error)) from error
        packed = self._opened[name]
        if packed.shape != (len(self.common.words) + len(self.common.pairs), -(-rows // 8)):
            raise ValueError(f"{self.path(name).name} is of other rows")
        return np.unpackbits(packed[bit], count=rows).view(bool)
