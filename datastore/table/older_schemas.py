"""Tables of an older schema: their rows with the columns and values of this one, to read and to migrate."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.errors import StoreError
from agentrl.datastore.table.validation import LENIENT_SCHEMA
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory

if TYPE_CHECKING:
    import polars as pl

FROM: Mapping[str, tuple[str, ...]] = {"spans": ("action_mask", "policy", "policy_version")}
"""Columns whose values in old rows follow from others; all others take the model's default."""

BATCH_ROWS = 2048


def to_read(names: Collection[str], there: Collection[str]) -> list[str]:
    """The columns of an old table that these columns of this schema need. ``there`` are those that it has."""
    needed = [column for name in names for column in ((name,) if name in there else FROM.get(name, ()))]
    return list(dict.fromkeys(needed)) or ["trajectory_id"]


def upgrade(table: pa.Table, names: Collection[str] = LENIENT_SCHEMA.names) -> pa.Table:
    """These columns of rows of an older schema, with the types and values that they have in this one.

    ``table`` has the columns that :func:`to_read` gives. Raises StoreError if a column that it lacks has no default.
    """
    columns = [
        table[name].cast(LENIENT_SCHEMA.field(name).type) if name in table.schema.names else _made(table, name)
        for name in names
    ]
    lenient = pa.Table.from_arrays(columns, schema=pa.schema([LENIENT_SCHEMA.field(name) for name in names]))
    return lenient.cast(pa.schema([TRAJECTORY_SCHEMA.field(name) for name in names], TRAJECTORY_SCHEMA.metadata))


def _made(table: pa.Table, name: str) -> pa.Array:
    """The values of a column that older rows lack."""
    if name in FROM:
        return _spans(table)
    field = Trajectory.model_fields[name]
    if field.is_required():
        raise StoreError(f"old rows lack {name!r}, which has no default; this schema cannot be migrated")
    default: Any = field.get_default(call_default_factory=True)
    return pa.array([default] * table.num_rows, LENIENT_SCHEMA.field(name).type)


def _spans(table: pa.Table) -> pa.Array:
    """One span of ``policy_version`` for each row with action tokens of a known policy; others have none. Before this
    column was, one version sampled a whole row."""
    masks = table["action_mask"].combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(masks), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths)
    action = np.flatnonzero(pc.fill_null(masks.flatten(), False).to_numpy(zero_copy_only=False))
    before, through = np.searchsorted(action, ends - lengths), np.searchsorted(action, ends)
    sampled = (through > before) & pc.not_equal(table["policy"], "").to_numpy()
    offsets = np.concatenate([[0], np.cumsum(sampled)]).astype(np.int32)
    starts = (ends - lengths)[sampled]
    element = LENIENT_SCHEMA.field("spans").type.value_field
    values = {
        "version": table["policy_version"].combine_chunks().filter(pa.array(sampled)),
        "start": pa.array(action[before[sampled]] - starts, pa.int32()),
        "end": pa.array(action[through[sampled] - 1] + 1 - starts, pa.int32()),
    }
    spans = pa.StructArray.from_arrays([values[field.name] for field in element.type], fields=list(element.type))
    return pa.ListArray.from_arrays(pa.array(offsets), spans).cast(LENIENT_SCHEMA.field("spans").type)


def scan(rows: "pl.LazyFrame") -> "pl.LazyFrame":
    """All rows of an old table with the columns of this schema, lazily; only columns that are asked for are read."""
    import polars as pl
    from polars.io.plugins import register_io_source

    schema = pl.DataFrame(TRAJECTORY_SCHEMA.empty_table()).schema
    there = rows.collect_schema().names()

    def source(
        with_columns: list[str] | None, predicate: "pl.Expr | None", n_rows: int | None, batch_size: int | None
    ) -> "Iterator[pl.DataFrame]":
        names = schema.names() if with_columns is None else with_columns or ["trajectory_id"]
        needed = list(dict.fromkeys([*names, *(predicate.meta.root_names() if predicate is not None else [])]))
        left = n_rows
        for batch in rows.select(to_read(needed, there)).collect_batches(chunk_size=BATCH_ROWS):
            frame = pl.DataFrame(upgrade(batch.to_arrow(), needed))
            frame = (frame if predicate is None else frame.filter(predicate)).select(names)
            yield frame if left is None else frame.head(left)
            if left is not None and (left := left - frame.height) <= 0:
                return

    return register_io_source(source, schema=schema, is_pure=True)
