"""Rows on their way into the table: any source becomes a stream of checked record batches, never held as a whole."""

import reprlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import InvalidRowsError, StoreError
from agentrl.datastore.storage.object_store import ObjectStorage
from agentrl.datastore.storage.ownership import mark
from agentrl.datastore.table.ids import KnownIds
from agentrl.datastore.table.validation import LENIENT_SCHEMA, BadField, conform, strict, validate
from agentrl.schemas.json_text import shown
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory

BATCH_ROWS = 1024
BATCH_BYTES = 16 * 2**20
"""A batch has at most so many rows, and at most so many bytes if it has several."""
MAX_PROBLEMS = 100
_UNFIT = (pa.ArrowException, OverflowError, TypeError, ValueError)
"""What Arrow raises of a value that does not fit its column."""

Rows: TypeAlias = Iterable[Trajectory] | Iterable[pa.RecordBatch] | Iterable[pa.Table] | pa.Table | pa.RecordBatchReader
OnError = Literal["raise", "quarantine"]


class Ingest:
    """One append's rows. After :meth:`batches` is exhausted, ``rows`` were passed on and ``quarantined`` set aside."""

    def __init__(
        self,
        source: Rows,
        fill: dict[str, str],
        on_error: OnError,
        storage: ObjectStorage,
        name: str,
        known: KnownIds,
        on_clash: Callable[[], None],
    ) -> None:
        """``known``: the ids that are in the table already. ``on_clash`` is called before rows are refused because
        their ids are; what it raises goes on to the caller of :meth:`batches`."""
        self.source = source
        self.fill = fill
        self.rows = 0
        self.quarantined = 0
        self.error: BaseException | None = None
        self._seen: set[str] = set()
        self._set_aside: set[str] = set()
        self._known = known
        self._on_clash = on_clash
        self._read = 0
        self._unfit: list[BadField] = []
        """Values of rows that are not checked yet which no column holds."""
        self._quarantine = Quarantine(storage, name) if on_error == "quarantine" else None

    @property
    def ids(self) -> set[str]:
        """Ids of the rows that were passed on."""
        return self._seen - self._set_aside

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Checked batches. What goes wrong here, and not in writing, is kept in ``error``."""
        try:
            for table in self._tables():
                for part in _bounded(table):
                    checked = self._checked(_with_own_seconds(self._filled(part)))
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
        size = 0
        item: Any
        for number, item in enumerate(self.source):
            if isinstance(item, Trajectory):
                chunk.append(item)
                size += _size(item)
                if len(chunk) == BATCH_ROWS or size >= BATCH_BYTES:
                    yield self._as_table(chunk, number + 1 - len(chunk))
                    chunk, size = [], 0
            elif isinstance(item, pa.RecordBatch | pa.Table):
                yield conform(pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item)
            else:
                raise StoreError(
                    f"row {number} is a {type(item).__name__}; append takes Trajectory objects, an Arrow table, or an "
                    "iterator of trajectories or record batches"
                )
        if chunk:
            yield self._as_table(chunk, number + 1 - len(chunk))

    def _as_table(self, rows: list[Trajectory], first_row: int) -> pa.Table:
        if self._quarantine is None:
            return as_table(rows, first_row)
        table, problems = fitted(rows, first_row)
        self._unfit += problems
        return table

    def _checked(self, table: pa.Table) -> pa.Table:
        first, self._read = self._read, self._read + table.num_rows
        problems = [problem for problem in self._unfit if problem.row < self._read]
        self._unfit = self._unfit[len(problems) :]
        unfit = {problem.row for problem in problems}
        problems += self._already_there(table, first)
        problems += [problem for problem in validate(table, self._seen, first) if problem.row not in unfit]
        if not problems:
            return strict(table)
        if self._quarantine is None:
            raise InvalidRowsError([(p.row, p.trajectory_id, p.field, p.reason) for p in problems[:MAX_PROBLEMS]])
        bad = np.zeros(table.num_rows, dtype=bool)
        bad[[problem.row - first for problem in problems]] = True
        self._quarantine.add(table.filter(pa.array(bad)), problems)
        self._set_aside.update(problem.trajectory_id for problem in problems)
        self.quarantined += int(bad.sum())
        return strict(table.filter(pa.array(~bad)))

    def _already_there(self, table: pa.Table, first: int) -> list[BadField]:
        """Rows whose id is in the table already."""
        names = table["trajectory_id"].to_pylist()
        clashes = self._known.clashes_now({name for name in names if name})
        if clashes:
            self._on_clash()
        return [
            BadField(first + row, name, "trajectory_id", f"is in the buffer already ({clashes[name]})")
            for row, name in enumerate(names)
            if name in clashes
        ]

    def _filled(self, table: pa.Table) -> pa.Table:
        for name, value in self.fill.items():
            column = table[name]
            empty = pc.equal(column, "")
            if TRAJECTORY_SCHEMA.field(name).nullable:
                empty = pc.fill_null(empty, True)
            if value and pc.any(empty).as_py():
                index = table.schema.get_field_index(name)
                table = table.set_column(index, table.schema.field(index), pc.if_else(empty, value, column))
        return table


def _with_own_seconds(table: pa.Table) -> pa.Table:
    """The rows without seconds of messages that they do not have, as a copy of a row with fewer messages has."""
    counts = (pc.list_value_length(table[name]) for name in ("message_seconds", "messages"))
    others = pc.fill_null(pc.not_equal(*counts), False)
    if not pc.any(others).as_py():
        return table
    index, column = table.schema.get_field_index("message_seconds"), table["message_seconds"]
    own = pc.if_else(others, pa.scalar(None, column.type), column)
    return table.set_column(index, table.schema.field(index), own)


def _bounded(table: pa.Table) -> Iterator[pa.Table]:
    """The table in slices of at most :data:`BATCH_ROWS` rows and :data:`BATCH_BYTES`, or of one row."""
    for start in range(0, table.num_rows, BATCH_ROWS):
        part = table.slice(start, BATCH_ROWS)
        if part.num_rows == 1 or part.nbytes <= BATCH_BYTES:
            yield part
        else:
            half = part.num_rows // 2
            yield from _bounded(part.slice(0, half))
            yield from _bounded(part.slice(half))


def _size(row: Trajectory) -> int:
    """About how many bytes a row takes in Arrow. Fields may hold anything before they are checked."""
    try:
        text = sum(len(message.content) + len(message.reasoning or "") for message in row.messages)
        return 16 * len(row.input_ids) + text + len(row.prompt) + len(row.tools) + len(row.final_state)
    except (TypeError, AttributeError):
        return 0


def as_table(rows: list[Trajectory], first_row: int = 0) -> pa.Table:
    """Rows in :data:`LENIENT_SCHEMA`. A value that does not fit its column is an error that names the row and field."""
    table, problems = fitted(rows, first_row)
    if problems:
        raise InvalidRowsError([(p.row, p.trajectory_id, p.field, p.reason) for p in problems[:MAX_PROBLEMS]])
    return table


def fitted(rows: list[Trajectory], first_row: int = 0) -> tuple[pa.Table, list[BadField]]:
    """Rows in :data:`LENIENT_SCHEMA`, in which values that do not fit their columns are null, and those values."""
    dumped = [row.model_dump(warnings=False) for row in rows]
    try:
        return pa.Table.from_pylist(dumped, schema=LENIENT_SCHEMA), []
    except _UNFIT:
        problems = []
    for number, row in enumerate(dumped):
        name = shown(str(row.get("trajectory_id")))
        for field in LENIENT_SCHEMA:
            try:
                pa.array([row.get(field.name)], field.type)
            except _UNFIT as error:
                reason = shown(f"is {reprlib.repr(row[field.name])}: {error}").splitlines()[0]
                problems.append(BadField(first_row + number, name, field.name, reason))
                row[field.name] = None
    return pa.Table.from_pylist(dumped, schema=LENIENT_SCHEMA), problems


class Quarantine:
    """Bad rows and their reasons, as ``quarantine/<name>.parquet`` beside the table."""

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        self.key = f"quarantine/{name}.parquet"
        self._storage = storage
        self._file: Path | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table, problems: list[BadField]) -> None:
        by_row: dict[int, list[str]] = {}
        for problem in problems:
            by_row.setdefault(problem.row, []).append(f"{problem.field}: {problem.reason}")
        reasons = pa.array([by_row[row] for row in sorted(by_row)], pa.list_(pa.string()))
        table = rows.append_column("row", pa.array(sorted(by_row), pa.int64())).append_column("problems", reasons)
        if self._writer is None:
            folder = self._storage.working_folder()
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / f"quarantine-{mark(folder)}.parquet"
            self._writer = pq.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)

    def publish(self) -> None:
        if self._writer is not None and self._file is not None:
            self._writer.close()
            self._storage.write(self.key, self._file.read_bytes())

    def discard(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
