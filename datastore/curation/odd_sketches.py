"""Odd sketches of sets (Mitzenmacher, Pagh and Pham, 2014), by which pairs are ruled out without their members.

Each member of a set flips one of the sketch's bits. Where the sketches of two sets differ, at least one member is in
one of them alone. So the number of bits that differ is a bound of the sets' difference that always holds, and with it
one of their similarity."""

import numpy as np
import pyarrow as pa

BITS = 3
"""Bits for each member, at least. With fewer, members of one set alone meet in a bit, and fewer pairs are ruled out."""
WORDS_AT_ONCE = 2**18
"""Words of sketches, of 64 bits, that are compared at once."""


def words_of(sizes: np.ndarray) -> np.ndarray:
    """How many words of 64 bits the sketches of sets take, by the sizes of the sets: a power of two, int64."""
    words = np.maximum(1, -(-BITS * sizes.astype(np.int64) // 64))
    return 1 << np.ceil(np.log2(words)).astype(np.int64)


def odd_sketches(sets: list[np.ndarray], parts: int) -> pa.Array:
    """The sketches of the sets of rows' parts, from their hashes, uint64: a list of words for each row, that of its
    first part first."""
    sizes = np.array([len(members) for members in sets], np.int64)
    words = words_of(sizes)
    ends = np.cumsum(words)
    bit = np.concatenate([np.empty(0, np.uint64), *sets]) & np.repeat((64 * words - 1).astype(np.uint64), sizes)
    counts = np.bincount(bit.astype(np.int64) + np.repeat(64 * (ends - words), sizes), minlength=64 * words.sum())
    packed = np.packbits((counts & 1).astype(np.uint8), bitorder="little").view(np.uint64)
    return pa.ListArray.from_arrays(pa.array(np.concatenate([[0], ends[parts - 1 :: parts]]), pa.int32()), packed)


def most_similar(
    words: np.ndarray, starts: np.ndarray, others: np.ndarray, sizes: np.ndarray, other_sizes: np.ndarray
) -> np.ndarray:
    """What the Jaccard similarity of each pair is at most, of the part where it is least, float64 [pairs]. ``starts``
    and ``others`` say where in ``words`` the sketches of a pair's rows begin; the sizes are of their sets, [pairs,
    parts]."""
    most, starts, others = np.ones(len(starts)), starts.copy(), others.copy()
    for size, other in zip(sizes.T.astype(np.int64), other_sizes.T.astype(np.int64), strict=True):
        own, its = words_of(size), words_of(other)
        apart = np.zeros(len(most), np.int64)
        for lengths in np.unique(own << 32 | its).tolist():
            length, other_length = lengths >> 32, lengths & 2**32 - 1
            alike = np.flatnonzero((own == length) & (its == other_length))
            step = max(1, WORDS_AT_ONCE // max(length, other_length))
            for some in (alike[start : start + step] for start in range(0, len(alike), step)):
                shortest = min(length, other_length)
                differ = _folded(words, starts[some], length, shortest)
                differ ^= _folded(words, others[some], other_length, shortest)
                apart[some] = np.bitwise_count(differ).sum(1, dtype=np.int64)
        shared = (size + other - apart) // 2
        union = size + other - shared
        most = np.minimum(most, np.where(union > 0, shared / np.maximum(union, 1), 1.0))
        starts += own
        others += its
    return most


def _folded(words: np.ndarray, starts: np.ndarray, length: int, shortest: int) -> np.ndarray:
    """The sketches that begin at ``starts`` and are so long, of so many words as the shorter one of the pair would
    have had, uint64 [pairs, shortest]."""
    sketches = words[starts[:, None] + np.arange(length)]
    return np.bitwise_xor.reduce(sketches.reshape(len(starts), -1, shortest), axis=1)
