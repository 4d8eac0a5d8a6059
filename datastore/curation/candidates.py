"""Which pairs of rows are worth a comparison: of each bucket, and then of each row. What is chosen depends on the rows
alone, never on their order, on other buckets, or on how work is divided."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentrl.datastore.curation.sketches import VALUES, equal_values

CROWDED = 32
"""Rows of a bucket of which all pairs are estimated. In a larger one each row is estimated against the LEADERS that
rank best, and against the NEIGHBOURS on either side of it in the order of the sketches' values. Rows of a crowd mostly
share several crowded buckets, so few of each suffice."""
LEADERS = 4
NEIGHBOURS = 2
ORDERED = 16
"""Values of a sketch by which the rows of a crowded bucket are ordered, twice: from the first value, and the middle."""
COMPARED = 8
"""Better rows that a row is compared with at most: those of the highest estimates. A row that may resemble one more
surely is compared with the best of these too."""

AT_ONCE = 2**12
"""Pairs of sketches that are compared at once: they fit a cache of the processor."""
BITS = 28
"""Of the number of a row. As many rows can be compared at once."""

PAIR = np.dtype([("row", np.uint32), ("better", np.uint32)])
"""A row and a better one."""


@dataclass(frozen=True)
class Entries:
    """Rows that share a bucket, bucket by bucket, and in each from best to worst: the key of the bucket and the number
    of the row, uint64 [entries], the lower the better; the low bytes of the row's sketch, uint8 [entries, VALUES]; and
    the sizes of its sets, uint32 [entries, parts]."""

    keys: np.ndarray
    numbers: np.ndarray
    marks: np.ndarray
    sizes: np.ndarray


def ascending(numbers: np.ndarray) -> np.ndarray:
    """uint64 [numbers], sorted. Polars takes a fifth of NumPy's time, and to import it takes a worker as long as NumPy
    needs for two million numbers."""
    if len(numbers) < 2**21 and "polars" not in sys.modules:
        return np.sort(numbers)
    import polars as pl

    return pl.Series(numbers, dtype=pl.UInt64).sort().to_numpy()


def filed(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The entries of rows [rows] under keys, uint64 [rows, keys], packed: the high bits of the key, which name a
    bucket, and the number of the row. Sorted they are bucket by bucket, and in each from best to worst. Two keys have
    the same high bits with a chance of 2^-36; their rows are estimated in vain."""
    return keys & np.uint64(2**64 - 2**BITS) | rows[:, None]


def slice_of(entries: np.ndarray, part: int, parts: int) -> slice:
    """Where the entries of a part of all keys are, in sorted ones. No bucket is in two parts."""
    limits = [np.uint64(-(-(number << 32) // parts) << 32) for number in (part, part + 1) if number < parts]
    return slice(*np.searchsorted(entries, limits), *([len(entries)] if part + 1 == parts else []))


def shared(entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The keys and the numbers of those in a bucket of two rows or more, bucket by bucket; ``entries`` are sorted in
    place."""
    entries.sort(kind="stable")  # which merges runs that are sorted
    key = entries >> np.uint64(BITS)
    alike = np.concatenate([key[1:] == key[:-1], [False]])
    alike[1:] |= alike[:-1].copy()
    return key[alike], entries[alike] & np.uint64(2**BITS - 1)


def least_equal(threshold: float) -> int:
    """The number of equal values from which on a pair is compared: three standard errors below the threshold."""
    return max(0, int(np.ceil(VALUES * threshold - 3 * (VALUES * threshold * (1 - threshold)) ** 0.5)))


def bucket_pairs(entries: Entries, threshold: float) -> Iterator[np.ndarray]:
    """The pairs of rows of a bucket that may resemble each other, packed; of a crowded one some of all pairs."""
    for places, others in _pairs(entries):
        for start in range(0, len(places), AT_ONCE):
            yield near(entries, places[start : start + AT_ONCE], others[start : start + AT_ONCE], threshold)


def _pairs(entries: Entries) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places of entries, and of better ones of their buckets."""
    first, ends = buckets(entries.keys)
    sizes = ends - first
    for size in np.unique(np.minimum(sizes, CROWDED + 1)).tolist():
        begin = first[sizes == size if size <= CROWDED else sizes > CROWDED, None]
        own, other = np.tril_indices(size if size <= CROWDED else LEADERS, -1)
        step = max(1, AT_ONCE // len(own))
        for start in range(0, len(begin), step):
            yield (begin[start : start + step] + own).ravel(), (begin[start : start + step] + other).ravel()
    if (sizes > CROWDED).any():
        starts = np.repeat(np.where(sizes > CROWDED, first, len(entries.keys)), sizes)
        yield from _crowd_pairs(entries, starts)


def _crowd_pairs(entries: Entries, starts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of crowded buckets each row with those that rank best, and with its neighbours."""
    places = np.flatnonzero(np.arange(len(starts)) >= starts + LEADERS)
    yield np.repeat(places, LEADERS), (starts[places, None] + np.arange(LEADERS)).ravel()
    places = np.flatnonzero(starts < len(starts))
    for column in (0, VALUES // 2):  # rows that are apart in one order may be neighbours in the other
        marks = entries.marks[:, column : column + ORDERED].take(places, 0)
        order = places[np.lexsort((*marks.view(">u8").astype(np.uint64).T[::-1], starts[places]))]
        for after in range(1, NEIGHBOURS + 1):
            own, other = order[after:], order[:-after]
            alike = starts[own] == starts[other]
            own, other = own[alike], other[alike]
            yield np.maximum(own, other), np.minimum(own, other)


def buckets(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal keys begin and end, in sorted keys."""
    edges = np.flatnonzero(np.diff(keys)) + 1
    return np.concatenate([[0], edges])[: len(keys)], np.concatenate([edges, [len(keys)]])[-len(edges) - 1 :]


def near(entries: Entries, places: np.ndarray, others: np.ndarray, threshold: float) -> np.ndarray:
    """Of pairs of entries, each with a better one, packed, those that may resemble each other, by estimate and by the
    sizes of their sets."""
    equal = equal_values(entries.marks.take(places, 0), entries.marks.take(others, 0))
    likely = equal >= least_equal(threshold)
    for size in entries.sizes.T:
        own, other = size.take(places), size.take(others)
        likely &= np.minimum(own, other) >= threshold * np.maximum(own, other)
    chosen = np.flatnonzero(likely)
    return packed(entries.numbers.take(places[chosen]), entries.numbers.take(others[chosen]), equal[chosen])


def packed(row: np.ndarray, better: np.ndarray, equal: np.ndarray) -> np.ndarray:
    """Pairs as numbers, uint64, that are sorted by row, by closeness, and by the better row. To sort numbers takes a
    third of the time of sorting their places."""
    return (row << np.uint64(8) | (np.uint64(VALUES) - equal)) << np.uint64(BITS) | better


def unpacked(pairs: np.ndarray) -> np.ndarray:
    """``PAIR`` records of packed pairs."""
    records = np.empty(len(pairs), PAIR)
    records["row"], records["better"] = pairs >> np.uint64(BITS + 8), pairs & np.uint64(2**BITS - 1)
    return records


def worth_it(pairs: np.ndarray, threshold: float) -> np.ndarray:
    """Of packed pairs those to compare, each once, sorted by row, of each row the closest first: for each row those
    COMPARED of the highest estimates, and the best row of those whose estimate is at the threshold. What is chosen of
    some pairs first, and then together with others, is what is chosen of all at once."""
    pairs = ascending(pairs)
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
