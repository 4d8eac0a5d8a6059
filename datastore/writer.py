"""Parquet files of the buffer, written two at a time and committed together.

Row groups are small and only scalar columns carry statistics. Text and tokens are compressed by ZSTD, tokens split by
byte before, which makes them smaller and cheaper to write than a dictionary would. Scalars take LZ4: a row group holds
so little of each that to start ZSTD costs more than to read it. A file becomes visible with the commit alone.
"""

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datastore.places import Place
from schemas.trajectory import HEAVY_COLUMNS, TRAJECTORY_SCHEMA

if TYPE_CHECKING:
    from deltalake.transaction import AddAction

ROW_GROUP_ROWS = 96  # fewer make a look-up faster, and more a first scan: its cost is reading the footers
FILE_ROWS = 106 * ROW_GROUP_ROWS  # about ten thousand
FILE_BYTES = 96 * 2**20  # of Arrow data; bounds memory
THREADS = 2

_LISTS = ("reward_components", "tags")
SCALARS = [name for name in TRAJECTORY_SCHEMA.names if name not in (*HEAVY_COLUMNS, *_LISTS)]
_STATISTICS = [name for name in SCALARS if name not in ("prompt", "sampling")]
_REPEATING = [
    *("agent", "task_id", "group_id", "source", "env", "env_version", "split", "stage", "fingerprint", "run_id"),
    *("policy", "sampling", "termination", "prompt", "tools", "tokenizer", "tags.list.element"),
    *("messages.list.element.role", "messages.list.element.name"),
    "messages.list.element.tool_calls.list.element.name",
    "reward_components.list.element.name",
]
_SPLIT = ["input_ids.list.element", "logprobs.list.element"]
FOLDER = "trajectories"


def _leaves(path: str, kind: pa.DataType) -> Iterator[str]:
    """Paths of the Parquet columns that hold a value of this type."""
    if pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _leaves(f"{path}.{field.name}", field.type)
    else:
        yield path


_COMPRESSION = {
    leaf: "zstd" if field.name in HEAVY_COLUMNS else "lz4"
    for field in TRAJECTORY_SCHEMA
    for leaf in _leaves(field.name, field.type)
}


class FileWriter:
    """Writes a stream of batches as files; :meth:`discard` removes what was written and not committed."""

    def __init__(self, place: Place, data_change: bool = True) -> None:
        """``data_change`` is false where the files only hold rows that the table has already."""
        self._place = place
        self._data_change = data_change
        self.names: list[str] = []

    def write(self, batches: Iterator[pa.RecordBatch]) -> "list[AddAction]":
        """Add actions of the files, in the order of their rows."""
        actions: list[AddAction] = []
        waiting: list[Future[AddAction]] = []
        with ThreadPoolExecutor(THREADS) as pool:
            for table in _parts(batches):
                name = f"part-{len(self.names):05d}-{uuid.uuid4().hex}.zstd.parquet"
                self.names.append(name)
                waiting.append(pool.submit(self._file, name, table))
                if len(waiting) > THREADS:  # do not read ahead of what can be written
                    actions.append(waiting.pop(0).result())
            actions += [future.result() for future in waiting]
        return actions

    def _file(self, name: str, table: pa.Table) -> "AddAction":
        from deltalake.transaction import AddAction

        sink = pa.BufferOutputStream()
        write_parquet(table, sink)
        data = sink.getvalue()
        self._place.write(f"{FOLDER}/{name}", data.to_pybytes())
        return AddAction(
            path=name,
            size=data.size,
            partition_values={},
            modification_time=int(time.time() * 1000),
            data_change=self._data_change,
            stats=json.dumps(_statistics(table), ensure_ascii=False),  # delta-rs misreads escapes of surrogate pairs
        )

    def discard(self) -> None:
        for name in self.names:
            self._place.delete(f"{FOLDER}/{name}")


def write_parquet(table: pa.Table, sink: Any) -> None:
    """Rows as one Parquet file of the buffer's kind."""
    pq.write_table(
        table,
        sink,
        compression=_COMPRESSION,
        row_group_size=ROW_GROUP_ROWS,
        use_dictionary=_REPEATING,
        use_byte_stream_split=_SPLIT,
        write_statistics=SCALARS,
    )


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


def _statistics(table: pa.Table) -> dict[str, Any]:
    """Delta's statistics of one file: readers skip files by them."""
    least: dict[str, Any] = {}
    most: dict[str, Any] = {}
    nulls = {name: table[name].null_count for name in _STATISTICS}
    for name in _STATISTICS:
        if pa.types.is_boolean(table.schema.field(name).type) or nulls[name] == table.num_rows:
            continue
        bounds = pc.min_max(table[name])
        least[name], most[name] = _json_value(bounds["min"].as_py()), _json_value(bounds["max"].as_py())
    return {"numRecords": table.num_rows, "minValues": least, "maxValues": most, "nullCount": nulls}


def _json_value(value: Any) -> Any:
    return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ") if isinstance(value, datetime) else value
