"""Rows by id. Only the row groups that may hold one are decoded. In large files that were read before, an index names
them (:mod:`agentrl.datastore.read.row_index`). Otherwise files are found by Delta's statistics and row groups by
Parquet's. Then bounds of row groups are kept between calls, and footers up to a limit.
"""

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import CorruptError, StoreError
from agentrl.datastore.read.footers import part
from agentrl.datastore.read.row_index import LEAST_GROUPS, RowGroup, RowIndex
from agentrl.datastore.read.token_cache import Copies
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.older_schemas import to_read, upgrade
from agentrl.schemas.hints import did_you_mean, nearest
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

if TYPE_CHECKING:
    import polars as pl
    from deltalake import DeltaTable

THREADS = os.cpu_count() or 2
Item = TypeVar("Item")
Result = TypeVar("Result")
Ids: TypeAlias = Sequence[str] | pa.Array | pa.ChunkedArray
_LAST = chr(0x10FFFF)
FOOTER_BYTES = 2**25
"""Footers stay in memory up to this total, as they are stored. In memory they take about eleven times as much."""


class _Group(NamedTuple):
    """One row group: its number in the file, and bounds of its ids."""

    number: int
    least: str
    most: str


def known_columns(columns: Sequence[str] | None) -> list[str]:
    """These columns, or all. Raises StoreError if a trajectory has none of such a name."""
    names = list(columns) if columns is not None else list(TRAJECTORY_SCHEMA.names)
    if unknown := [name for name in names if name not in TRAJECTORY_SCHEMA.names]:
        hint = did_you_mean(unknown[0], TRAJECTORY_SCHEMA.names)
        raise StoreError(f"a trajectory has no column {unknown[0]!r}{hint}")
    return names


def id_array(ids: Ids) -> pa.Array:
    """Ids as one Arrow array of strings."""
    array = ids if isinstance(ids, pa.Array | pa.ChunkedArray) else pa.array(ids, pa.string())
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return array.cast(pa.string())


@dataclass
class _File:
    """One data file: bounds of its ids, and once the footer was read, those of its row groups and its columns."""

    path: str
    least: str
    most: str
    groups: list[_Group] | None = None
    names: list[str] | None = None
    columns: tuple[str, ...] = ()
    tasks: tuple[str, str] = ("", _LAST)
    """Bounds of its task ids."""


