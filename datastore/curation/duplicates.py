"""Near duplicates: candidates by MinHash in bands (Broder, 1997), each verified by the Jaccard similarity itself."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import IO

import numpy as np

from agentrl.datastore.curation.text import ngrams

PERMUTATIONS = 128
NGRAM = 3
FOUND = 0.95
"""Chance, at least, that a pair whose similarity is the threshold becomes a candidate. Pairs that are more similar are
found more often: at a threshold of 0.8, of pairs at 0.85 all but one in 500."""
AT_ONCE = 512
"""Shingles that are permuted at once."""
PART = 0x9E3779B97F4A7C15
"""What is added to the shingles of a part, times the number of the part."""

Read = Callable[[np.ndarray], Iterable[Sequence[str]]]
"""Gives the texts of the parts of rows, by their numbers [rows] in rising order."""


def near_duplicates(read: Read, scopes: Sequence[str], order: np.ndarray, threshold: float, seed: int) -> np.ndarray:
    """Whether each row [rows] resembles another one of its scope: in each of its parts the Jaccard similarity of word
    3-grams is at or above the threshold. The other one comes before it in ``order`` [rows], and resembles none itself.

    Rows are read twice: all of them for their sketches, and once more those that share a bucket, for their n-grams. A
    text is held only while it is read. A row takes 512 bytes in a temporary file, and one that shares a bucket 8 bytes
    for each of its n-grams too.
    """
    doubled = np.zeros(len(scopes), dtype=bool)
    with tempfile.TemporaryFile() as sketched, tempfile.TemporaryFile() as shingled:
        sketches = np.memmap(sketched, np.uint32, "w+", shape=(max(1, len(scopes)), PERMUTATIONS))
        minhash = _MinHash(seed)
        for row, parts in enumerate(read(np.arange(len(scopes)))):
            sketches[row] = minhash.sketch(_shingles(parts))
        buckets = _buckets(sketches[: len(scopes)], scopes, *bands(threshold))
        candidates = np.flatnonzero((buckets >= 0).any(1))
        if not len(candidates):
            return doubled
        verify = _Verify(sketches, _Shingles(shingled, candidates, read(candidates)), threshold)
        kept: list[dict[int, list[int]]] = [{} for _ in range(buckets.shape[1])]
        for row in order[np.isin(order, candidates)].tolist():
            shared = [(band, bucket) for band, bucket in enumerate(buckets[row].tolist()) if bucket >= 0]
            near = sorted({other for band, bucket in shared for other in kept[band].get(bucket, ())})
            doubled[row] = bool(near) and verify.any_resembles(row, np.array(near))
            if not doubled[row]:
                for band, bucket in shared:
                    kept[band].setdefault(bucket, []).append(row)
    return doubled


def bands(threshold: float) -> tuple[int, int]:
    """(bands, values of each): the widest bands by which a pair at the threshold is found with a chance of
    :data:`FOUND`. Narrower ones would give more candidates that are none."""
    for width in range(PERMUTATIONS, 1, -1):
        number = PERMUTATIONS // width
        if 1 - (1 - threshold**width) ** number >= FOUND:
            return number, width
    return PERMUTATIONS, 1


def _shingles(parts: Sequence[str]) -> list[np.ndarray]:
    """The shingles of each part, sorted."""
    return [ngrams(text, NGRAM) for text in parts]


class _MinHash:
    """Sketches of sets of hashes: by multiply-shift, whose hashes are strongly universal (Dietzfelbinger, 1996)."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed + 1)
        self._factor, self._term = random.integers(0, 2**64, (2, PERMUTATIONS, 1), np.uint64)

    def sketch(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The smallest hash by each permutation, uint32 [PERMUTATIONS]; the largest number of a set without members.
        Equal words in two parts are two members."""
        least = np.full(PERMUTATIONS, 2**32 - 1, np.uint64)
        told_apart = [part + np.uint64(number * PART % 2**64) for number, part in enumerate(parts)]  # modulo 2^64
        short = np.concatenate(told_apart) >> np.uint64(32)
        for start in range(0, len(short), AT_ONCE):
            hashed = (short[start : start + AT_ONCE] * self._factor + self._term) >> np.uint64(32)
            np.minimum(least, hashed.min(1), out=least)
        return least.astype(np.uint32)


class _Shingles:
    """The shingles of some rows, in a file; in memory is only where each part of a row begins."""

    def __init__(self, file: IO[bytes], rows: np.ndarray, texts: Iterable[Sequence[str]]) -> None:
        self._number = {row: number for number, row in enumerate(rows.tolist())}
        lengths = []
        for parts in texts:
            shingles = _shingles(parts)
            lengths.append([len(part) for part in shingles])
            file.write(np.concatenate(shingles).tobytes())
        file.flush()
        self.sizes = np.array(lengths)
        self._start = np.concatenate([[0], self.sizes.sum(1).cumsum()])
        self._end = self._start[:-1, None] + self.sizes.cumsum(1)
        mapped = np.memmap(file, np.uint64, "r") if self._start[-1] else np.empty(0, np.uint64)
        self._all = np.asarray(mapped)  # slices of a memmap cost more than what is done with them

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The places of rows in ``sizes``."""
        return np.array([self._number[row] for row in rows.tolist()])

    def parts(self, number: int) -> list[np.ndarray]:
        """The sorted shingles of each part of a row."""
        ends = self._end[number].tolist()
        return [self._all[start:end] for start, end in pairwise([int(self._start[number]), *ends])]


class _Verify:
    """Whether rows resemble each other. Most that do not are told by the sizes of their sets, or by a sketch that is
    farther from the threshold than four standard errors; all others, and all that do, by the sets."""

    def __init__(self, sketches: np.ndarray, shingles: _Shingles, threshold: float) -> None:
        self._sketches, self._shingles, self._threshold = np.asarray(sketches), shingles, threshold
        self._least = threshold - 4 * (threshold * (1 - threshold) / PERMUTATIONS) ** 0.5

    def any_resembles(self, row: int, others: np.ndarray) -> bool:
        numbers, [number] = self._shingles.numbers(others), self._shingles.numbers(np.array([row]))
        sizes, size = self._shingles.sizes[numbers], self._shingles.sizes[number]
        possible = (np.minimum(sizes, size) >= self._threshold * np.maximum(sizes, size)).all(1)
        estimates = (self._sketches[others[possible]] == self._sketches[row]).mean(1)
        numbers, estimates = numbers[possible][estimates >= self._least], estimates[estimates >= self._least]
        shingles = self._shingles.parts(number)
        return any(self._resemble(shingles, self._shingles.parts(other)) for other in numbers[np.argsort(-estimates)])

    def _resemble(self, parts: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return all(jaccard(*parts) >= self._threshold for parts in zip(parts, other, strict=True))


def jaccard(first: np.ndarray, other: np.ndarray) -> float:
    """The share of the members of two sorted sets that both have; 1 if both are empty."""
    if not len(first) or not len(other):
        return float(len(first) == len(other))
    places = np.minimum(np.searchsorted(first, other), len(first) - 1)
    shared = int(np.count_nonzero(first[places] == other))
    return shared / (len(first) + len(other) - shared)


def _buckets(sketches: np.ndarray, scopes: Sequence[str], number: int, width: int) -> np.ndarray:
    """The bucket of each sketch in each band of ``width`` values, int32 [sketches, bands]. Sketches of one scope that
    are equal in a band share a bucket of it. It is -1 if no other one is in it."""
    scope = np.unique(np.asarray(scopes, dtype=str), return_inverse=True)[1].astype(np.uint32)
    buckets = np.full((len(sketches), number), -1, np.int32)
    for band in range(number):
        part = sketches[:, band * width : (band + 1) * width]
        keys = np.ascontiguousarray(np.column_stack([scope, part])).view(np.dtype((np.void, 4 * (width + 1))))[:, 0]
        _, bucket, sizes = np.unique(keys, return_inverse=True, return_counts=True)
        buckets[:, band] = np.where(sizes[bucket] > 1, bucket, -1)
    return buckets
