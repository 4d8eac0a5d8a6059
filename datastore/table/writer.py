"""Parquet files of the buffer, written two at a time and committed together.

Row groups are small and only scalar columns carry statistics, of which the log has few. Text and tokens are compressed
by ZSTD. Tokens are split by byte first, which makes them smaller and cheaper to write than a dictionary does. All else
takes LZ4: a row group holds so little of each column that starting ZSTD takes longer than reading it. A file becomes
visible only with its commit.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.open_writers import Marked, new_writer
from agentrl.datastore.table.row_digests import STORED_SCHEMA
from agentrl.schemas.trajectory import HEAVY_COLUMNS, TRAJECTORY_SCHEMA

Action: TypeAlias = dict[str, Any]
"""One line of a Delta commit, such as ``{"add": {...}}``."""

GROUP_ROWS = 64  # fewer make a look-up faster; more make footers smaller, which the first scan on a machine reads
GROUP_SMALL_BYTES = 512 * 2**10  # of Arrow data: a row group of smaller rows takes more of them
GROUP_BYTES = 32 * 2**20  # of Arrow data in one row group, which is what a look-up of one row decodes at most
FILE_ROWS = 2**18
FILE_BYTES = 64 * 2**20  # of Arrow data; bounds memory
THREADS = 2

_LISTS = ("reward_components", "tags")
SCALARS = [name for name in TRAJECTORY_SCHEMA.names if name not in (*HEAVY_COLUMNS, *_LISTS)]
STATISTICS = (
    *("trajectory_id", "task_id", "env", "split", "level", "stage", "fingerprint"),
    *("policy_version", "created_at", "reward", "success"),
)
"""Columns whose bounds the log keeps for each file: those that our own queries filter by, and users most often. Each
costs about 70 bytes a file, which every process that opens the table reads. Parquet's footers have all scalars."""
_REPEATING = [
    *("agent", "task_id", "group_id", "source", "env", "env_version", "split"),
    *("pipeline", "stage", "fingerprint", "run_id"),
    *("policy", "sampling", "termination", "prompt", "tools", "tokenizer", "tags.list.element"),
    *("source_file", "model"),
    "spans.list.element.version",
    *("messages.list.element.role", "messages.list.element.name"),
    "messages.list.element.tool_calls.list.element.name",
    "reward_components.list.element.name",
]
_SPLIT = ["input_ids.list.element", "logprobs.list.element"]


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Paths of the Parquet columns that hold a value of this type."""
    if pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    else:
        yield path


_LARGE = (
    *("messages.list.element.content", "messages.list.element.reasoning"),
    "messages.list.element.tool_calls.list.element.arguments",
    *("tools", "final_state", "input_ids.list.element", "logprobs.list.element"),
)
_COMPRESSION = {
    leaf: "zstd" if leaf in _LARGE else "lz4" for field in STORED_SCHEMA for leaf in _leaves(field.name, field.type)
}


class FileWriter:
    """Writes files that a commit may then add. Leaving the block removes those that were not committed.

    ``committed`` is False until a commit is tried, None while its outcome is unknown, and True if it is in the log.
    """

    def __init__(self, storage: LocalStorage | S3Storage, data_change: bool = True) -> None:
        """``data_change`` is false if the files hold only rows that the table has already."""
        self._storage = storage
        self._data_change = data_change
        self.id = new_writer()
        self._mark = Marked(storage, self.id)
        self.names: list[str] = []
        self.committed: bool | None = False

    def __enter__(self) -> "FileWriter":
        try:
            self._mark.set()
        except OSError as error:
            raise StoreError(f"{self._storage.uri} cannot be written to, and nothing was appended: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self.committed is None:  # the files may be in the log; if not, `vacuum` finds that out
            self._mark.stop()
            return
        try:
            if not self.committed:
                for name in self.names:
                    self._storage.delete(f"{FOLDER}/{name}")
            self._mark.clear()
        except Exception as error:  # an error here must not hide that the commit succeeded
            self._mark.stop()
            warnings.warn(f"temporary files stay in {self._storage.uri} until a vacuum: {error}", stacklevel=2)

    def write(
        self, batches: Iterator[pa.RecordBatch], finish: Callable[[pa.Table], pa.Table] = lambda rows: rows
    ) -> list[Action]:
        """Add actions of as many files as the rows need, in the order of their rows. ``finish`` gives what is stored of
        the rows of a file, in the thread that writes it."""
        actions: list[Action] = []
        waiting: list[Future[Action]] = []
        with ThreadPoolExecutor(THREADS) as pool:
            for table in _parts(batches):
                waiting.append(pool.submit(self._finished, self._name(), table, finish))
                if len(waiting) >= THREADS:  # do not read ahead of what can be written
                    actions.append(waiting.pop(0).result())
            actions += [future.result() for future in waiting]
        return actions

    def _finished(self, name: str, table: pa.Table, finish: Callable[[pa.Table], pa.Table]) -> Action:
        sink = pa.BufferOutputStream()
        statistics = write_parquet([finish(table)], sink)
        data = sink.getvalue()
        self._storage.write(f"{FOLDER}/{name}", data.to_pybytes())
        return self._add(name, data.size, statistics)

    def write_one(self, tables: Iterable[pa.Table]) -> Action:
        """Add action of one file of all these rows, of which one table at a time is held."""
        name = self._name()
        with self._storage.writing(f"{FOLDER}/{name}") as path:
            statistics = write_parquet(tables, str(path))
            size = path.stat().st_size
        return self._add(name, size, statistics)

    def _name(self) -> str:
        name = f"part-{len(self.names):05d}-{self.id}.zstd.parquet"
        self.names.append(name)
        return name

    def _add(self, name: str, size: int, statistics: dict[str, Any]) -> Action:
        return {
            "add": {
                "path": name,
                "size": size,
                "partitionValues": {},
                "modificationTime": int(time.time() * 1000),
                "dataChange": self._data_change,
                "stats": json.dumps(statistics, ensure_ascii=False),  # delta-rs misreads escapes of surrogate pairs
            }
        }


def removal(name: str, size: int, data_change: bool = False) -> Action:
    """The action that takes a file out of the table."""
    now = int(time.time() * 1000)
    return {
        "remove": {
            "path": name,
            "deletionTimestamp": now,
            "dataChange": data_change,
            "extendedFileMetadata": True,
            "partitionValues": {},
            "size": size,
        }
    }


def write_parquet(tables: Iterable[pa.Table], sink: Any) -> dict[str, Any]:
    """Rows as one Parquet file of the buffer's kind. Gives its statistics, as Delta keeps them."""
    statistics = _Statistics()
    with pq.ParquetWriter(
        sink,
        STORED_SCHEMA,
        compression=_COMPRESSION,
        use_dictionary=_REPEATING,
        use_byte_stream_split=_SPLIT,
        write_statistics=SCALARS,
    ) as writer:
        for table in tables:
            statistics.add(table)
            writer.write_table(table, row_group_size=_group_rows(table))
    return statistics.as_delta()


