"""Records of CSV and of Parquet, a bounded number at a time."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.raw import TooLongError

if TYPE_CHECKING:
    from agentrl.datastore.formats.source import Source

BATCH_ROWS = 256
DIGEST_ROWS = 4096


def csv_records(source: "Source") -> Iterator[dict[str, str]]:
    """The cells with text of each line, by the names in the first line. Raises ValueError if the file is no CSV."""
    import csv

    csv.field_size_limit(source.limit)
    with source.text() as text:
        delimiter = "\t" if ".tsv" in source.path.suffixes else ","
        rows = csv.DictReader(_bounded(text, source.limit), restkey="", delimiter=delimiter, strict=True)
        try:
            for row in rows:
                source.read_to += sum(len(cell or "") for cell in row.values())
                yield {name: cell for name, cell in row.items() if cell}
        except csv.Error as error:
            raise ValueError(f"is not CSV: {error}") from None


def _bounded(text: IO[str], limit: int) -> Iterator[str]:
    while line := text.readline(limit + 1):
        if len(line) > limit:
            raise TooLongError(limit)
        yield line


def parquet_records(source: "Source") -> Iterator[Any]:
    """Rows of the row groups that the source is about, as dicts; a TooLongError in place of one that is too long. A row
    group that cannot be read without more memory than a record may take is refused as a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            groups = range(file.num_row_groups) if source.span is None else range(source.span.start, source.span.stop)
            for group in groups:
                if problem := too_long(source.path, file.metadata, group, source.limit):
                    source.notes.refuse(f"{source.name}: row group {group}", problem)
                    source.number += file.metadata.row_group(group).num_rows
                    continue
                rows = batch_rows(source.path, file.metadata, group, source.limit)
                for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                    yield from _rows(source, batch)
    except pa.ArrowException as error:
        raise StoreError(f"{source.name} is no Parquet file that can be read: {error}") from None


def parquet_content(source: "Source") -> str:
    """Digest of the rows, or of the bytes if a row group cannot be read. Raises StoreError if the file is no
    Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from agentrl.datastore.storage.digest import parquet_digest

    try:
        with pq.ParquetFile(source.path) as file:
            numbers, metadata = range(file.num_row_groups), file.metadata
        if any(too_long(source.path, metadata, number, source.limit) for number in numbers):
            return hashlib.blake2b(source.path.read_bytes(), digest_size=16).hexdigest()
        rows = min((batch_rows(source.path, metadata, number, source.limit) for number in numbers), default=BATCH_ROWS)
        return parquet_digest(source.path, batch_rows=DIGEST_ROWS if rows == BATCH_ROWS else rows)
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{source.name} is no Parquet file that can be read: {error}") from None


def _rows(source: "Source", batch: Any) -> Iterator[Any]:
    if batch.nbytes <= source.limit:
        yield from source.pylist(batch)
        return
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        if row.nbytes > source.limit:
            yield TooLongError(source.limit)
        else:
            yield from source.pylist(row)


def too_long(path: Path, metadata: Any, group: int, limit: int) -> TooLongError | None:
    """Why a row group is not read: one of its pages, which are decompressed as a whole, takes more than ``limit``."""
    about = metadata.row_group(group)
    with path.open("rb") as file:
        for number in range(about.num_columns):
            column = about.column(number)
            if column.total_uncompressed_size > limit and any(size > limit for size in _pages(file, column)):
                return TooLongError(limit)
    return None


def batch_rows(path: Path, metadata: Any, group: int, limit: int) -> int:
    """How many rows to read at once, so that they take about ``limit`` at most: each value may be the whole dictionary
    of its column."""
    about = metadata.row_group(group)
    size = about.total_byte_size // max(1, about.num_rows)
    with path.open("rb") as file:
        for number in range(about.num_columns):
            column = about.column(number)
            if column.has_dictionary_page:
                size += next(_pages(file, column), 0)
    return max(1, min(BATCH_ROWS, limit // max(1, size)))


def _pages(file: IO[bytes], column: Any) -> Iterator[int]:
    """The decompressed size of each page of a column chunk, read from the headers of the pages."""
    starts = [column.data_page_offset, column.dictionary_page_offset]
    at = min(start for start in starts if start)
    end = at + column.total_compressed_size
    while at < end:
        file.seek(at)
        head, length = file.read(2**16), 2**16
        while True:
            try:
                sizes, after = _header(head)
                break
            except IndexError:  # minimum and maximum of a page may be long
                if len(head) < length:
                    return
                length *= 4
                file.seek(at)
                head = file.read(length)
        yield sizes.get(_UNPACKED, 0)
        at += after + sizes.get(_PACKED, 0)


_UNPACKED, _PACKED = 2, 3
"""Numbers of the fields of a page's header: its size before and after compression."""


def _header(data: bytes) -> tuple[dict[int, int], int]:
    """The whole numbers of a Thrift struct in the compact protocol by their field numbers, and where it ends. Raises
    IndexError if it goes on after the data."""
    numbers: dict[int, int] = {}
    at = field = 0
    while kind := data[at] & 15:
        delta, at = data[at] >> 4, at + 1
        if delta:
            field += delta
        else:
            zigzag, at = _varint(data, at)
            field = zigzag >> 1 ^ -(zigzag & 1)
        if kind in (4, 5, 6):
            zigzag, at = _varint(data, at)
            numbers[field] = zigzag >> 1 ^ -(zigzag & 1)
        else:
            at = _after(data, at, kind)
    return numbers, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _after(data: bytes, at: int, kind: int) -> int:
    """Where a value ends that begins at a place: true and false, byte, double, binary, list, set or struct."""
    match kind:
        case 1 | 2:
            return at
        case 3:
            return at + 1
        case 4 | 5 | 6:
            return _varint(data, at)[1]
        case 7:
            return at + 8
        case 8:
            length, at = _varint(data, at)
            return at + length
        case 9 | 10:
            count, inner, at = data[at] >> 4, data[at] & 15, at + 1
            if count == 15:
                count, at = _varint(data, at)
            for _ in range(count):
                at = at + 1 if inner in (1, 2) else _after(data, at, inner)
            return at
        case 12:
            return at + _header(data[at:])[1]
    raise IndexError(kind)
