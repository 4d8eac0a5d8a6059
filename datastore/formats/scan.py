"""Where the elements of a long JSON list end, found without reading them."""

from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

CHUNK = 2**20
_KINDS = np.zeros(256, np.int8)
_QUOTE, _BACKSLASH, _COMMA = 2, 3, 4
for _characters, _kind in ((b"[{", 1), (b"]}", -1), (b'"', _QUOTE), (b"\\", _BACKSLASH), (b",", _COMMA)):
    _KINDS[list(_characters)] = _kind
_NOTED = bytes(map(bool, _KINDS))


class End(NamedTuple):
    """The place of a comma between two elements, or of the bracket that ends the list."""

    place: int
    elements: int
    """How many elements are before it."""
    last: bool


def ends(file: IO[bytes], start: int, size: int) -> Iterator[End]:
    """Ends of elements of the list whose first element begins at ``start``, ``size`` bytes apart or little more, and
    the end of the list. What is between them is not checked to be JSON: if it is not, the ends may be at any comma, and
    the last one may be missing."""
    file.seek(start)
    depth = inside = elements = 0
    begun = offset = start
    while chunk := _unsplit(file):
        at = np.flatnonzero(np.frombuffer(chunk.translate(_NOTED), bool))
        kinds = _KINDS[np.frombuffer(chunk, np.uint8)[at]]
        quotes = (kinds == _QUOTE) & ~_escaped(at, kinds)
        within = (np.cumsum(quotes) + inside) % 2 == 1
        steps = np.where((np.abs(kinds) == 1) & ~within, kinds, 0)
        depths = np.cumsum(steps, dtype=np.int64) + depth
        closed = np.flatnonzero(depths < 0)
        stop = int(closed[0]) if len(closed) else len(at)
        commas = at[:stop][(kinds[:stop] == _COMMA) & ~within[:stop] & (depths[:stop] == 0)] + offset
        after = 0
        while (after := int(np.searchsorted(commas, begun + size))) < len(commas):
            begun = int(commas[after]) + 1
            yield End(begun - 1, elements + after + 1, False)
        elements += len(commas)
        if len(closed):
            yield End(offset + int(at[stop]), elements + 1, True)
            return
        if len(at):
            depth, inside = int(depths[-1]), int(within[-1])
        offset += len(chunk)


def _unsplit(file: IO[bytes]) -> bytes:
    """The next piece of a file, which does not end between a backslash and what it escapes."""
    chunk = file.read(CHUNK)
    while chunk.endswith(b"\\") and (more := file.read(1)):
        chunk += more
    return chunk


def _escaped(at: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    """Which characters have an odd number of backslashes right before them. ``at`` are the places of the characters
    that are noted, backslashes among them."""
    escaped = np.zeros(len(at), bool)
    index = np.flatnonzero(kinds == _BACKSLASH)
    if not len(index):
        return escaped
    first = np.ones(len(index), bool)  # of a run of backslashes
    first[1:] = np.diff(at[index]) != 1
    number = at[index] - at[index[first]][np.cumsum(first) - 1]
    after = index[number % 2 == 0] + 1
    after = after[after < len(at)]
    escaped[after[at[after] == at[after - 1] + 1]] = True
    return escaped
