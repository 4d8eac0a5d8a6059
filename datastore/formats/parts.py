"""Files cut into parts that can be read on their own."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from agentrl.datastore.formats.raw import BUFFER
from agentrl.datastore.formats.scan import ends
from agentrl.datastore.formats.source import Row, Source, Stretch

if TYPE_CHECKING:
    from agentrl.datastore.formats.workers import File

PART_SIZE = 2**23
"""Bytes of files in a part, about."""
LEAST_OF_A_ROW = 2**11
"""Bytes that a row of Parquet counts at least."""
MOST_FILES = 256

Cut: TypeAlias = Callable[[Source], Iterator[Stretch] | None]
"""Gives parts of a file that can be read on their own, None if it has none."""


class Part(NamedTuple):
    """``files`` files from the number ``first`` on; ``span`` is what is read of a single one, None all of it."""

    first: int
    files: int = 1
    span: Stretch | None = None


def parts(files: "Sequence[File]") -> Iterator[Part]:
    """All files in order: large ones in parts if their format can be cut, small ones together."""
    first = size = 0
    for number, (source, format) in enumerate(files):
        own = source.path.stat().st_size
        spans = format.cut(source) if format.cut and (own > PART_SIZE or source.kind == "folder") else None
        if number > first and (spans or size + own > PART_SIZE or number - first == MOST_FILES):
            yield Part(first, number - first)
            first, size = number, 0
        size += own
        if spans:
            yield from (Part(number, 1, span) for span in spans)
            first, size = number + 1, 0
    if first < len(files):
        yield Part(first, len(files) - first)


def by_record(source: Source) -> Iterator[Stretch] | None:
    """Parts of JSON Lines, arrays and Parquet whose records are rows of their own; None if the file cannot be cut."""
    if source.kind == "lines" and not source.compressed:
        return lines(source)
    if source.kind == "array":
        return of_list(source)
    return _row_groups(source) if source.kind == "parquet" else None


def lines(source: Source) -> Iterator[Stretch]:
    """Whole lines of about :data:`PART_SIZE`."""
    start = before = 0
    with source.path.open("rb", buffering=0) as file:
        buffer = bytearray(PART_SIZE)
        stop = count = 0
        while size := file.readinto(buffer):
            end = buffer.rfind(b"\n", 0, size) + 1
            if end:
                count += buffer.count(b"\n", 0, end)
                yield Stretch(start, stop + end, before)
                start, before, count = stop + end, before + count, 0
            stop += size
    if start < stop:
        yield Stretch(start, stop, before)


def of_list(source: Source, key: str = "", needed: Sequence[str] = ()) -> Iterator[Stretch] | None:
    """Parts of an array, or of the list ``key`` of a document, if the members that are ``needed`` stand before it."""
    start = None if source.compressed else source.list_start(key, needed)
    return None if start is None else _of_list(source, start)


def _of_list(source: Source, start: int) -> Iterator[Stretch]:
    before, size = 0, source.path.stat().st_size
    with source.path.open("rb", buffering=0) as file:
        for stop, number, last in ends(file, start, PART_SIZE):
            yield Stretch(start, stop, before)
            start, before = (size if last else stop + 1), number
    if start < size:  # the list has no end, as whoever reads this part says
        yield Stretch(start, size, before)


def between(source: Source, keys: Callable[[bytes], Iterable[bytes]]) -> Iterator[Stretch] | None:
    """Parts of JSON Lines between which no group of lines is open; ``keys`` gives the groups that a line belongs to.
    None if the file cannot be cut. Memory holds some numbers per line and group."""
    if source.kind != "lines" or source.compressed:
        return None
    ends = array("q", [0])
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    with source.path.open("rb", buffering=BUFFER) as file:
        for number, line in enumerate(file):
            ends.append(ends[-1] + len(line))
            for key in map(hash, keys(line)):
                first.setdefault(key, number)
                last[key] = number
    opened = np.zeros(len(ends), np.int64)
    np.add.at(opened, np.fromiter(first.values(), np.int64), 1)
    np.add.at(opened, np.fromiter(last.values(), np.int64), -1)
    closed = 1 + np.flatnonzero(np.cumsum(opened)[:-1] == 0)
    return _at(ends, closed.tolist())


def _at(ends: Sequence[int], places: Iterable[int]) -> Iterator[Stretch]:
    """Spans that end at some of the places, from the ends of all lines."""
    start = 0
    for index in places:
        if ends[index] - ends[start] >= PART_SIZE:
            yield Stretch(ends[start], ends[index], start)
            start = index
    if ends[start] < ends[-1]:
        yield Stretch(ends[start], ends[-1], start)


def in_parts(source: Source, cut: Cut, read: Callable[[Source], Iterator[Row]]) -> Iterator[Row]:
    """The rows of a file, read part by part, so that memory holds one part."""
    if source.span or source.path.stat().st_size <= PART_SIZE:
        yield from read(source)
        return
    try:
        for span in cut(source) or [None]:
            source.span = span
            yield from read(source)
    finally:
        source.span = None


def _row_groups(source: Source) -> Iterator[Stretch] | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
            # a text that many rows share is in the file once, and in each of them when it is read
            sizes = [(max(group.total_byte_size, LEAST_OF_A_ROW * group.num_rows), group.num_rows) for group in groups]
    except pa.ArrowException:
        return None  # what reads it says why
    return grouped(sizes)


def grouped(sizes: Iterable[tuple[int, int]]) -> Iterator[Stretch]:
    """Spans of neighbours of about :data:`PART_SIZE` together, from bytes and records of each."""
    start = stop = size = before = count = 0
    for stop, (own, records) in enumerate(sizes, 1):
        size += own
        count += records
        if size >= PART_SIZE:
            yield Stretch(start, stop, before)
            start, size, before, count = stop, 0, before + count, 0
    if start < stop:
        yield Stretch(start, stop, before)
