"""An index of rows by one column, beside the store: which row groups of which data files may hold a value.

A row takes 20 bytes: a hash of the value, the data file, and where the row group's part of the footer is. So a look-up
neither goes through the bounds of all files nor parses whole footers. The index is of data files, which never change:
what it says of a file holds in every version, and files that are not in it are looked up without it. It is made of
segments, sorted by hash and mapped into memory. New files make a small segment; small ones are merged. A segment ends
with a digest of its bytes, so what was torn or changed is not believed. All of it can be deleted at any time.
"""

import json
import os
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from agentrl.datastore.read.footers import Layout, split
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.storage.ownership import mark

FOLDER = "rows"
LEAST_GROUPS = 32
"""Files of fewer row groups are not indexed: to parse their footers costs less."""
SEGMENT_ROWS = 2**22
"""Segments are merged up to so many rows, 84 MB, which bounds the memory of a merge to three times as much."""

_DIGEST_BYTES = 16
_KIND = np.dtype([("hash", np.uint64), ("file", np.uint32), ("offset", np.uint32), ("size", np.uint32)])

RowGroup = tuple[int, int]
"""Offset and size of a row group's part of a footer, in the data file."""


class _Segment(NamedTuple):
    path: Path
    files: list[str]
    layouts: list[Layout]
    columns: dict[str, np.ndarray]

    @property
    def rows(self) -> int:
        return len(self.columns["hash"])


class RowIndex:
    """The index of one table by one column. Threads and processes may share it: segments are replaced as a whole, and
    the worst case is that a file is indexed twice."""

    def __init__(self, storage: LocalStorage | S3Storage, folder: str, column: str) -> None:
        """``folder``: that of the data files."""
        self._storage = storage
        self._files = folder
        self._column = column
        self._working = storage.working_folder()
        self.folder = self._working / FOLDER / column
        self._segments: dict[str, _Segment] = {}
        self._unfit: set[str] = set()
        self._layouts: dict[str, Layout] = {}

    def layouts(self) -> Mapping[str, Layout]:
        """The data files that are indexed, with the layout of their footers. What other processes added counts."""
        try:
            names = {entry.name for entry in os.scandir(self.folder) if entry.name.endswith(".arrow")}
        except (FileNotFoundError, NotADirectoryError):
            names = set()
        if names != self._segments.keys():
            segments = {name: self._segments.get(name) or _loaded(self.folder / name) for name in sorted(names)}
            self._segments = {name: segment for name, segment in segments.items() if segment is not None}
            self._layouts = {
                file: layout
                for segment in self._segments.values()
                for file, layout in zip(segment.files, segment.layouts, strict=True)
            }
        return self._layouts

    def find(self, values: Iterable[str]) -> dict[str, list[RowGroup]]:
        """Data files that may hold one of these values, with the row groups that may, in their order."""
        asked = np.unique(hashes(values))
        places_of: dict[str, set[RowGroup]] = {}
        for segment in list(self._segments.values()):
            every = segment.columns["hash"]
            firsts, ends = np.searchsorted(every, asked, "left"), np.searchsorted(every, asked, "right")
            for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
                for row in range(first, end):
                    file = segment.files[int(segment.columns["file"][row])]
                    start = segment.layouts[int(segment.columns["file"][row])].start
                    group = (start + int(segment.columns["offset"][row]), int(segment.columns["size"][row]))
                    places_of.setdefault(file, set()).add(group)
        return {file: sorted(places) for file, places in places_of.items()}

    def add(self, files: Iterable[str], live: Collection[str]) -> int:
        """Index data files that are not indexed yet, and give their number. ``live``: the files of the newest version;
        what the index has of others may go. A disk that takes no more is no error: the index only saves time."""
        known = self.layouts()
        added = 0
        held: list[tuple[str, Layout, np.ndarray]] = []
        for name in files:
            if name in known or name in self._unfit:
                continue
            try:
                entry = self._read(name)
            except (pa.ArrowException, OSError):  # it left the table meanwhile, or cannot be read, which others say
                continue
            if entry is None:
                self._unfit.add(name)
                continue
            held.append(entry)
            added += 1
            if sum(len(rows) for _, _, rows in held) >= SEGMENT_ROWS // 2:
                self._keep(held, live)
                held = []
        self._keep(held, live)
        return added

    def clear(self) -> None:
        """Forget all: what it says was found to be wrong."""
        for path in self.folder.glob("*.arrow"):
            path.unlink(missing_ok=True)
        self._segments, self._layouts = {}, {}

    def _read(self, name: str) -> tuple[str, Layout, np.ndarray] | None:
        """A data file's entries; None if it is too small to be worth it, or its footer cannot be split."""
        with self.source(name) as source:
            file = pq.ParquetFile(source)
            groups = file.metadata.num_row_groups
            if groups < LEAST_GROUPS or (parts := split(source, file.metadata)) is None:
                return None
            layout, bounds = parts
            values = file.read([self._column], use_threads=False)[self._column]
            counts = [file.metadata.row_group(number).num_rows for number in range(groups)]
        hashed, numbers = hashes(values.to_pylist()), np.repeat(np.arange(groups), counts)
        order = np.lexsort((numbers, hashed))
        hashed, numbers = hashed[order], numbers[order]
        new = np.ones(len(order), bool)  # rows of one group with one value are one entry
        new[1:] = (hashed[1:] != hashed[:-1]) | (numbers[1:] != numbers[:-1])
        rows = np.zeros(int(new.sum()), _KIND)
        rows["hash"] = hashed[new]
        rows["offset"] = (bounds[:-1] - layout.start)[numbers[new]]
        rows["size"] = np.diff(bounds)[numbers[new]]
        return name, layout, rows

    def source(self, name: str) -> pa.NativeFile:
        """A data file, to read parts of."""
        if isinstance(self._storage, LocalStorage):
            return pa.OSFile(str(self._storage.root / self._files / name))
        return self._storage.open(f"{self._files}/{name}")

    def _keep(self, held: Sequence[tuple[str, Layout, np.ndarray]], live: Collection[str]) -> None:
        """Write a segment of these files, merged with those that are no larger."""
        if not held:
            return
        names, layouts = [name for name, _, _ in held], [layout for _, layout, _ in held]
        parts = [rows for _, _, rows in held]
        for number, rows in enumerate(parts):
            rows["file"] = number
        merged = []
        for segment in sorted(self._segments.values(), key=lambda segment: segment.rows):
            size = sum(map(len, parts))
            if segment.rows > size or segment.rows + size > SEGMENT_ROWS:
                break
            parts.append(_moved(segment, names, layouts, live))
            merged.append(segment)
        rows = np.concatenate(parts)
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        with suppress(OSError):
            self._write(rows, names, layouts)
            for segment in merged:
                segment.path.unlink(missing_ok=True)
        self.layouts()

    def _write(self, rows: np.ndarray, names: list[str], layouts: list[Layout]) -> None:
        sink = pa.BufferOutputStream()
        files = json.dumps([[name, *map(int, layout)] for name, layout in zip(names, layouts, strict=True)])
        columns = [pa.array(rows[name]) for name in _KIND.names or ()]
        schema = pa.schema([(name, array.type) for name, array in zip(_KIND.names or (), columns, strict=True)])
        with pa.ipc.new_file(sink, schema.with_metadata({"files": files})) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        data = sink.getvalue()
        path = self.folder / f"{uuid.uuid4().hex}.arrow"
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{mark(self._working)}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.write(xxh3_128_digest(data))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def hashes(values: Iterable[str]) -> np.ndarray:
    """One 64-bit hash per value (uint64). It is stored, so it never changes: XXH3 of the UTF-8 bytes."""
    return np.fromiter((xxh3_64_intdigest(value.encode()) for value in values), np.uint64)


