"""Rows by id. Files are found by Delta's statistics, row groups by Parquet's, and only those are decoded.

Bounds of row groups are kept between calls, and footers up to a limit. Files never change, so what was read need not be
read again.
"""

import os
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datastore.copies import Copies
from datastore.errors import CorruptError
from datastore.places import LocalPlace, S3Place

if TYPE_CHECKING:
    from deltalake import DeltaTable

THREADS = os.cpu_count() or 2
FOOTER_BYTES = 2**25
"""Footers stay in memory up to this total, as they are stored. In memory they take several times as much."""


@dataclass
class _File:
    """One data file: bounds of its ids, and those of its row groups once the footer was read."""

    path: str
    least: str
    most: str
    groups: list[tuple[str, str]] | None = None


class Lookup:
    """Reads rows of one table by ``trajectory_id``."""

    def __init__(self, place: LocalPlace | S3Place, folder: str) -> None:
        self._place = place
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._version: tuple[object, int] | None = None
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._lock = threading.Lock()
        self._copies = Copies(place)

    def read(self, files: "Sequence[_File]", ids: Sequence[str], columns: Sequence[str], schema: pa.Schema) -> pa.Table:
        """Rows of ``files`` with these ids, in no promised order; ids that are not there are left out."""
        wanted = sorted(set(ids))
        values = pa.array(wanted, pa.string())
        hit = [file for file in files if _hit(wanted, file.least, file.most)]
        copied = {file.path: self._copies.read(file.path, _between(wanted, file), columns) for file in hit}
        work = [(file, self._groups(file, wanted)) for file in hit if copied[file.path] is None]
        # several row groups of one file are one task, but never so many that one thread has all the work
        tasks = [(file, groups[at : at + 8]) for file, groups in work for at in range(0, len(groups), 8)]

        def one(task: tuple[_File, list[int]]) -> pa.Table:
            file, groups = task
            with self._reading(file), self._open(file) as source:
                rows = source.read_row_groups(groups, columns=list(columns), use_threads=False)
            asked = pc.is_in(rows["trajectory_id"], value_set=values)
            rows = rows if pc.all(asked).as_py() else rows.filter(asked)  # a filter copies
            rows = rows.select(list(columns))
            return rows if rows.schema.equals(schema) else rows.cast(schema)  # so does a cast, even to the same

        if len(tasks) < 2:
            parts = [one(task) for task in tasks]
        else:
            with ThreadPoolExecutor(THREADS) as pool:
                parts = list(pool.map(one, tasks))
        parts += [rows.cast(schema) for rows in copied.values() if rows is not None]
        return pa.concat_tables([schema.empty_table(), *parts])

    def files(self, table: "DeltaTable") -> list[_File]:
        """The files of the table's version, for :meth:`read`."""
        version = (table.metadata().id, table.version())
        if version == self._version:
            return list(self._files.values())
        actions = pa.table(table.get_add_actions(flatten=True))
        names = [unquote(path) for path in actions["path"].to_pylist()]
        bounds = [
            actions[f"{side}.trajectory_id"].to_pylist()
            if f"{side}.trajectory_id" in actions.schema.names
            else [None] * len(names)
            for side in ("min", "max")
        ]
        self._files = {
            name: self._files.get(name) or _File(name, least or "", most or chr(0x10FFFF))
            for name, least, most in zip(names, *bounds, strict=True)
        }
        self._version = version
        return list(self._files.values())

    def _groups(self, file: _File, wanted: list[str]) -> list[int]:
        if file.groups is None:
            with self._reading(file), self._open(file) as source:
                footer = source.metadata
            index = footer.schema.to_arrow_schema().names.index("trajectory_id")  # a scalar before all lists
            found = (footer.row_group(number).column(index).statistics for number in range(footer.num_row_groups))
            file.groups = [(one.min, one.max) if one and one.has_min_max else ("", chr(0x10FFFF)) for one in found]
        return [number for number, (least, most) in enumerate(file.groups) if _hit(wanted, least, most)]

    @contextmanager
    def _reading(self, file: _File) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise CorruptError(f"data file {file.path}", str(error)) from error

    def _open(self, file: _File) -> pq.ParquetFile:
        source: Any
        if isinstance(self._place, LocalPlace):
            source = self._place.root / self._folder / file.path
        else:
            source = self._place.open(f"{self._folder}/{file.path}")
        footer = self._footers.get(file.path)
        opened = pq.ParquetFile(source, metadata=footer, pre_buffer=not isinstance(self._place, LocalPlace))
        if footer is None:
            self._keep(file.path, opened.metadata)
        return opened

    def _keep(self, path: str, footer: pq.FileMetaData) -> None:
        with self._lock:
            self._footers[path] = footer
            kept = sum(one.serialized_size for one in self._footers.values())
            while kept > FOOTER_BYTES:
                _, dropped = self._footers.popitem(last=False)
                kept -= dropped.serialized_size


def _between(wanted: list[str], file: _File) -> list[str]:
    """Those of a sorted list that a file may hold."""
    end = len(wanted) if file.most == chr(0x10FFFF) else bisect_right(wanted, file.most + chr(0x10FFFF))
    return wanted[bisect_left(wanted, file.least) : end]


def _hit(wanted: list[str], least: str, most: str) -> bool:
    """Whether a sorted list has a value within bounds; an upper bound that was cut short counts as open."""
    position = bisect_left(wanted, least)
    return position < len(wanted) and (wanted[position] <= most or wanted[position].startswith(most))
