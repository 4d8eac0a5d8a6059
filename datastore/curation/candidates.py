"""Which pairs of rows are worth a comparison: of each bucket, and then of each row. What is chosen depends on the rows
alone, never on their order, on other buckets, or on how work is divided."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.datastore.curation.sketches import VALUES, equal_values

CROWDED = 32
"""Rows of a bucket of which all pairs are estimated. In a larger one each row is estimated against the LEADERS that
rank best, and against the NEIGHBOURS on either side of it in the order of the sketches' values."""
LEADERS = 16
NEIGHBOURS = 4
ORDERED = 24
"""Values of a sketch by which the rows of a crowded bucket are ordered, twice: from the first value, and the middle."""
COMPARED = 8
"""Better rows that a row is compared with at most: those of the highest estimates. A row that may resemble one more
surely is compared with the best of these too."""

AT_ONCE = 2**11
"""Pairs of sketches that are compared at once: they fit a cache of the processor."""
LOCAL_BITS, BLOCK_BITS = 28, 22
"""Rows of a part, and rows of which pairs are chosen together in the end, as powers of two."""

PAIR = np.dtype([("row", np.uint32), ("better", np.uint32), ("equal", np.uint8)])
"""A row, a better one, and how many values of their sketches are equal."""


@dataclass(frozen=True)
class Sketched:
    """Rows by which similarities are estimated: their numbers, uint64 [rows], the lower the better, the low bytes of
    their sketches, uint8 [rows, VALUES], and the sizes of their sets, uint32 [rows, parts]."""

    numbers: np.ndarray
    marks: np.ndarray
    sizes: np.ndarray

    def __getitem__(self, chosen: Any) -> "Sketched":
        return Sketched(self.numbers[chosen], self.marks[chosen], self.sizes[chosen])


def least_equal(threshold: float) -> int:
    """The number of equal values from which on a pair is compared: three standard errors below the threshold."""
    return max(0, int(np.ceil(VALUES * threshold - 3 * (VALUES * threshold * (1 - threshold)) ** 0.5)))


