"""Training rows in columns: a table in memory, or a file of which a step reads only its own rows, by position."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.schemas.training import ROUTES, TRAINING_SCHEMA, TWO_STREAMS, TrainingRow, training_schema

Positions = Sequence[int] | np.ndarray


class TrainingRows:
    """Rows of :data:`agentrl.schemas.training.TRAINING_SCHEMA` or ``TWO_STREAMS``, by position. Memory holds the unit
    and the place of each position. The tokens stay in Arrow; those of a file are read from the disk when they are
    used."""

    def __init__(self, batches: Iterable[pa.RecordBatch], order: np.ndarray | None = None) -> None:
        """``order`` gives for each position the place of its row in ``batches``; without it they are the same."""
        self.batches = [batch for batch in batches if batch.num_rows]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self.batches)])
        self._order = order

    @classmethod
    def of(cls, rows: Sequence[TrainingRow]) -> "TrainingRows":
        """Rows from :class:`TrainingRow` objects, in their order."""
        schema = TWO_STREAMS if any(row.ce_weights for row in rows) else TRAINING_SCHEMA
        columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in schema]
        return cls([pa.RecordBatch.from_arrays(columns, schema=schema)])

    @classmethod
    def of_table(cls, table: pa.Table) -> "TrainingRows":
        """Rows of a table in memory, in its order; other columns than those of a training row are left out."""
        schema = training_schema(table.column_names)
        return cls(table.select(schema.names).cast(schema).combine_chunks().to_batches())

    @classmethod
    def open(cls, path: Path) -> "TrainingRows":
        """The rows of a file that :func:`write_rows` wrote, in the order of their units; rows of one unit stay in the
        order in which they lie. The file is mapped into memory, not read."""
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        rows = cls(reader.get_batch(number) for number in range(reader.num_record_batches))
        unit = rows.scalars("unit")
        if (unit[1:] < unit[:-1]).any():
            rows._order = np.argsort(unit, kind="stable")
        return rows

    def routed(self, routes: Mapping[str, bytes]) -> "TrainingRows":
        """The rows of a table in memory with the column ``routes``, by their ids; of those that have none it is
        empty."""
        column = pa.array([routes.get(name, b"") for name in self.ids()], pa.large_binary())
        return TrainingRows.of_table(self.table().append_column(ROUTES, column))

    def unrouted(self) -> "TrainingRows":
        """The rows without that column."""
        names = [name for name in self.schema.names if name != ROUTES]
        return TrainingRows([batch.select(names) for batch in self.batches], self._order)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def schema(self) -> pa.Schema:
        """That of all rows."""
        return training_schema(self.batches[0].schema.names if self.batches else ())

    def scalars(self, name: str) -> np.ndarray:
        """A column of numbers, [rows]."""
        parts = [batch.column(name).to_numpy() for batch in self.batches]
        values = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return values if self._order is None else values[self._order]

    def take(self, positions: Positions) -> "TrainingRows":
        """The rows at these positions, in memory. No other row is read."""
        places = np.asarray(positions, dtype=np.int64)
        if self._order is not None:
            places = self._order[places]
        if len(self.batches) == 1:
            return TrainingRows([self.batches[0].take(pa.array(places))])
        owners = np.searchsorted(self._starts, places, side="right") - 1
        slices = [
            self.batches[owner].slice(index - self._starts[owner], 1)
            for owner, index in zip(owners.tolist(), places.tolist(), strict=True)
        ]
        return TrainingRows(pa.Table.from_batches(slices, self.schema).combine_chunks().to_batches())

    def values(self, name: str, position: int) -> np.ndarray:
        """A column of lists of one row, [tokens]. That of a file is read in place."""
        index = position if self._order is None else int(self._order[position])
        owner = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = self.batches[owner].column(name)[index - int(self._starts[owner])]
        values: np.ndarray = row.values.to_numpy(zero_copy_only=False)
        return values

    def ids(self) -> list[str]:
        """``row_id`` of each row of a table in memory."""
        return self.table()["row_id"].to_pylist()

    def table(self) -> pa.Table:
        """All rows as one Arrow table; meant for the rows of a step."""
        table = pa.Table.from_batches(self.batches, self.schema)
        return table if self._order is None else table.take(pa.array(self._order))

    def lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A column of lists of a table in memory: the first place of each row and the end of the last, [rows + 1], in
        the values of all rows, [tokens]."""
        if not self.batches:
            return np.zeros(1, np.int64), np.zeros(0, np.int64)
        [batch] = self.batches
        return flat(batch.column(name))


def flat(lists: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [rows + 1], from 0, and values [tokens] of a column of lists."""
    offsets = lists.offsets.to_numpy()
    return offsets - offsets[0], lists.flatten().to_numpy(zero_copy_only=False)


def holds_true(starts: np.ndarray, ends: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each part of ``values``, from a start up to its end, holds one that is true, [parts]. Parts lie one after
    another and may be empty."""
    holds = np.zeros(len(starts), dtype=bool)
    filled = np.flatnonzero(starts < ends)
    if len(filled):
        bounds = np.stack([starts[filled], ends[filled]], -1).ravel()
        holds[filled] = np.logical_or.reduceat(np.append(values, False), bounds)[::2]
    return holds


def nested(offsets: np.ndarray, values: np.ndarray, name: str) -> pa.ListArray:
    """A column ``name`` of training rows from its offsets [rows + 1] and values [tokens]."""
    kind = TWO_STREAMS.field(name).type
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, kind.value_type), type=kind)


def write_rows(path: Path, batches: Iterable[pa.RecordBatch]) -> Path:
    """Write rows, batch by batch, for :meth:`TrainingRows.open`, and return ``path``. Nothing is compressed, so that
    rows are read in place. A batch is written while the next one is made."""
    writing: Future[None] | None = None
    left = iter(batches)
    first = next(left, None)
    schema = training_schema(first.schema.names if first is not None else ())
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        for batch in chain([first] if first is not None else [], left):
            if writing:
                writing.result()
            writing = pool.submit(writer.write_batch, batch) if batch.num_rows else None
        if writing:
            writing.result()
    return path


def save_rows(path: Path, rows: TrainingRows) -> Path:
    """Write training rows as Parquet, to keep them, and return ``path``."""
    with pq.ParquetWriter(path, rows.schema, compression="zstd") as writer:
        for batch in rows.batches:
            writer.write_batch(batch)
    return path


def parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, a few thousand at a time."""
    with pq.ParquetFile(path) as file:
        names = training_schema(file.schema_arrow.names).names
        yield from (batch.select(names) for batch in file.iter_batches(2048))


def step_table(iteration: int, steps: Sequence[tuple[int, TrainingRows]]) -> pa.Table:
    """Training rows of one online iteration, each with it and with the number of its optimiser ``step``."""
    schema = steps[0][1].schema if steps else TRAINING_SCHEMA
    table = pa.concat_tables([schema.empty_table(), *(rows.table() for _, rows in steps)])
    numbers = [number for number, rows in steps for _ in range(len(rows))]
    columns = {"iteration": [iteration] * len(numbers), "step": numbers}
    for index, (name, values) in enumerate(columns.items()):
        table = table.add_column(index, pa.field(name, pa.int32(), nullable=False), pa.array(values, pa.int32()))
    return table
