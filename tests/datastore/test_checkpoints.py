"""Checkpoints of the log: few, small beside it, and never needed."""

import json
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from store_rows import FP, build

import agentrl.datastore.table.checkpoints as checkpoints
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.delta_log import commit_key
from agentrl.datastore.table.delta_table import BufferTable

LOG = "trajectories/_delta_log"

KILLED = """
import os, signal, sys
from store_rows import FP, build
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table import checkpoints

checkpoints.LEAST_BYTES = 1
delete = LocalStorage.delete

def killed(self, key):
    if ".checkpoint." in key:
        os.kill(os.getpid(), signal.SIGKILL)
    delete(self, key)

LocalStorage.delete = killed
for shard in range(5):
    TrajectoryBuffer(sys.argv[1]).append([build(shard)], stage="rollout", fingerprint=FP, shard=shard)
"""


def commit_directly(to: BufferTable, version: int) -> int:
    """One commit of one file that does not exist. Gives its size."""
    stats = {"numRecords": 10, "minValues": {"trajectory_id": f"row-{version:06d}"}, "maxValues": {}, "nullCount": {}}
    add = {
        "path": f"part-{version:032x}.parquet",
        "size": 1000,
        "partitionValues": {},
        "modificationTime": 1,
        "dataChange": True,
        "stats": json.dumps(stats | {"maxValues": stats["minValues"]}),
    }
    info = {"timestamp": 1, "operation": "WRITE", "operationParameters": {}}
    lines = [{"add": add}, {"txn": {"appId": f"{FP}/{version}", "version": 0}}, {"commitInfo": info}]
    body = "\n".join(map(json.dumps, lines)).encode()
    (Path(to.storage.uri) / commit_key(version)).write_bytes(body)
    return len(body)


def written(store: Path) -> list[int]:
    return sorted(int(path.name[:20]) for path in (store / LOG).glob("*.checkpoint.parquet"))


def size(store: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in (store / LOG).glob(pattern))


def test_a_thousand_commits_have_two_checkpoints_and_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LEAST_BYTES", 2**19)
    to = BufferTable(LocalStorage(tmp_path))
    to.ensure()
    seen: set[int] = set()
    for version in range(1, 1201):
        bytes_committed = commit_directly(to, version)
        if version % 500 == 7:
            to = BufferTable(to.storage)  # another process, which has counted nothing yet
        checkpoints.committed(to, version, bytes_committed)
        if version % 50 == 0:
            seen |= set(written(tmp_path))
            assert size(tmp_path, "*.checkpoint.parquet") <= 2 * size(tmp_path, "*.json")
    assert 5 <= len(seen) <= 1200 * checkpoints.BLOCK_BYTES // checkpoints.LEAST_BYTES + 1
    assert len(written(tmp_path)) == 2
    assert len(list((tmp_path / LOG).glob("*.json"))) == 1201  # commits are never deleted
    uri = str(tmp_path / "trajectories")
    assert DeltaTable(uri).version() == 1200
    for version in (0, 1, min(seen), min(written(tmp_path)) - 1, *written(tmp_path), 1200):
        assert pa.table(DeltaTable(uri, version=version).get_add_actions()).num_rows == version
    assert to.open(min(seen)).version() == min(seen)
    assert pl.scan_delta(uri, version=min(seen)).collect_schema().names()[0] == "trajectory_id"


def test_a_kill_between_writing_and_deleting_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run(command, cwd=Path(__file__).parent, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert written(tmp_path) == [1, 2, 3]
    buffer = TrajectoryBuffer(tmp_path)
    assert buffer.scan().select(pl.len()).collect().item() == 3
    assert buffer.scan(1).select(pl.len()).collect().item() == 1
    monkeypatch.setattr(checkpoints, "LEAST_BYTES", 1)
    buffer.append([build(9)], stage="rollout", fingerprint=FP, shard=9)
    assert written(tmp_path) == [3, 4]
    assert buffer.scan(1).select(pl.len()).collect().item() == 1


def test_many_checkpoints_of_an_older_release_go_with_the_next_compaction(tmp_path: Path) -> None:
    from agentrl.datastore.upkeep import compact

    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(4):
        buffer.append([build(shard)], stage="rollout", fingerprint=FP, shard=shard)
        DeltaTable(buffer.uri).create_checkpoint()
    assert len(written(tmp_path)) == 4
    compact(buffer)
    assert written(tmp_path) == [3, 4]
    assert [buffer.scan(version).select(pl.len()).collect().item() for version in range(1, 6)] == [1, 2, 3, 4, 4]


def test_a_disk_that_takes_no_checkpoint_is_not_asked_at_every_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(self: DeltaTable) -> None:
        asked.append(self.version())
        raise OSError("No space left on device")

    monkeypatch.setattr(DeltaTable, "create_checkpoint", full)
    monkeypatch.setattr(checkpoints, "LEAST_BYTES", 5 * checkpoints.BLOCK_BYTES)
    to = BufferTable(LocalStorage(tmp_path))
    to.ensure()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for version in range(1, 21):
            checkpoints.committed(to, version, commit_directly(to, version))
    assert "No space left" in str(warned[0].message)
    assert 2 <= len(asked) <= 4