def bucket_pairs(keys: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs of numbers of ``rows`` [entries] that share a sorted key [entries], [pairs, 2], about AT_ONCE at once. Rows
    of large buckets come by :func:`crowd` instead."""
    first, ends = buckets(keys)
    sizes = ends - first
    for size in np.unique(sizes[(sizes > 1) & (sizes <= CROWDED)]).tolist():
        starts, (own, other) = first[sizes == size], np.tril_indices(size, -1)
        some = max(1, AT_ONCE // len(own))
        for start in range(0, len(starts), some):
            members = rows[starts[start : start + some, None] + np.arange(size)]
            yield np.column_stack([members[:, own].ravel(), members[:, other].ravel()])


def sorting(keys: np.ndarray) -> np.ndarray:
    """Places of random uint64 keys in an order that brings equal ones together. Keys are sorted with their places in
    one number, which takes half the time of sorting places; a few high bits of the keys give way to them."""
    bits = np.uint64(len(keys).bit_length())
    both = keys << bits | np.arange(len(keys), dtype=np.uint64)
    both.sort()
    order = both & ((np.uint64(1) << bits) - np.uint64(1))
    alike, ordered = both[1:] >> bits == both[:-1] >> bits, keys[order]
    if (alike & (ordered[1:] != ordered[:-1])).any():  # in those high bits alone
        return np.argsort(keys, kind="stable")
    return order


def buckets(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal keys begin and end, in sorted keys."""
    edges = np.flatnonzero(np.diff(keys)) + 1
    return np.concatenate([[0], edges])[: len(keys)], np.concatenate([edges, [len(keys)]])[-len(edges) - 1 :]


def crowd(rows: Sketched, leaders: Sketched, threshold: float) -> np.ndarray:
    """Pairs of some rows of a crowded bucket, packed, with those of it that rank best, and with each other."""
    some = AT_ONCE // LEADERS
    pairs = [near(rows[start : start + some, None], leaders, threshold) for start in range(0, len(rows.numbers), some)]
    for column in (0, VALUES // 2):  # rows that are apart in one order may be neighbours in the other
        ordered = rows[np.lexsort((rows.numbers, *rows.marks.T[column : column + ORDERED][::-1]))]
        for start in range(0, len(rows.numbers), AT_ONCE):
            part = ordered[max(0, start - NEIGHBOURS) : start + AT_ONCE]
            pairs += [near(part[after:], part[:-after], threshold) for after in range(1, NEIGHBOURS + 1)]
    return np.concatenate(pairs)


def near(rows: Sketched, others: Sketched, threshold: float) -> np.ndarray:
    """Of pairs of rows, packed, those that may resemble each other, by estimate and by the sizes of their sets."""
    equal = equal_values(rows.marks, others.marks)
    likely = (equal >= least_equal(threshold)) & (rows.numbers != others.numbers)
    for part in range(rows.sizes.shape[-1]):
        size, other = rows.sizes[..., part], others.sizes[..., part]
        likely &= np.minimum(size, other) >= threshold * np.maximum(size, other)
    row, better = np.maximum(rows.numbers, others.numbers), np.minimum(rows.numbers, others.numbers)
    return packed(row, better, equal, LOCAL_BITS)[likely]


def packed(row: np.ndarray, better: np.ndarray, equal: np.ndarray, bits: int) -> np.ndarray:
    """Pairs as numbers, uint64, that are sorted by row, by closeness, and by the better row, which has so many bits. To
    sort numbers takes a third of the time of sorting their places. All that is given is uint64."""
    apart = np.uint64(VALUES) - equal
    return ((row << np.uint64(8) | apart) << np.uint64(bits)) | better


def closest(pairs: np.ndarray, bits: int, threshold: float) -> np.ndarray:
    """Of packed pairs, which are sorted in place, those to compare as ``PAIR`` records: see :func:`worth_it`."""
    pairs.sort()
    pairs = pairs[np.concatenate([[True], pairs[1:] != pairs[:-1]])[: len(pairs)]]
    row, better = (pairs >> np.uint64(bits + 8)).astype(np.uint32), (pairs & np.uint64(2**bits - 1)).astype(np.uint32)
    equal = VALUES - (pairs >> np.uint64(bits)).astype(np.uint8)
    wanted = np.ones(len(pairs), bool)
    wanted[COMPARED:] = row[COMPARED:] != row[:-COMPARED]
    likely = np.flatnonzero(equal >= VALUES * threshold)
    if len(likely):
        starts, ends = buckets(row[likely])
        best = np.minimum.reduceat(better[likely], starts)
        wanted[likely[better[likely] == np.repeat(best, ends - starts)]] = True
    records = np.empty(int(wanted.sum()), PAIR)
    records["row"], records["better"], records["equal"] = row[wanted], better[wanted], equal[wanted]
    return records


def worth_it(pairs: np.ndarray, threshold: float) -> np.ndarray:
    """Of ``PAIR`` records [pairs] those to compare, each once, sorted by row, of each row the closest first: for each
    row those COMPARED of the highest estimates, and the best row of those whose estimate is at the threshold. What is
    chosen of some pairs first, and then together with others, is what is chosen of all at once."""
    chosen = [np.empty(0, PAIR)]
    blocks = int(pairs["row"].max(initial=0) >> BLOCK_BITS) + 1
    for block in range(blocks):
        some = pairs if blocks == 1 else pairs[pairs["row"] >> BLOCK_BITS == block]
        row, better, equal = (some[name].astype(np.uint64) for name in PAIR.names or ())
        row -= np.uint64(block << BLOCK_BITS)
        some = closest(packed(row, better, equal, 32), 32, threshold)
        some["row"] += block << BLOCK_BITS
        chosen.append(some)
    return np.concatenate(chosen)
