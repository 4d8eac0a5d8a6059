"""Rows on their way into the table: any source becomes a stream of checked record batches, never held as a whole."""

import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datastore.errors import InvalidRowsError, StoreError
from datastore.places import Place
from datastore.validation import LENIENT_SCHEMA, BadField, conform, strict, validate
from schemas.trajectory import Trajectory

BATCH_ROWS = 1024
MAX_PROBLEMS = 100

Rows: TypeAlias = Iterable[Trajectory] | Iterable[pa.RecordBatch] | pa.Table | pa.RecordBatchReader
OnError = Literal["raise", "quarantine"]


class Ingest:
    """One append's rows. After :meth:`batches` is exhausted, ``rows`` were passed on and ``quarantined`` set aside."""

    def __init__(self, source: Rows, fill: dict[str, str], on_error: OnError, place: Place, name: str) -> None:
        self.source = source
        self.fill = fill
        self.rows = 0
        self.quarantined = 0
        self.error: BaseException | None = None
        self._seen: set[str] = set()
        self._read = 0
        self._quarantine = Quarantine(place, name) if on_error == "quarantine" else None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Checked batches in the buffer's schema. What goes wrong is kept in ``error`` too: delta-rs wraps it."""
        try:
            for table in self._tables():
                for start in range(0, table.num_rows, BATCH_ROWS):
                    checked = self._checked(self._filled(table.slice(start, BATCH_ROWS)))
                    self.rows += checked.num_rows
                    yield from checked.to_batches()
            if self._quarantine:
                self._quarantine.publish()
        except BaseException as error:
            self.error = error
            raise
        finally:
            if self._quarantine:
                self._quarantine.discard()

    def _tables(self) -> Iterator[pa.Table]:
        if isinstance(self.source, pa.Table):
            yield conform(self.source)
            return
        chunk: list[Trajectory] = []
        item: Any
        for number, item in enumerate(self.source):
            if isinstance(item, Trajectory):
                chunk.append(item)
                if len(chunk) == BATCH_ROWS:
                    yield as_table(chunk, number + 1 - len(chunk))
                    chunk = []
            elif isinstance(item, pa.RecordBatch | pa.Table):
                yield conform(pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item)
            else:
                raise StoreError(
                    f"row {number} is a {type(item).__name__}; append takes Trajectory objects, an Arrow table, or an "
                    "iterator of trajectories or record batches"
                )
        if chunk:
            yield as_table(chunk, number + 1 - len(chunk))

    def _checked(self, table: pa.Table) -> pa.Table:
        first, self._read = self._read, self._read + table.num_rows
        problems = validate(table, self._seen, first)
        if not problems:
            return strict(table)
        if self._quarantine is None:
            raise InvalidRowsError([(p.row, p.trajectory_id, p.field, p.reason) for p in problems[:MAX_PROBLEMS]])
        bad = np.zeros(table.num_rows, dtype=bool)
        bad[[problem.row - first for problem in problems]] = True
        self._quarantine.add(table.filter(pa.array(bad)), problems)
        self.quarantined += int(bad.sum())
        return strict(table.filter(pa.array(~bad)))

    def _filled(self, table: pa.Table) -> pa.Table:
        for name, value in self.fill.items():
            column = table[name]
            if value and pc.any(empty := pc.equal(column, "")).as_py():
                index = table.schema.get_field_index(name)
                table = table.set_column(index, table.schema.field(index), pc.if_else(empty, value, column))
        return table


def as_table(rows: list[Trajectory], first_row: int = 0) -> pa.Table:
    """Rows in :data:`LENIENT_SCHEMA`. A value that does not fit its column is an error that names the row and field."""
    dumped = [row.model_dump(warnings=False) for row in rows]
    try:
        return pa.Table.from_pylist(dumped, schema=LENIENT_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, TypeError, ValueError):
        for number, row in enumerate(dumped):
            for field in LENIENT_SCHEMA:
                try:
                    pa.array([row.get(field.name)], field.type)
                except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                    name = str(row.get("trajectory_id"))
                    raise InvalidRowsError([(first_row + number, name, field.name, str(error))]) from None
        raise


class Quarantine:
    """Bad rows and their reasons, as ``quarantine/<name>.parquet`` beside the table."""

    def __init__(self, place: Place, name: str) -> None:
        self.key = f"quarantine/{name}.parquet"
        self._place = place
        self._file: Path | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table, problems: list[BadField]) -> None:
        by_row: dict[int, list[str]] = {}
        for problem in problems:
            by_row.setdefault(problem.row, []).append(f"{problem.field}: {problem.reason}")
        reasons = pa.array([by_row[row] for row in sorted(by_row)], pa.list_(pa.string()))
        table = rows.append_column("row", pa.array(sorted(by_row), pa.int64())).append_column("problems", reasons)
        if self._writer is None:
            folder = self._place.working_folder()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"quarantine-{uuid.uuid4().hex}.parquet"
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)

    def publish(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._place.write(self.key, self._file.read_bytes())

    def discard(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