def _group_rows(table: pa.Table) -> int:
    """Rows of a row group: so many small ones that footers grow with the bytes of a table, not with its rows."""
    size = max(1, table.nbytes // max(1, table.num_rows))
    return max(1, min(max(GROUP_ROWS, GROUP_SMALL_BYTES // size), GROUP_BYTES // size))


def _parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= FILE_ROWS or size >= FILE_BYTES:
            yield pa.Table.from_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.Table.from_batches(held)


class _Statistics:
    """Least and greatest values and nulls of :data:`STATISTICS`, over all rows of a file. Of a column that may not
    have nulls the schema says so."""

    def __init__(self) -> None:
        self._rows = 0
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self._nulls = {name: 0 for name in STATISTICS if STORED_SCHEMA.field(name).nullable}

    def add(self, table: pa.Table) -> None:
        self._rows += table.num_rows
        for name in STATISTICS:
            nulls = table[name].null_count
            if name in self._nulls:
                self._nulls[name] += nulls
            if pa.types.is_boolean(table.schema.field(name).type) or nulls == table.num_rows:
                continue
            bounds = pc.min_max(table[name])
            least, most = bounds["min"].as_py(), bounds["max"].as_py()
            self._least[name] = min(self._least.get(name, least), least)
            self._most[name] = max(self._most.get(name, most), most)

    def as_delta(self) -> dict[str, Any]:
        least, most = ({k: _json_value(v) for k, v in side.items()} for side in (self._least, self._most))
        return {"numRecords": self._rows, "minValues": least, "maxValues": most, "nullCount": self._nulls}


def _json_value(value: Any) -> Any:
    return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if isinstance(value, datetime) else value
