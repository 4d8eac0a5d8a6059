"""Sketches of sets, by which similar ones are found: each value of two sketches is equal with a chance that is the
Jaccard similarity of their sets.

They are made by fast similarity sketching (Dahlgaard, Knudsen and Thorup, 2017): in each round each member falls into
one of the sketch's values, which keeps the least hash of the first round that reached it. Large sets need two rounds,
where MinHash hashes each member once for each value. All constants are fixed, so sketches can be kept."""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

VALUES = 128
"""Values of a sketch. An estimate of the similarity s has a standard error of at most (s (1 - s) / VALUES)^.5."""
FOUND = 0.95
"""Chance, at least, that a pair whose similarity is the threshold shares a band. Pairs that are more similar are found
more often: at a threshold of 0.8, of pairs at 0.85 all but one in 500."""
EMPTY = 2**32 - 1
ROWS_AT_ONCE = 1024
ROUNDS = 2 * VALUES
PART = 0x9E3779B97F4A7C15
"""What is added to the members of a part, times the number of the part."""


def _constants(name: str, count: int) -> np.ndarray:
    return np.array([xxh3_64_intdigest(f"{name} {number}".encode()) | 1 for number in range(count)], np.uint64)


_FACTOR, _TERM = _constants("factor", ROUNDS), _constants("term", ROUNDS)
_BAND, _MIX = _constants("band", VALUES), np.uint64(0xFF51AFD7ED558CCD)


def sketches(rows: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """The sketch of each row, uint32 [rows, VALUES], from the hashes of its parts' members, uint64. Equal members of
    two parts are two members. All values of a row without members are :data:`EMPTY`."""
    sizes = np.array([sum(map(len, parts)) for parts in rows], np.int64)
    members = [part + np.uint64(number * PART % 2**64) for parts in rows for number, part in enumerate(parts)]
    left = np.concatenate([np.empty(0, np.uint64), *members]) >> np.uint64(32)
    values = np.full(len(rows) * VALUES, EMPTY, np.uint32)
    first = np.repeat(np.arange(len(rows)) * VALUES, sizes)
    for turn in range(ROUNDS):
        hashed = (left * _FACTOR[turn] + _TERM[turn]) >> np.uint64(32)  # multiply-shift (Dietzfelbinger, 1996)
        column = (hashed >> np.uint64(25)).astype(np.int64) if turn < VALUES else np.int64(turn - VALUES)
        least = (hashed & np.uint64(2**24 - 1)).astype(np.uint32) | np.uint32(turn << 24)
        least -= least == EMPTY
        np.minimum.at(values, first + column, least)
        unfinished = (values.reshape(-1, VALUES) == EMPTY).any(1)[first // VALUES]
        left, first = left[unfinished], first[unfinished]
        if not len(left):
            break
    return values.reshape(-1, VALUES)


def bands(threshold: float) -> tuple[int, int]:
    """(bands, values of each): the widest bands by which a pair at the threshold is found with a chance of
    :data:`FOUND`. Narrower ones would give more candidates that are none."""
    for width in range(VALUES, 1, -1):
        number = VALUES // width
        if 1 - (1 - threshold**width) ** number >= FOUND:
            return number, width
    return VALUES, 1


def band_keys(sketched: np.ndarray, scopes: np.ndarray, number: int, width: int) -> np.ndarray:
    """A key for each band of each sketch [rows, VALUES], uint64 [rows, number]: rows of one scope [rows] whose sketches
    are equal in a band share a key, others with a chance of about 2^-64. Keys are sums of values times random
    odd numbers modulo 2^64, mixed as in MurmurHash3."""
    keys, factors = np.empty((len(sketched), number), np.uint64), _BAND[: number * width].reshape(number, width)
    for start in range(0, len(sketched), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        values, key = sketched[rows, : number * width].astype(np.uint64), keys[rows]
        np.einsum("rbv,bv->rb", values.reshape(-1, number, width), factors, out=key)  # modulo 2^64
        key += scopes[rows, None]
        key ^= key >> np.uint64(32)
        key *= _MIX
        key ^= key >> np.uint64(32)
    return keys


def equal_values(marks: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How many values are equal in pairs of sketches, uint64 [..., pairs], by the low bytes of their values, uint8
    [..., pairs, VALUES]: of values that differ, one in 256 counts as equal."""
    same = (marks == others).view(np.uint64)
    bytewise = np.einsum("...j->...", same)  # no byte of a sum exceeds VALUES / 8
    bytewise *= np.uint64(0x0101010101010101)  # which sums its bytes in the highest one
    return bytewise >> np.uint64(56)


def jaccard(first: np.ndarray, other: np.ndarray) -> float:
    """The share of the members of two sorted sets that both have; 1 if both are empty."""
    if not len(first) or not len(other):
        return float(len(first) == len(other))
    both = np.concatenate([first, other])
    both.sort(kind="stable")  # which merges runs that are sorted
    shared = int(np.count_nonzero(both[1:] == both[:-1]))
    return shared / (len(both) - shared)
