"""A log of many files that do not exist, as our writer would have written it, to measure what opening a table costs."""

import json
import resource
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa

from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.checkpoints import overdue_checkpoint
from agentrl.datastore.table.delta_log import LOG, commit_key
from agentrl.datastore.table.delta_table import BufferTable
from agentrl.datastore.table.writer import STATISTICS
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

FILES_PER_COMMIT = 125
"""A billion rows in files of 8,192 are 122,000 files; here in a thousand commits."""


def _bound(name: str, number: int) -> Any:
    kind = TRAJECTORY_SCHEMA.field(name).type
    if pa.types.is_integer(kind):
        return number
    if pa.types.is_floating(kind):
        return 0.25
    if pa.types.is_timestamp(kind):
        return "2026-11-24T10:00:00.123456Z"
    if name == "trajectory_id":
        return f"rollout-01234567-{number:08d}-0003"
    return uuid.UUID(int=number // 100).hex if name == "fingerprint" else f"{name}-value-{number % 97}"


def _add(number: int) -> str:
    bounds = {name: _bound(name, number) for name in STATISTICS if name != "success"}
    nulls = {"reward": 0, "success": 0}
    stats = {"numRecords": 8192, "minValues": bounds, "maxValues": bounds, "nullCount": nulls}
    add = {
        "path": f"part-{number % FILES_PER_COMMIT:05d}-{uuid.uuid4().hex}.zstd.parquet",
        "size": 67_000_000 + number,
        "partitionValues": {},
        "modificationTime": 1_700_000_000_000,
        "dataChange": True,
        "stats": json.dumps(stats),
    }
    return json.dumps({"add": add})


def write_log(store: str, files: int) -> None:
    """Write the log of a table of so many files, with its checkpoint, and print what each takes."""
    to = BufferTable(LocalStorage(Path(store)))
    to.ensure()
    for version in range(1, files // FILES_PER_COMMIT + 1):
        first = (version - 1) * FILES_PER_COMMIT
        lines = [_add(number) for number in range(first, first + FILES_PER_COMMIT)]
        info = {"timestamp": 1, "operation": "WRITE", "operationParameters": {}, "commit": uuid.uuid4().hex}
        lines += [json.dumps({"txn": {"appId": f"fp/{version}", "version": 0}}), json.dumps({"commitInfo": info})]
        (Path(store) / commit_key(version)).write_text("\n".join(lines))
    if why := overdue_checkpoint(to):
        raise SystemExit(why)


def sizes(store: str) -> tuple[int, int]:
    """Bytes of the log's commits, and of its checkpoints."""
    folder = Path(store) / LOG
    commits, checkpoints = (
        sum(path.stat().st_size for path in folder.glob(pattern)) for pattern in ("*.json", "*.checkpoint.parquet")
    )
    return commits, checkpoints


def open_log(store: str) -> None:
    """Open the table, and print the CPU seconds of that alone and the peak MB of the process."""
    import deltalake  # noqa: F401  -  what importing costs is not what opening costs

    to = BufferTable(LocalStorage(Path(store)))
    start = time.process_time()
    to.open()
    seconds = time.process_time() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