def _moved(segment: _Segment, names: list[str], layouts: list[Layout], live: Collection[str]) -> np.ndarray:
    """A segment's entries of live files that ``names`` lacks, under the numbers that they get there."""
    known = set(names)
    number = np.full(len(segment.files), -1, np.int64)
    for at, (name, layout) in enumerate(zip(segment.files, segment.layouts, strict=True)):
        if name in live and name not in known:
            number[at] = len(names)
            names.append(name)
            layouts.append(layout)
    new = number[segment.columns["file"]]
    rows = np.zeros(segment.rows, _KIND)
    for name, values in segment.columns.items():
        rows[name] = values
    rows["file"] = new
    return rows[new >= 0]


def _loaded(path: Path) -> _Segment | None:
    """A segment, mapped into memory. One that is not whole is removed."""
    try:
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
        size = len(data) - _DIGEST_BYTES
        if size > 0 and xxh3_128_digest(data[:size]) == data[size:].to_pybytes():
            table: Any = pa.ipc.open_file(pa.BufferReader(data[:size])).read_all()
            files = json.loads(table.schema.metadata[b"files"])
            columns = {name: table[name].chunk(0).to_numpy() for name in _KIND.names or ()}
            return _Segment(path, [file[0] for file in files], [Layout(*file[1:]) for file in files], columns)
    except (FileNotFoundError, PermissionError):  # merged by another process meanwhile
        return None
    except (pa.ArrowException, ValueError, KeyError, TypeError, IndexError):
        pass
    path.unlink(missing_ok=True)
    return None
