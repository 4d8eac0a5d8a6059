"""Content digests of files, folders and tables.

A table's digest is over its values: the same rows give the same digest whatever the files' compression, row groups,
chunks or string width. Digests are BLAKE2b with 16 bytes, which practically never
collide by chance.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.schemas.trajectory import FINGERPRINT_IN_ID

BATCH_ROWS = 4096


def _hasher() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


def type_name(arrow_type: pa.DataType) -> str:
    """The type's name without what storage may change: offset width, dictionary encoding, nullability."""
    if pa.types.is_dictionary(arrow_type):
        return type_name(arrow_type.value_type)
    if pa.types.is_struct(arrow_type):
        return "struct<" + ",".join(f"{field.name}:{type_name(field.type)}" for field in arrow_type) + ">"
    if is_list(arrow_type):
        return f"list<{type_name(arrow_type.value_type)}>"
    if is_text(arrow_type):
        return "string" if "string" in str(arrow_type) else "binary"
    return str(arrow_type)


def is_list(arrow_type: pa.DataType) -> bool:
    return pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)


def is_text(arrow_type: pa.DataType) -> bool:
    return any(
        check(arrow_type)
        for check in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
        )
    )


class TableHasher:
    """Digest of a table fed batch by batch; how the rows are cut into batches does not matter. In ``renamed`` columns
    (``None``: in all) ids of trajectories count without the fingerprint in them."""

    def __init__(self, renamed: Collection[str] | None = ()) -> None:
        self._renamed = renamed
        self._streams: dict[str, hashlib.blake2b] = {}
        self._rows = 0

    def update(self, batch: pa.RecordBatch | pa.Table) -> None:
        batches = batch.to_batches() if isinstance(batch, pa.Table) else [batch]
        for part in batches:
            self._rows += part.num_rows
            for field, column in zip(part.schema, part.columns, strict=True):
                self._feed(f"{field.name}\0{type_name(field.type)}", column)

    def _stream(self, path: str, data: object) -> None:
        self._streams.setdefault(path, _hasher()).update(data)  # type: ignore[arg-type]

    def _feed(self, path: str, array: pa.Array) -> None:
        """Each leaf feeds three streams: which values are there, their lengths, their bytes."""
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        self._stream(path + "\0valid", array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False))
        if pa.types.is_struct(array.type):
            for field, child in zip(array.type, array.flatten(), strict=True):
                self._feed(f"{path}\0{field.name}", child)
        elif is_list(array.type):
            lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
            self._stream(path + "\0lengths", lengths.to_numpy(zero_copy_only=False))
            self._feed(path + "\0item", array.flatten())
        elif is_text(array.type):
            if self._renamed is None or path.partition("\0")[0] in self._renamed:
                array = without_fingerprints(array)
            wide = array.cast(pa.large_binary()).fill_null(b"")
            lengths = pc.binary_length(wide).cast(pa.int64()).to_numpy(zero_copy_only=False)
            self._stream(path + "\0lengths", lengths)
            self._stream(path + "\0bytes", b"")  # Arrow may or may not keep a buffer if all values are null
            if data := wide.buffers()[2]:
                start = pa.compute.binary_length(wide).sum().as_py() or 0
                first = memoryview(wide.buffers()[1]).cast("q")[wide.offset]
                self._stream(path + "\0bytes", memoryview(data)[first : first + start])
        elif pa.types.is_null(array.type):
            pass
        else:
            self._stream(path + "\0values", plain(array).to_numpy(zero_copy_only=False))

    def hexdigest(self) -> str:
        total = _hasher()
        total.update(str(self._rows).encode())
        for path in sorted(self._streams):
            total.update(path.encode() + b"\0" + self._streams[path].digest())
        return total.hexdigest()


def without_fingerprints(array: pa.Array) -> pa.Array:
    if not pa.types.is_string(array.type) and not pa.types.is_large_string(array.type):
        return array
    return pc.replace_substring_regex(array, FINGERPRINT_IN_ID, r"-*-\1")


def plain(array: pa.Array) -> pa.Array:
    """A primitive array without nulls, in a type that numpy holds flat."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    elif pa.types.is_temporal(array.type):
        array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
    elif pa.types.is_decimal(array.type):
        array = array.cast(pa.string()).cast(pa.binary())
    return array.fill_null(0)


def table_digest(batches: Iterable[pa.RecordBatch | pa.Table], renamed: Collection[str] | None = ()) -> str:
    hasher = TableHasher(renamed)
    for batch in batches:
        hasher.update(batch)
    return hasher.hexdigest()


def parquet_digest(path: Path, renamed: Collection[str] | None = (), batch_rows: int = BATCH_ROWS) -> str:
    """Digest of the rows of one Parquet file, read ``batch_rows`` at a time. An empty table still has its columns."""
    import pyarrow.parquet as pq

    def batches() -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(path) as file:
            yield pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
            yield from file.iter_batches(batch_size=batch_rows)

    return table_digest(batches(), renamed)


def file_digest(path: Path) -> str:
    """Parquet by its rows, everything else by its bytes."""
    if path.suffix == ".parquet":
        return parquet_digest(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, _hasher).hexdigest()


def digest(path: str | Path) -> str:
    """Content digest of a file, or of a folder: the relative names of its files and their content."""
    path = Path(path)
    if path.is_file():
        return file_digest(path)
    if not path.is_dir():
        raise FileNotFoundError(f"nothing to digest at {path}")
    total = _hasher()
    for file in sorted(path.rglob("*"), key=lambda item: item.relative_to(path).as_posix()):
        if file.is_file():
            total.update(f"{file.relative_to(path).as_posix()}\0{file_digest(file)}\n".encode())
    return total.hexdigest()