class Lookup:
    """Reads rows of one table by ``trajectory_id``."""

    def __init__(self, storage: LocalStorage | S3Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._version: tuple[object, int] | None = None
        self._footers: dict[str, pq.FileMetaData] = {}
        self._lock = threading.Lock()
        self._copies = Copies(storage)
        self._index = RowIndex(storage, folder, "trajectory_id")
        self._by_task = RowIndex(storage, folder, "task_id")

    def read(
        self, files: "Sequence[_File]", ids: pa.Array, columns: Sequence[str], schema: pa.Schema, newest: bool = True
    ) -> pa.Table:
        """Rows of ``files`` with these ids; ids that are not there are left out. What is read together stays together,
        and follows its least id, so that ids that are asked for in order often need no further copy. ``newest``:
        whether these are the files of the newest version; large ones that had to be searched are indexed then."""
        values = pc.unique(ids)
        values = values.take(pc.sort_indices(values))
        try:
            parts, searched = self._indexed(files, values, columns)
        except CorruptError:  # the index may be wrong: if a data file cannot be read, that is said below
            self._index.clear()
            parts, searched = [], list(files)
        more, opened = self._searched(searched, values, columns)
        parts += more
        if len(searched) < len(files) and sum(rows.num_rows for rows in parts) < len(values):
            parts += self._not_indexed(files, searched, parts, values, columns)
        large = [file.path for file in opened if len(file.groups or ()) >= LEAST_GROUPS]
        if newest and large:
            self._index.add(large, {file.path for file in files})
        parts.sort(key=lambda rows: rows["trajectory_id"][0].as_py())
        # a cast copies, even to the same schema
        cast = (rows if rows.schema.equals(schema) else rows.cast(schema) for rows in parts)
        return pa.concat_tables([schema.empty_table(), *cast])

    def _indexed(
        self, files: "Sequence[_File]", values: pa.Array, columns: Sequence[str]
    ) -> "tuple[list[pa.Table], list[_File]]":
        """Rows of those files that are indexed, and the other files."""
        layouts = self._index.layouts()
        if not layouts:
            return [], list(files)
        live = {file.path: file for file in files if file.path in layouts}
        matches = {name: places for name, places in self._index.find(values.to_pylist()).items() if name in live}
        copied = dict(
            zip(matches, _each(lambda name: self._copies.read(name, values, columns), list(matches)), strict=True)
        )
        tasks = [
            (live[name], places[at : at + 8])
            for name, places in matches.items()
            if copied[name] is None
            for at in range(0, len(places), 8)
        ]

        def one(task: tuple[_File, list[RowGroup]]) -> pa.Table:
            file, places = task
            with self._reading(file), self._index.source(file.path) as source:
                some = part(source, layouts[file.path], places)
                remote = not isinstance(self._storage, LocalStorage)
                with pq.ParquetFile(source, metadata=some, pre_buffer=remote) as opened:
                    return _rows(opened, range(len(places)), values, columns)

        parts = [rows for rows in [*copied.values(), *_each(one, tasks)] if rows is not None and rows.num_rows]
        return parts, [file for file in files if file.path not in layouts]

    def _not_indexed(
        self,
        files: "Sequence[_File]",
        searched: "Sequence[_File]",
        parts: Sequence[pa.Table],
        values: pa.Array,
        columns: Sequence[str],
    ) -> list[pa.Table]:
        """Rows of ids that the index did not find, in the files that it says are without them: it is believed only if
        it is right. If there are any, it is forgotten."""
        known = pa.chunked_array([rows["trajectory_id"].combine_chunks() for rows in parts], pa.string())
        missing = values.filter(pc.invert(pc.is_in(values, value_set=known)))
        done = {file.path for file in searched}
        more, _ = self._searched([file for file in files if file.path not in done], missing, columns)
        if more:
            self._index.clear()
        return more

    def _searched(
        self, files: "Sequence[_File]", values: pa.Array, columns: Sequence[str]
    ) -> "tuple[list[pa.Table], list[_File]]":
        """Rows of files with these ids, which are sorted, by bounds of files and row groups; and the files that were
        opened."""
        names = values.to_pylist()

        def within(least: str, most: str) -> pa.Array:
            first, end = _between(names, least, most)
            return values.slice(first, end - first)

        hit = [(file, asked) for file in files if len(asked := within(file.least, file.most))]
        copied = _each(
            lambda group_and_rows: self._copies.read(group_and_rows[0].path, group_and_rows[1], columns), hit
        )
        rest = [file for (file, _), rows in zip(hit, copied, strict=True) if rows is None]
        work = zip(rest, _each(lambda file: self._groups(file, names), rest), strict=True)
        # several row groups of one file are one task, but never so many that one thread has all the work
        tasks = [(file, groups[at : at + 8]) for file, groups in work for at in range(0, len(groups), 8)]

        def one(task: tuple[_File, list[_Group]]) -> pa.Table:
            file, groups = task
            # the ids that these row groups may hold, since Arrow hashes all that it is given
            few = within(min(group.least for group in groups), max(group.most for group in groups))
            with self._reading(file), self._open(file) as source:
                return _rows(source, [group.number for group in groups], few, columns, there=file.columns)

        parts = [rows for rows in [*copied, *_each(one, tasks)] if rows is not None and rows.num_rows]
        return parts, rest

    def of_task(
        self, files: "Sequence[_File]", task_id: str, columns: Sequence[str], schema: pa.Schema, newest: bool = True
    ) -> pa.Table:
        """Rows of ``files`` that attempt a task, in no promised order; ``columns`` holds ``task_id``. ``newest`` as for
        :meth:`read`."""
        index = self._by_task
        may = [file for file in files if _hit([task_id], *file.tasks)]
        if newest:
            index.add((file.path for file in may), {file.path for file in files})
        layouts = index.layouts()
        matches = index.find([task_id])

        def one(file: _File) -> pa.Table:
            groups = matches.get(file.path)
            with self._reading(file), index.source(file.path) as source:
                known = self._footers.get(file.path) if groups is None else part(source, layouts[file.path], groups)
                remote = not isinstance(self._storage, LocalStorage)
                with pq.ParquetFile(source, metadata=known, pre_buffer=remote) as opened:
                    if groups is None:
                        self._keep(file.path, opened.metadata)
                    groups_of_file = _row_groups(opened.metadata, opened.schema_arrow.names.index("task_id"))
                    numbers = [group.number for group in groups_of_file if _hit([task_id], group.least, group.most)]
                    return _rows(opened, numbers, pa.array([task_id]), columns, "task_id")

        parts = _each(one, [file for file in may if file.path in matches or file.path not in layouts])
        return pa.concat_tables([schema.empty_table(), *(rows.cast(schema) for rows in parts if rows.num_rows)])

    def files(self, table: "DeltaTable") -> list[_File]:
        """The files of the table's version, for :meth:`read`."""
        version = (table.metadata().id, table.version())
        if version == self._version:
            return list(self._files.values())
        actions = pa.table(table.get_add_actions(flatten=True))
        names = [unquote(path) for path in actions["path"].to_pylist()]
        bounds = [
            actions[f"{side}.{column}"].to_pylist()
            if f"{side}.{column}" in actions.schema.names
            else [None] * len(names)
            for column in ("trajectory_id", "task_id")
            for side in ("min", "max")
        ]
        self._files = {
            name: self._files.get(name) or _File(name, least or "", most or _LAST, tasks=(first or "", last or _LAST))
            for name, least, most, first, last in zip(names, *bounds, strict=True)
        }
        self._version = version
        with self._lock:
            self._footers = {name: footer for name, footer in self._footers.items() if name in self._files}
        return list(self._files.values())

    def _names(self, file: _File, source: pq.ParquetFile) -> list[str]:
        if file.names is None:
            file.names = source.schema_arrow.names  # made anew each time it is asked for
        return file.names

    def _groups(self, file: _File, names: list[str]) -> "list[_Group]":
        """Row groups of a file that may hold one of these ids, which are sorted."""
        if file.groups is None:
            with self._reading(file), self._open(file) as source:
                footer = source.metadata
            file.columns = tuple(footer.schema.to_arrow_schema().names)
            file.groups = _row_groups(footer, file.columns.index("trajectory_id"))  # a scalar before all lists
        return [group for group in file.groups if _hit(names, group.least, group.most)]

    @contextmanager
    def _reading(self, file: _File) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise CorruptError(f"data file {file.path}", str(error)) from error

    def _open(self, file: _File) -> pq.ParquetFile:
        source: Any
        if isinstance(self._storage, LocalStorage):
            source = self._storage.root / self._folder / file.path
        else:
            source = self._storage.open(f"{self._folder}/{file.path}")
        footer = self._footers.get(file.path)
        opened = pq.ParquetFile(source, metadata=footer, pre_buffer=not isinstance(self._storage, LocalStorage))
        if footer is None:
            self._keep(file.path, opened.metadata)
        return opened

    def _keep(self, path: str, footer: pq.FileMetaData) -> None:
        """Keep a footer if there is room. None makes room for another: random ids go through all files again and again,
        and the one that was used longest ago is then the one that is needed next."""
        with self._lock:
            if (
                sum(footer.serialized_size for footer in self._footers.values()) + footer.serialized_size
                <= FOOTER_BYTES
            ):
                self._footers[path] = footer


def _each(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """What ``work`` makes of each item, in threads if there are several."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, items))


def _row_groups(footer: pq.FileMetaData, column: int) -> list[_Group]:
    """The row groups of a file with bounds of a column."""
    statistics = (footer.row_group(number).column(column).statistics for number in range(footer.num_row_groups))
    bounds = (
        (statistic.min, statistic.max) if statistic and statistic.has_min_max else ("", _LAST)
        for statistic in statistics
    )
    return [_Group(number, *both) for number, both in enumerate(bounds)]


def _rows(
    file: pq.ParquetFile,
    groups: Sequence[int],
    values: pa.Array,
    columns: Sequence[str],
    by: str = "trajectory_id",
    there: Sequence[str] = (),
) -> pa.Table:
    """Rows of these row groups with one of these values in the column ``by``, which is among ``columns``. ``there``:
    the columns of the file, if they are known."""
    there = there or file.schema_arrow.names
    old = not set(columns) <= set(there)
    read = to_read(columns, there) if old else list(columns)
    rows = file.read_row_groups(list(groups), columns=read, use_threads=False)
    rows = _chosen(rows, pc.is_in(rows[by], value_set=values))
    return upgrade(rows, columns) if old else rows.select(list(columns))


def _chosen(rows: pa.Table, asked: pa.ChunkedArray) -> pa.Table:
    """The rows that were asked for. A filter copies, and goes through all columns of a row group for one row: all rows
    are passed on as they are, and a few are cut out."""
    places = pc.indices_nonzero(asked).to_pylist()
    if len(places) == rows.num_rows:
        return rows
    if places and len(places) * 32 <= rows.num_rows:
        return pa.concat_tables([rows.slice(row, 1) for row in places])
    return rows.filter(asked)


def _between(names: list[str], least: str, most: str) -> tuple[int, int]:
    """Where those of a sorted list begin and end that lie within bounds; an upper bound that was cut short counts as
    open."""
    return bisect_left(names, least), len(names) if most == _LAST else bisect_right(names, most + _LAST)


def _hit(wanted: list[str], least: str, most: str) -> bool:
    """Whether a sorted list has a value within bounds; an upper bound that was cut short counts as open."""
    position = bisect_left(wanted, least)
    return position < len(wanted) and (wanted[position] <= most or wanted[position].startswith(most))


def near_ids(rows: "pl.LazyFrame", name: str) -> list[str]:
    """Existing ids that are similar to this one. Only ids that share its longest existing prefix are compared, which
    is fast."""
    import polars as pl

    ids = rows.select("trajectory_id")
    for length in (len(name), *(len(name) * quarters // 4 for quarters in (3, 2, 1)), 0):
        near = ids.filter(pl.col("trajectory_id").str.starts_with(name[:length])).head(5000).collect()
        if near.height:
            return nearest(name, near["trajectory_id"].to_list(), 3, 0.5)
    return []
