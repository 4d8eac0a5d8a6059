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
BITS = 28
"""Of the number of a row. As many rows can be compared at once."""

PAIR = np.dtype([("row", np.uint32), ("better", np.uint32)])
"""A row and a better one."""


@dataclass(frozen=True)
class Entries:
    """Rows that share a bucket, bucket by bucket, and in each from best to worst: the number of the bucket and of the
    row, int64 [entries], the lower the better; the low bytes of the row's sketch, uint8 [entries, VALUES]; and the
    sizes of its sets, uint32 [entries, parts]."""

    bucket: np.ndarray
    number: np.ndarray
    marks: np.ndarray
    sizes: np.ndarray

    def __getitem__(self, chosen: Any) -> "Entries":
        if isinstance(chosen, slice):
            return Entries(self.bucket[chosen], self.number[chosen], self.marks[chosen], self.sizes[chosen])
        return Entries(*(values.take(chosen, 0) for values in (self.bucket, self.number, self.marks, self.sizes)))


def least_equal(threshold: float) -> int:
    """The number of equal values from which on a pair is compared: three standard errors below the threshold."""
    return max(0, int(np.ceil(VALUES * threshold - 3 * (VALUES * threshold * (1 - threshold)) ** 0.5)))


def bucket_pairs(entries: Entries, threshold: float) -> Iterator[np.ndarray]:
    """The pairs of rows of a bucket that may resemble each other, packed; of a crowded one some of all pairs."""
    first, ends = buckets(entries.bucket)
    sizes = ends - first
    for size in np.unique(sizes[sizes <= CROWDED]).tolist():
        starts, (own, other) = first[sizes == size], np.tril_indices(size, -1)
        some = max(1, AT_ONCE // len(own))
        for start in range(0, len(starts), some):
            begin = starts[start : start + some, None]
            yield near(entries[(begin + own).ravel()], entries[(begin + other).ravel()], threshold)
    crowded = np.repeat(sizes > CROWDED, sizes)
    if crowded.any():
        yield from _crowd_pairs(entries if crowded.all() else entries[np.flatnonzero(crowded)], threshold)


def _crowd_pairs(entries: Entries, threshold: float) -> Iterator[np.ndarray]:
    """Of crowded buckets each row with those that rank best, and with its neighbours."""
    first, ends = buckets(entries.bucket)
    leaders, some = np.repeat(first, ends - first)[:, None] + np.arange(LEADERS), AT_ONCE // LEADERS
    for start in range(0, len(leaders), some):
        rows = np.repeat(np.arange(start, min(start + some, len(leaders))), LEADERS)
        yield near(entries[rows], entries[leaders[start : start + some].ravel()], threshold)
    for column in (0, VALUES // 2):  # rows that are apart in one order may be neighbours in the other
        values = np.ascontiguousarray(entries.marks[:, column : column + ORDERED]).view(">u8").astype(np.uint64)
        order = np.lexsort((*values.T[::-1], entries.bucket))
        for start in range(0, len(order), AT_ONCE):
            part = entries[order[max(0, start - NEIGHBOURS) : start + AT_ONCE]]
            for after in range(1, NEIGHBOURS + 1):
                yield near(part[after:], part[:-after], threshold)


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


def near(rows: Entries, others: Entries, threshold: float) -> np.ndarray:
    """Of pairs of entries, packed, those of one bucket that may resemble each other, by estimate and by the sizes of
    their sets."""
    equal = equal_values(rows.marks, others.marks)
    likely = (equal >= least_equal(threshold)) & (rows.bucket == others.bucket) & (rows.number != others.number)
    for size, other in zip(rows.sizes.T, others.sizes.T, strict=True):
        likely &= np.minimum(size, other) >= threshold * np.maximum(size, other)
    chosen = np.flatnonzero(likely)
    own, other = rows.number[chosen], others.number[chosen]
    return packed(np.maximum(own, other), np.minimum(own, other), equal[chosen])


def packed(row: np.ndarray, better: np.ndarray, equal: np.ndarray) -> np.ndarray:
    """Pairs as numbers, uint64, that are sorted by row, by closeness, and by the better row. To sort numbers takes a
    third of the time of sorting their places."""
    apart = np.uint64(VALUES) - equal.astype(np.uint64)
    return ((row.astype(np.uint64) << np.uint64(8) | apart) << np.uint64(BITS)) | better.astype(np.uint64)


def unpacked(pairs: np.ndarray) -> np.ndarray:
    """``PAIR`` records of packed pairs."""
    records = np.empty(len(pairs), PAIR)
    records["row"], records["better"] = pairs >> np.uint64(BITS + 8), pairs & np.uint64(2**BITS - 1)
    return records


def worth_it(pairs: np.ndarray, threshold: float) -> np.ndarray:
    """Of packed pairs, which are sorted in place, those to compare, each once, sorted by row, of each row the closest
    first: for each row those COMPARED of the highest estimates, and the best row of those whose estimate is at the
    threshold. What is chosen of some pairs first, and then together with others, is what is chosen of all at once."""
    pairs.sort()
    pairs = pairs[np.concatenate([[True], pairs[1:] != pairs[:-1]])[: len(pairs)]]
    row = pairs >> np.uint64(BITS + 8)
    wanted = np.ones(len(pairs), bool)
    wanted[COMPARED:] = row[COMPARED:] != row[:-COMPARED]
    likely = np.flatnonzero((pairs >> np.uint64(BITS)).astype(np.uint8) <= VALUES - VALUES * threshold)
    if len(likely):
        better = pairs[likely] & np.uint64(2**BITS - 1)
        starts, ends = buckets(row[likely])
        best = np.minimum.reduceat(better, starts)
        wanted[likely[better == np.repeat(best, ends - starts)]] = True
    return pairs[wanted]
