"""Token ids as UTF-8 in which every token has its exact place, whatever bytes the policy sampled."""

from dataclasses import dataclass

import numpy as np

from agentrl.datastore.artifacts.tokenizers import UNKNOWN, TokenBytes


@dataclass(frozen=True)
class Decoded:
    """``text`` is UTF-8, in which a byte that belongs to no character is the replacement character. ``start`` and
    ``length`` [tokens] are in its bytes; ``joined`` [tokens]: the token starts inside a character."""

    text: bytes
    start: np.ndarray
    length: np.ndarray
    joined: np.ndarray


def decoded(tokenizer: TokenBytes, ids: np.ndarray) -> Decoded:
    text, bounds = tokenizer.text(ids)
    stray = _stray(text)
    if len(stray):
        text, moved = _replaced(text, stray)
        bounds = bounds + moved[bounds]
    start, length = bounds[:-1], np.diff(bounds)
    first = np.append(np.frombuffer(text, np.uint8), np.uint8(0))[start]
    return Decoded(text, start, length, (first & 0xC0 == 0x80) & (length > 0))


def _stray(raw: bytes) -> np.ndarray:
    """Places of the bytes that belong to no character."""
    try:
        raw.decode()
        return np.zeros(0, dtype=np.int64)
    except UnicodeDecodeError:
        codes = np.frombuffer(raw.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass"), np.uint32)
    stray = (codes >= 0xDC80) & (codes <= 0xDCFF)
    sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    sizes[stray] = 1
    return (np.cumsum(sizes) - sizes)[stray]


def _replaced(raw: bytes, stray: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The bytes with the replacement character at ``stray``, and by how much each place, and the end, moved."""
    wide = np.ones(len(raw), dtype=np.int64)
    wide[stray] = len(UNKNOWN)
    places = np.concatenate([[0], np.cumsum(wide)])
    made = np.repeat(np.frombuffer(raw, np.uint8), wide)
    for offset, byte in enumerate(UNKNOWN):
        made[places[stray] + offset] = byte
    return made.tobytes(), places - np.arange(len(places))
