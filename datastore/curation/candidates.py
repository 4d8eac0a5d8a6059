"""Which pairs of rows are worth a comparison: of each bucket, and then of each row. What is chosen depends on the rows
alone, never on their order, on other buckets, or on how work is divided."""

import numpy as np

from agentrl.datastore.curation.sketches import VALUES, similarity

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

PAIR = np.dtype([("row", np.uint32), ("better", np.uint32), ("equal", np.uint8)])
"""A row, a better one, and how many values of their sketches are equal."""


def least_equal(threshold: float) -> int:
    """The number of equal values from which on a pair is compared: three standard errors below the threshold."""
    return max(0, int(np.ceil(VALUES * threshold - 3 * (VALUES * threshold * (1 - threshold)) ** 0.5)))


def bucket_pairs(keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Pairs of numbers of ``rows`` [entries] that share a key [entries], [pairs, 2], each once, the better one last.
    The lower a row's number, the better it is. Rows of large buckets come by :func:`crowd` instead."""
    first, ends = buckets(keys)
    sizes = ends - first
    pairs = [np.empty((0, 2), rows.dtype)]
    for size in np.unique(sizes[(sizes > 1) & (sizes <= CROWDED)]).tolist():
        members = np.sort(rows[first[sizes == size][:, None] + np.arange(size)], 1)
        worse, better = np.tril_indices(size, -1)
        pairs.append(np.column_stack([members[:, worse].ravel(), members[:, better].ravel()]))
    return np.concatenate(pairs)


def buckets(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal keys begin and end, in sorted keys."""
    edges = np.flatnonzero(np.diff(keys)) + 1
    return np.concatenate([[0], edges])[: len(keys)], np.concatenate([edges, [len(keys)]])[-len(edges) - 1 :]


def crowd(members: np.ndarray, start: int, end: int, marks: np.ndarray) -> np.ndarray:
    """Pairs of the rows ``start`` to ``end`` of a crowded bucket, [pairs, 2] as above. ``members`` are the numbers of
    all its rows, sorted, and ``marks`` the low bytes of their sketches [end - start, VALUES]."""
    some = members[start:end]
    leaders, led = np.meshgrid(members[:LEADERS], some)
    pairs = [np.column_stack([led[led > leaders], leaders[led > leaders]])]
    for column in (0, VALUES // 2):  # rows that are apart in one order may be neighbours in the other
        ordered = some[np.lexsort((some, *marks.T[column : column + ORDERED][::-1]))]
        for distance in range(1, NEIGHBOURS + 1):
            both = np.column_stack([ordered[distance:], ordered[:-distance]])
            pairs.append(np.column_stack([both.max(1), both.min(1)]))
    return np.concatenate(pairs)


def worth_it(pairs: np.ndarray, threshold: float) -> np.ndarray:
    """Of ``PAIR`` records [pairs] those to compare, each once, sorted by row: for each row those COMPARED of the
    highest estimates, and the best row of those whose estimate is at the threshold."""
    pairs = each_once(pairs)
    closest = np.argsort((pairs["row"].astype(np.uint64) << np.uint64(8)) + (VALUES - pairs["equal"]), kind="stable")
    rank = np.empty(len(pairs), np.int64)
    starts, ends = buckets(pairs["row"])
    rank[closest] = np.arange(len(pairs)) - np.repeat(starts, ends - starts)
    likely = np.flatnonzero(pairs["equal"] >= VALUES * threshold)
    _, best = np.unique(pairs["row"][likely], return_index=True)  # the first of each row is the best
    wanted = rank < COMPARED
    wanted[likely[best]] = True
    return pairs[wanted]


def each_once(pairs: np.ndarray) -> np.ndarray:
    """``PAIR`` records sorted by row and better row, each once."""
    both = (pairs["row"].astype(np.uint64) << np.uint64(32)) + pairs["better"]
    _, first = np.unique(both, return_index=True)
    return pairs[first]


def estimated(pairs: np.ndarray, marks: np.ndarray, least: int) -> np.ndarray:
    """``PAIR`` records of pairs [pairs, 2] whose estimates are not below ``least``. ``marks`` are the low bytes of the
    sketches of all rows that pairs name."""
    equal = similarity(marks, pairs[:, 0], pairs[:, 1])
    near = equal >= least
    records = np.empty(int(near.sum()), PAIR)
    records["row"], records["better"], records["equal"] = pairs[near, 0], pairs[near, 1], equal[near]
    return records
