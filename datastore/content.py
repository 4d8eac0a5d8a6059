"""Content digests of rows: computed once, when a row is appended, and stored beside it in a column of the table.

A digest is over a row's values. It does not depend on the batch, file or row group that holds the row, and leaves out
columns in which two runs of one stage differ. The digest of a selection is made of the digests of its rows in their
order, so that no other column is read. Digests are BLAKE2b with 16 bytes, which practically never collide by chance.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datastore.digest import is_list, is_text, plain, type_name, without_fingerprints
from schemas.trajectory import TRAJECTORY_SCHEMA

CONTENT = "content_digest"

STORED_SCHEMA = TRAJECTORY_SCHEMA.append(pa.field(CONTENT, pa.binary(), nullable=False))
"""Columns of the table: those of a trajectory, and the digest of its content."""

VOLATILE = ("created_at", "run_id", "fingerprint", "policy", "pipeline")
"""Columns that differ between two runs of the same stage, and so are left out of digests."""

IDS = ("trajectory_id", "episode_id", "group_id", "parent_id")
"""Columns that may hold the fingerprint of the stage run that made a row. It does not count."""

BATCH_ROWS = 1024

_COLUMNS = sorted(name for name in TRAJECTORY_SCHEMA.names if name not in VOLATILE)
_BASE = hashlib.blake2b(
    "\n".join(f"{name} {type_name(TRAJECTORY_SCHEMA.field(name).type)}" for name in _COLUMNS).encode(), digest_size=16
)


def with_content(table: pa.Table) -> pa.Table:
    """Rows in :data:`STORED_SCHEMA`, from rows in the schema of a trajectory."""
    return pa.Table.from_arrays([*table.columns, contents(table)], schema=STORED_SCHEMA)


def contents(table: pa.Table) -> pa.ChunkedArray:
    """The content digest of each row, 16 bytes."""
    parts = [_digests(part) for part in table.select(_COLUMNS).to_batches(max_chunksize=BATCH_ROWS)]
    return pa.chunked_array(parts, pa.binary())


def _digests(batch: pa.RecordBatch) -> pa.Array:
    """The digest of each row: the sizes of its columns, then their bytes, are concatenated and hashed at once."""
    rows = np.arange(batch.num_rows + 1, dtype=np.int64)
    pieces: list[pa.Array] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        pieces += _pieces(without_fingerprints(column) if name in IDS else column, rows)
    sizes = np.stack([np.diff(_offsets(piece)) for piece in pieces], axis=1)
    head = _binary(rows * sizes.shape[1] * 8, pa.py_buffer(np.ascontiguousarray(sizes, dtype="<i8")))
    laid_out = pc.binary_join_element_wise(head, *pieces, pa.scalar(b"", pa.large_binary()))
    offsets, data = _offsets(laid_out), memoryview(laid_out.buffers()[2] or b"")
    digests = []
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        hasher = _BASE.copy()
        hasher.update(data[start:end])
        digests.append(hasher.digest())
    return pa.array(digests, pa.binary())


def _pieces(array: pa.Array, bounds: np.ndarray) -> Iterator[pa.Array]:
    """The bytes that each row has in a column, in one array per stream: which values are there, their lengths, their
    bytes. ``bounds[row]`` to ``bounds[row + 1]`` are the row's values in ``array``."""
    yield _cut(array.is_valid().cast(pa.uint8()), bounds)
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _pieces(child, bounds)
    elif is_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
        yield _cut(lengths, bounds)
        ends = np.concatenate([[0], np.cumsum(lengths.to_numpy())])
        yield from _pieces(array.flatten(), ends[bounds])
    elif is_text(array.type):
        wide = array.cast(pa.large_binary()).fill_null(b"")
        yield _cut(pc.binary_length(wide).cast(pa.int64()), bounds)
        yield _binary(_offsets(wide)[bounds], wide.buffers()[2])
    else:
        yield _cut(plain(array), bounds)


def _cut(array: pa.Array, bounds: np.ndarray) -> pa.Array:
    """Fixed-width values as one binary per row."""
    values = np.ascontiguousarray(array.to_numpy(zero_copy_only=False))
    return _binary(bounds * values.itemsize, pa.py_buffer(values))


def _binary(offsets: np.ndarray, data: pa.Buffer | None) -> pa.Array:
    where = pa.py_buffer(np.ascontiguousarray(offsets, dtype=np.int64))
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, where, data or pa.py_buffer(b"")]
    )


def _offsets(array: pa.Array) -> np.ndarray:
    """Where the values of a large binary array begin and end."""
    return np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]


def combined(digests: Iterable[pa.ChunkedArray]) -> str:
    """Digest of rows in this order, from the digests of the rows."""
    total = hashlib.blake2b(digest_size=16)
    for chunk in (chunk for part in digests for chunk in part.chunks):
        values = chunk.cast(pa.large_binary())
        where = _offsets(values)
        total.update(memoryview(values.buffers()[2] or b"")[where[0] : where[-1]])  # one after the other
    return total.hexdigest()
