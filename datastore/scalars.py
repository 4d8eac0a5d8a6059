"""Scans of the buffer that leave whole scalar columns in memory, where the next query finds them.

Data files never change, so a column that was read once stays true: after an append only the new files are read. Most
queries are over scalars, and opening Parquet footers is most of their time.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import polars as pl
from polars.io.plugins import register_io_source

from datastore.writer import SCALARS
from schemas.trajectory import TRAJECTORY_SCHEMA

if TYPE_CHECKING:
    from deltalake import DeltaTable

LIMIT_BYTES = 2**29
"""Columns stay in memory up to this total. When an eighth of it is left, queries over others stream from the files."""
BATCH_ROWS = 2048

SCHEMA = pl.DataFrame(TRAJECTORY_SCHEMA.empty_table()).schema


class ScalarColumns:
    """Scalar columns of one table, in memory. Safe to use from several threads."""

    def __init__(self, storage_options: dict[str, str] | None) -> None:
        self._options = storage_options
        self._files: list[str] = []
        self._columns: dict[str, pl.Series] = {}
        self._lock = threading.Lock()

    def get(self, files: Sequence[str], names: Sequence[str], read: bool) -> pl.DataFrame | None:
        """These columns of these files, rows in one order for all columns. Those that are not in memory are read where
        ``read`` says so and there is room; otherwise None."""
        with self._lock:
            here = set(self._files) == set(files)
            if not (here or read):
                return None
            if not here:
                self._follow(files)
            missing = [name for name in names if name not in self._columns]
            if missing and (not read or self._is_full()):
                return None
            found = dict(self._columns)
            for column in self._read(self._files, missing):
                found[column.name] = column.rechunk()
                if self._room() >= column.estimated_size():
                    self._columns[column.name] = found[column.name]
            return pl.DataFrame([found[name] for name in names])

    def _follow(self, files: Sequence[str]) -> None:
        """Take over a file list: read what an append added, forget everything where files are gone."""
        known = set(self._files)
        if self._columns and known < set(files) and not self._is_full():
            added = [file for file in files if file not in known]
            more = self._read(added, list(self._columns))
            self._columns = {column.name: pl.concat([self._columns[column.name], column]).rechunk() for column in more}
            self._files += added
        else:
            self._columns, self._files = {}, list(files)

    def _read(self, files: Sequence[str], names: Sequence[str]) -> pl.DataFrame:
        if not files or not names:
            return pl.DataFrame(schema={name: SCHEMA[name] for name in names})
        return pl.scan_parquet(list(files), storage_options=self._options).select(names).collect()

    def _room(self) -> float:
        return LIMIT_BYTES - sum(column.estimated_size() for column in self._columns.values())

    def _is_full(self) -> bool:
        return self._room() < LIMIT_BYTES / 8


def scan(files: Sequence[str], open_table: "Callable[[], DeltaTable]", scalars: ScalarColumns) -> pl.LazyFrame:
    """All rows of a table version, lazily. Scalar columns come from ``scalars``; queries over others, and filters on
    columns that are not in memory, go to the files, of which Delta's statistics skip what they can."""

    def source(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        names = SCHEMA.names() if with_columns is None else with_columns or ["segment"]
        needed = list(dict.fromkeys([*names, *(predicate.meta.root_names() if predicate is not None else [])]))
        frame = None
        if set(needed) <= set(SCALARS):
            frame = scalars.get(files, needed, read=predicate is None and n_rows is None)
        rows = pl.scan_delta(open_table()) if frame is None else frame.lazy()
        if predicate is not None:
            rows = rows.filter(predicate)
        rows = rows.select(names)
        if n_rows is not None:
            rows = rows.head(n_rows)
        yield from rows.collect_batches(chunk_size=BATCH_ROWS) if frame is None else [rows.collect()]

    return register_io_source(source, schema=SCHEMA, is_pure=True)
