"""Words of texts as hashes, and sets of word n-grams, for many texts at once.

A hash depends on the words alone: not on the process, the machine or the version of a library, so that what was made
of a text once can be kept. A word's hash is a polynomial of its bytes in UTF-8 (Karp and Rabin, 1987) modulo 2^64,
over random coefficients for bytes, mixed as in MurmurHash3. Two different n-grams have one hash with a probability of
2^-64, about.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from xxhash import xxh3_64_intdigest

AT_ONCE = 2**16
"""Bytes of text that are hashed at once: what is computed of them fits a cache of the processor."""
_BASE = 0x5851F42D4C957F2D
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_WORD = np.array([byte >= 128 or chr(byte).isalnum() or chr(byte) == "_" for byte in range(256)])
_LOWER = np.where(_WORD, np.frombuffer(bytes(range(256)).lower(), np.uint8), 0).astype(np.uint8)
"""Each byte of a text as it counts: in lower case, and 0 if it is of no word."""
_COEFFICIENT = np.array([0] + [xxh3_64_intdigest(f"byte {byte}".encode()) for byte in range(1, 256)], np.uint64)


def words(text: str) -> list[str]:
    """The words of a text in lower case: letters, digits and underscores of any script."""
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, n: int) -> np.ndarray:
    """Hashes of the word n-grams of a text, sorted and each once, uint64 [n-grams]; of a shorter text of the whole."""
    return shingles([text], n)[0]


def shingles(texts: Sequence[str], n: int) -> list[np.ndarray]:
    """:func:`ngrams` of each text."""
    hashes, counts = word_hashes(texts)
    mixed = np.zeros(max(0, len(hashes) - n + 1), np.uint64)
    for offset in range(n):
        mixed += hashes[offset : offset + len(mixed)] * _factor(offset)  # modulo 2^64
    sets, start = [], 0
    for count in counts.tolist():
        if count >= n:
            sets.append(_each_once(np.sort(mixed[start : start + count - n + 1])))
        else:
            whole = sum(int(word) * int(_factor(at)) for at, word in enumerate(hashes[start : start + count]))
            sets.append(np.array([whole % 2**64] if count else [], np.uint64))
        start += count
    return sets


def word_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of the words of all texts, uint64 [words], and how many words each text has [texts]."""
    hashes, counts = [np.empty(0, np.uint64)], np.zeros(len(texts), np.int64)
    for data, first, ends in _pieces(texts):
        starts, hashed = _hashed(data)
        hashes.append(hashed)
        before = np.concatenate([[0], np.searchsorted(starts, ends)])
        counts[first : first + len(ends)] += np.diff(before)
    return np.concatenate(hashes), counts


def _pieces(texts: Sequence[str]) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Bytes of texts as they count, of several texts or of a part of a long one; the number of the first text; and
    where each of them ends. No word is cut."""
    held: list[bytes] = []
    size = first = 0
    for number, text in enumerate(texts):
        data = (text if text.isascii() else " ".join(words(text))).encode() + b" "
        if held and size + len(data) > AT_ONCE:
            yield _joined(held, first)
            held, size, first = [], 0, number
        while len(data) > AT_ONCE:
            counted = _LOWER[np.frombuffer(data, np.uint8)]
            gaps = np.flatnonzero(counted[AT_ONCE - 1 :] == 0)  # there is one, at the end
            cut = AT_ONCE + int(gaps[0])
            yield counted[:cut], number, np.array([cut])
            data = data[cut:]
        held.append(data)
        size += len(data)
    if held:
        yield _joined(held, first)


def _joined(held: list[bytes], first: int) -> tuple[np.ndarray, int, np.ndarray]:
    return _LOWER[np.frombuffer(b"".join(held), np.uint8)], first, np.cumsum([len(data) for data in held])


def _hashed(counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each word of these bytes begins, and its hash. The last byte is of no word."""
    inside = counted != 0
    edges = np.flatnonzero(np.diff(inside, prepend=False))
    starts, ends = edges[::2], edges[1::2]
    powers, inverse = _powers(1 << max(16, len(counted).bit_length()))
    sums = np.zeros(len(counted) + 1, np.uint64)
    np.cumsum(_COEFFICIENT[counted] * powers[: len(counted)], out=sums[1:])  # modulo 2^64
    hashes = (sums[ends] - sums[starts]) * inverse[starts]
    hashes ^= hashes >> np.uint64(33)
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(33)
    return starts, hashes


@lru_cache(maxsize=1)
def _powers(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The powers of the base modulo 2^64 and of its inverse, of exponents below ``size``."""
    bases = np.array([_BASE, pow(_BASE, -1, 2**64)], np.uint64)
    powers = np.repeat(bases[:, None], size, 1)
    powers[:, 0] = 1
    forward, inverse = np.multiply.accumulate(powers, 1)
    return forward, inverse


def _each_once(values: np.ndarray) -> np.ndarray:
    """Sorted values, each once."""
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return values[new]


@lru_cache(maxsize=1024)
def _factor(offset: int) -> np.uint64:
    """An odd number for each place within an n-gram, so that the order of its words counts."""
    return np.uint64(xxh3_64_intdigest(f"place {offset}".encode()) | 1)
