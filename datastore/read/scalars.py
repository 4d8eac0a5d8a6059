"""Scans of the buffer that keep whole scalar columns for the next query: in memory, and as copies for other processes.

Data files never change, so a column need not be read again: after an append only the new files are read. Most
queries are over scalars, and opening Parquet footers is most of their time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl
from polars.io.plugins import register_io_source

from agentrl.datastore.read.scalar_cache import ScalarCopies
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.writer import SCALARS
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

LIMIT_BYTES = 2**29
"""Bytes. Columns stay in memory up to this total. If less than an eighth of it is left, queries over other columns
stream from the files."""
BATCH_ROWS = 2048
FILES_AT_ONCE, REMOTE_FILES_AT_ONCE = 1, 16
"""Parquet files that are read at once. Each needs memory for its pages meanwhile; remote ones are waited for."""

SCHEMA = pl.Schema(TRAJECTORY_SCHEMA)


@dataclass(frozen=True)
class _Held:
    """Columns of these files, rows in the order of the files."""

    files: tuple[str, ...] = ()
    columns: Mapping[str, pl.Series] = field(default_factory=dict)

    @property
    def room(self) -> float:
        return LIMIT_BYTES - sum(column.estimated_size() for column in self.columns.values())


class ScalarColumns:
    """Scalar columns of one table, in memory. Threads may share it: what is held is replaced as a whole, so the worst
    case is that two of them read the same column. A lock could block for ever: Polars would work while it is held, and
    its threads may call this again.
    """

    def __init__(self, storage: LocalStorage | S3Storage, storage_options: dict[str, str] | None) -> None:
        self._options = storage_options
        self._copies = ScalarCopies(storage)
        self._held = _Held()

    def get(self, files: Sequence[str], names: Sequence[str], read: bool) -> pl.DataFrame | None:
        """These columns of these files, rows in one order for all columns. Columns that are not in memory are read if
        ``read`` is true and there is room; otherwise returns None."""
        held = self._held
        if set(held.files) != set(files):
            if not read:
                return None
            held = self._followed(held, files)
        missing = [name for name in names if name not in held.columns]
        if missing and (not read or held.room < LIMIT_BYTES / 8):
            return None
        columns = dict(held.columns)
        for column in self._read(held.files, missing):
            columns[column.name] = column
            if held.room >= column.estimated_size():
                held = _Held(held.files, {**held.columns, column.name: column})
        self._held = held
        return pl.DataFrame([columns[name] for name in names])

    def _followed(self, held: _Held, files: Sequence[str]) -> _Held:
        """The same columns of another list of files. New files are read; if files are gone, all columns are dropped."""
        if not held.columns or not set(held.files) < set(files) or held.room < LIMIT_BYTES / 8:
            return _Held(tuple(files))
        known = set(held.files)
        added = tuple(file for file in files if file not in known)
        more = self._read(added, list(held.columns))
        columns = {column.name: pl.concat([held.columns[column.name], column]).rechunk() for column in more}
        return _Held(held.files + added, columns)

    def _read(self, files: Sequence[str], names: Sequence[str]) -> Iterator[pl.Series]:
        """Columns, each in one piece. They are put together one after the other, since what that needs besides is as
        large as the column. What has no copy yet is read from Parquet before, and copied."""
        uncopied = self._copy({file: self._copies.lacking(file, names) for file in files})
        for name in names:
            parts = [pl.Series(dtype=SCHEMA[name])]
            for file in files:
                part = uncopied.get(file, {}).pop(name, None)
                part = self._copies.read(file, name) if part is None else part
                if part is None:  # the copy is not whole
                    part = self._from_files({file: [name]})[file][name]
                    self._copies.keep(file, {name: part})
                parts.append(part)
            yield pl.concat([part.alias(name) for part in parts]).rechunk()

    def _copy(self, wanted: Mapping[str, list[str]]) -> dict[str, dict[str, pl.Series]]:
        """Copy columns from Parquet. Returns those that the disk did not take, by file and name."""
        some = [file for file, names in wanted.items() if names]
        at_once = REMOTE_FILES_AT_ONCE if self._options else FILES_AT_ONCE
        uncopied: dict[str, dict[str, pl.Series]] = {}
        for start in range(0, len(some), at_once):
            read = self._from_files({file: wanted[file] for file in some[start : start + at_once]})
            uncopied |= {file: columns for file, columns in read.items() if not self._copies.keep(file, columns)}
        return uncopied

    def _from_files(self, wanted: Mapping[str, list[str]]) -> dict[str, dict[str, pl.Series]]:
        """File -> name -> column, read from Parquet."""
        frames = pl.collect_all(
            pl.scan_parquet(file, storage_options=self._options, glob=False).select(names)
            for file, names in wanted.items()
        )
        return {file: {series.name: series for series in frame} for file, frame in zip(wanted, frames, strict=True)}


def scan(files: Sequence[str], from_files: Callable[[], pl.LazyFrame], scalars: ScalarColumns) -> pl.LazyFrame:
    """All rows of a table version, lazily. Scalar columns come from ``scalars``; queries over others, and filters on
    columns that are not in memory, go to ``from_files``, which skips files by Delta's statistics."""

    def source(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        names = SCHEMA.names() if with_columns is None else with_columns or ["segment"]
        needed = list(dict.fromkeys([*names, *(predicate.meta.root_names() if predicate is not None else [])]))
        frame = None
        if set(needed) <= set(SCALARS):
            frame = scalars.get(files, needed, read=predicate is None and n_rows is None)
        rows = from_files() if frame is None else frame.lazy()
        if predicate is not None:
            rows = rows.filter(predicate)
        rows = rows.select(names)
        if n_rows is not None:
            rows = rows.head(n_rows)
        yield from rows.collect_batches(chunk_size=BATCH_ROWS) if frame is None else [rows.collect()]

    return register_io_source(source, schema=SCHEMA, is_pure=True)
