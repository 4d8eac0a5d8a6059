"""Content digests of rows: computed once, when a row is appended, and stored beside it in a column of the table.

A digest is over a row's values. It does not depend on the batch, file or row group that holds the row, and leaves out
columns in which two runs of one stage differ. The digest of a selection is made of the digests of its rows in their
order, so that no other column is read. Digests are XXH3 with 16 bytes: they practically never collide by chance, but
whoever wants two rows with one digest can make them.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_128_digest

from agentrl.datastore.storage.digest import is_list, is_text, plain, type_name, without_fingerprints
from agentrl.schemas.annotations import ADDED, models_at
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory

CONTENT = "content_digest"

STORED_SCHEMA = TRAJECTORY_SCHEMA.append(pa.field(CONTENT, pa.binary(), nullable=False))
"""Columns of the table: those of a trajectory, and the digest of its content."""

VOLATILE = ("created_at", "run_id", "fingerprint", "policy", "pipeline", "source_file", "message_seconds")
"""Columns that differ between two runs of the same stage, or that name a file whose content counts, and so are left out
of digests."""

IDS = ("trajectory_id", "episode_id", "group_id", "parent_id")
"""Columns that may hold the fingerprint of the stage run that made a row. It does not count."""

BATCH_ROWS = 1024

_ADDED = {name for name, info in Trajectory.model_fields.items() if ADDED in info.metadata} - set(VOLATILE)
_INSIDE = {
    name: inside
    for name, info in Trajectory.model_fields.items()
    for model in models_at(info.annotation, (0,))
    if (inside := [field for field, about in model.model_fields.items() if ADDED in about.metadata])
}
"""Columns of lists, and which fields of their elements came later."""


def _first(field: pa.Field) -> pa.Field:
    """A field without what came later inside of it."""
    if field.name not in _INSIDE:
        return field
    element = field.type.value_field
    kept = pa.struct([inner for inner in element.type if inner.name not in _INSIDE[field.name]])
    return pa.field(field.name, pa.list_(element.with_type(kept)), nullable=field.nullable)


_FIELDS = [
    _first(TRAJECTORY_SCHEMA.field(name)) for name in sorted(set(TRAJECTORY_SCHEMA.names) - {*VOLATILE, *_ADDED})
]
_LATER = [TRAJECTORY_SCHEMA.field(name) for name in sorted(_ADDED)]
"""Columns that came later and may be null: a row in which all of them are has the digest that it had before."""

_LATER_INSIDE = [
    (name, pa.field(f"{name}.{inner}", pa.list_(TRAJECTORY_SCHEMA.field(name).type.value_type.field(inner))))
    for name, inside in _INSIDE.items()
    for inner in inside
]
"""Fields of elements that came later, each as a column of lists: the same holds for them."""


def _named(fields: Sequence[pa.Field]) -> bytes:
    """A digest of names and types: rows of another schema have other digests."""
    return hashlib.sha256("\n".join(f"{field.name} {type_name(field.type)}" for field in fields).encode()).digest()


_SCHEMA = _named(_FIELDS)


def with_content(table: pa.Table) -> pa.Table:
    """Rows in :data:`STORED_SCHEMA`, from rows in the schema of a trajectory."""
    return pa.Table.from_arrays([*table.columns, contents(table)], schema=STORED_SCHEMA)


def contents(table: pa.Table) -> pa.ChunkedArray:
    """The content digest of each row, 16 bytes."""
    rows = table.select([field.name for field in (*_FIELDS, *_LATER)])
    return pa.chunked_array([_digests(part) for part in rows.to_batches(max_chunksize=BATCH_ROWS)], pa.binary())


def _digests(batch: pa.RecordBatch) -> pa.Array:
    """The digest of each row: the pieces of its content are laid out one after another and hashed at once."""
    columns = [
        without_fingerprints(column)
        if field.name in IDS
        else column.cast(field.type)
        if field.name in _INSIDE
        else column
        for field, column in zip(_FIELDS, batch.columns[: len(_FIELDS)], strict=True)
    ]
    pieces = _pieces(_FIELDS, columns, np.arange(batch.num_rows + 1, dtype=np.int64))
    schema, separator = (pa.scalar(value, pa.large_binary()) for value in (_SCHEMA, b""))
    later = list(_later(_LATER, batch.columns[len(_FIELDS) :], pc.is_valid))
    for name, field in _LATER_INSIDE:
        values = _inside(batch.column(name), field.name.rpartition(".")[2])
        later += _later([field], [values], _any_valid)
    laid_out = pc.binary_join_element_wise(schema, *pieces, *later, separator)
    offsets, data = _offsets(laid_out).tolist(), memoryview(laid_out.buffers()[2] or b"")
    return pa.array([xxh3_128_digest(data[start:end]) for start, end in pairwise(offsets)], pa.binary())


def _later(
    fields: Sequence[pa.Field], columns: Sequence[pa.Array], known: Callable[[pa.Array], pa.Array]
) -> Iterator[pa.Array]:
    """The bytes of columns that came later, of rows that have a value in one of them, as ``known`` says; nothing if no
    row has."""
    there = known(columns[0])
    for column in columns[1:]:
        there = pc.or_(there, known(column))
    if not there.true_count:
        return
    schema, separator = (pa.scalar(value, pa.large_binary()) for value in (_named(fields), b""))
    pieces = _pieces(fields, columns, np.arange(len(there) + 1, dtype=np.int64))
    yield pc.if_else(there, pc.binary_join_element_wise(schema, *pieces, separator), separator)


def _inside(column: pa.Array, name: str) -> pa.Array:
    """One field of the elements of a column of lists, as lists."""
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pc.struct_field(column.flatten(), name))


def _any_valid(lists: pa.Array) -> pa.Array:
    """Of each list whether one of its values is not null."""
    valid = np.concatenate([[0], np.cumsum(lists.values.is_valid().to_numpy(zero_copy_only=False))])
    offsets = lists.offsets.to_numpy()
    return pa.array(valid[offsets[1:]] > valid[offsets[:-1]])


def _pieces(fields: Sequence[pa.Field], arrays: Sequence[pa.Array], bounds: np.ndarray) -> Iterator[pa.Array]:
    """The bytes that each row has in some columns, one array for each piece: a record of fixed width for each value,
    with its numbers and lengths and whether it is there; then texts, then what lists and structs hold. ``bounds[row]``
    to ``bounds[row + 1]`` are the row's values in ``arrays``."""
    record: list[np.ndarray] = []
    texts: list[pa.Array] = []
    below: list[tuple[list[pa.Field], list[pa.Array], np.ndarray]] = []
    for field, array in zip(fields, arrays, strict=True):
        if field.nullable:
            record.append(_flat(array.is_valid()))
        if pa.types.is_struct(field.type):
            below.append((list(field.type), array.flatten(), bounds))
        elif is_list(field.type):
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            record.append(lengths.astype("<i8"))
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            below.append(([field.type.value_field], [array.flatten()], ends[bounds]))
        elif is_text(field.type):
            wide = array.cast(pa.large_binary()).fill_null(b"")
            offsets = _offsets(wide)
            record.append(np.diff(offsets))
            texts.append(_binary(offsets[bounds], wide.buffers()[2]))
        else:
            record.append(_flat(array))
    if record:
        yield _records(record, bounds)
    yield from texts
    for inner in below:
        yield from _pieces(*inner)


def _flat(array: pa.Array) -> np.ndarray:
    """Fixed-width values, nulls as 0."""
    values: np.ndarray = plain(array).to_numpy(zero_copy_only=False)
    return values


def _records(columns: Sequence[np.ndarray], bounds: np.ndarray) -> pa.Array:
    """Columns of fixed-width values as one binary per row, in which values of one record are neighbours."""
    if len(columns) == 1:
        records = np.ascontiguousarray(columns[0])
    else:
        records = np.empty(len(columns[0]), [(str(index), column.dtype) for index, column in enumerate(columns)])
        for index, column in enumerate(columns):
            records[str(index)] = column
    return _binary(bounds * records.itemsize, pa.py_buffer(records.view(np.uint8)))


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
