"""Parts of a Parquet footer: the metadata of a few row groups, without parsing that of all others.

The footer of a large file has thousands of row groups, and to read one row all of them are parsed, about 14 ms a MiB. A
footer is a Thrift structure: what comes before the list of row groups, the row groups one after the other, and what
comes after them. The first part, some of the groups and the last part are the footer of a file with these groups alone.
Where the groups begin is found once, by the bytes that each begins with, and proved by comparing each part, as Arrow
reads it, with the same row group of the whole footer.
"""

import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_LIST = 0x19
"""A list in Thrift's compact form, in the field after the last one."""
_STRUCT = 0xC
_END = re.compile(rb"\0\x19[\x1c\x2c\x3c\x4c\x5c\x6c\x7c]\x18")
"""The end of the last row group, and the list of key and value pairs after it."""


class Layout(NamedTuple):
    """Offsets in a data file: where its footer begins, where its list of row groups begins and ends, and where the
    footer ends."""

    start: int
    groups: int
    tail: int
    end: int


def split(file: pa.NativeFile, whole: pq.FileMetaData) -> tuple[Layout, np.ndarray] | None:
    """Where the parts of a file's footer are: its layout, and offsets in the file at which the row groups begin, with
    the end of the last one (int64, one more than row groups). None if they cannot be told for certain."""
    size = file.size()
    (length,) = struct.unpack("<I", file.read_at(4, size - 8))
    start = size - 8 - length
    footer = file.read_at(length, start)
    count = whole.num_row_groups
    begins = [match.start() for match in re.finditer(re.escape(_list(whole.num_columns)) + b"\x26", footer)][:count]
    if len(begins) != count or not count:
        return None
    head = begins[0] - len(_list(count))
    last = footer[begins[-1] :]
    for end in [match.start() + 1 for match in re.finditer(_END, last)]:
        bounds = [*begins, begins[-1] + end]
        if _equal(footer, head, bounds, whole):
            return Layout(start, start + head, start + bounds[-1], size - 8), np.array(bounds, np.int64) + start
    return None


def part(file: pa.NativeFile, layout: Layout, groups: Sequence[tuple[int, int]]) -> pq.FileMetaData:
    """The metadata of these row groups of a file alone. ``groups``: offset and size of each. Raises ArrowException if
    there are none at these offsets."""
    head = file.read_at(layout.groups - layout.start, layout.start)
    tail = file.read_at(layout.end - layout.tail, layout.tail)
    return _parsed(head, [file.read_at(size, offset) for offset, size in groups], tail)


def _equal(footer: bytes, head: int, bounds: list[int], whole: pq.FileMetaData) -> bool:
    """Whether the parts of a footer are these. Every other group is read together: if one began or ended elsewhere, it
    would not be followed by the beginning of a group."""
    parts = [footer[begin:end] for begin, end in pairwise(bounds)]
    tail = footer[bounds[-1] :]
    try:
        last = _parsed(footer[:head], parts[-1:], tail)
        if not last.row_group(0).equals(whole.row_group(len(parts) - 1)):
            return False
        if not last.schema.equals(whole.schema) or last.metadata != whole.metadata:
            return False
        for first in range(min(2, len(parts))):
            some = _parsed(footer[:head], parts[first::2], tail)
            numbers = range(first, len(parts), 2)
            if some.num_row_groups != len(numbers):
                return False
            if not all(some.row_group(at).equals(whole.row_group(number)) for at, number in enumerate(numbers)):
                return False
    except (pa.ArrowException, OSError):
        return False
    return True


def _parsed(head: bytes, groups: Sequence[bytes], tail: bytes) -> pq.FileMetaData:
    footer = b"".join((head, _list(len(groups)), *groups, tail))
    return pq.read_metadata(pa.BufferReader(b"".join((_MAGIC, footer, struct.pack("<I", len(footer)), _MAGIC))))


def _list(length: int) -> bytes:
    """How a list of so many structures begins."""
    if length < 15:
        return bytes([_LIST, length << 4 | _STRUCT])
    out = bytearray([_LIST, 0xF0 | _STRUCT])
    while length >= 128:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)
