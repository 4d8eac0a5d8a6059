"""Repair: what earlier versions doubled or lost is found, put right if it can be, and never called sound if not."""

import json
import shutil
import time
from pathlib import Path

import polars as pl
import pytest
from store_rows import FP, build
from typer.testing import CliRunner

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.errors import OlderSchemaError
from agentrl.datastore.table.delta_log import commit_key, newest
from agentrl.datastore.upkeep import accept_losses, check, compact, losses, repair
from agentrl.flows.cli import app


def fill(store: str | Path, shards: int = 3, rows: int = 20) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        part = [build(i) for i in range(shard * rows, shard * rows + rows)]
        buffer.append(part, stage="rollout", fingerprint=FP, shard=shard)
    return buffer


def add_copy(buffer: TrajectoryBuffer, source: TrajectoryBuffer) -> None:
    """Commit a copy of the newest file of ``source``, as a compaction that was raced did in earlier versions."""
    adds = newest(source.storage, 1)[0].adds
    actions = []
    for name, add in adds.items():
        copy = f"copy-{name}"
        buffer.storage.write(f"trajectories/{copy}", source.storage.read(f"trajectories/{name}") or b"")
        actions.append({"add": add | {"path": copy}})
    actions.append({"commitInfo": {"timestamp": int(time.time() * 1000), "operation": "WRITE", "upkeep": "compact"}})
    body = "\n".join(map(json.dumps, actions)).encode()
    buffer.storage.write(commit_key((buffer.version or 0) + 1), body)


def count(store: str | Path) -> int:
    return int(TrajectoryBuffer(store).scan().select(pl.len()).collect().item())


def test_a_doubled_store_is_found_and_repaired(store: str) -> None:
    buffer = fill(store)
    ids = buffer.ids(FP)
    digest = buffer.digest(ids)
    compact(buffer)
    add_copy(buffer, buffer)
    assert count(store) == 120
    [fault] = check(TrajectoryBuffer(store))
    assert fault.kind == "doubled"
    assert fault.what.startswith("60 ids of")
    assert "check --repair" in fault.advice
    done = repair(TrajectoryBuffer(store))
    assert (done.once, done.set_aside) == (60, 0)
    fresh = TrajectoryBuffer(store)
    assert count(store) == 60
    assert fresh.digest(ids) == digest
    assert check(fresh) == []


def test_of_two_rows_with_one_id_the_first_stays_and_the_other_is_set_aside(tmp_path: Path) -> None:
    buffer = fill(tmp_path / "store")
    other = TrajectoryBuffer(tmp_path / "other")
    other.append([build(3), build(4, prompt="something else"), build(700)], stage="rollout", fingerprint=FP)
    add_copy(buffer, other)
    assert [(problem.kind, problem.what[:5]) for problem in check(buffer)] == [("doubled", "2 ids")]
    done = repair(buffer)
    assert (done.once, done.set_aside) == (1, 1)
    assert buffer.quarantined()["prompt"].to_list() == ["something else"]
    assert buffer.get(build(4).trajectory_id).prompt == build(4).prompt
    assert buffer.get(build(700).trajectory_id)
    assert check(buffer) == []


@pytest.mark.parametrize("times", [1, 2], ids=["compacted", "compacted twice"])
def test_rows_are_restored_from_the_files_that_were_merged(tmp_path: Path, times: int) -> None:
    buffer = fill(tmp_path)
    ids = buffer.ids(FP)
    digest = buffer.digest(ids)
    old = set((tmp_path / "trajectories").glob("*.parquet"))
    compact(buffer)
    if times == 2:
        buffer.append([build(900)], stage="rollout", fingerprint=FP, shard=9)
        compact(buffer)
    for path in set((tmp_path / "trajectories").glob("*.parquet")) - old:
        if times == 1 or path.name in str(TrajectoryBuffer(tmp_path).table().file_uris()):
            path.unlink()
    assert [problem.kind for problem in check(buffer)] == ["missing"]
    done = repair(TrajectoryBuffer(tmp_path))
    assert (done.restored, done.lost, done.dropped) == (len(ids) + times - 1, 0, [])
    fresh = TrajectoryBuffer(tmp_path)
    assert fresh.digest(ids) == digest
    assert check(fresh) == []


def test_drop_restores_first_and_counts_what_is_lost(tmp_path: Path) -> None:
    buffer = fill(tmp_path)
    first, *_ = old = sorted((tmp_path / "trajectories").glob("*.parquet"))
    compact(buffer)
    for path in set((tmp_path / "trajectories").glob("*.parquet")) - set(old):
        path.unlink()
    first.unlink()
    done = repair(TrajectoryBuffer(tmp_path))  # without `drop` nothing is given up
    assert (done.restored, done.lost, len(done.damaged)) == (0, 0, 1)
    done = repair(TrajectoryBuffer(tmp_path), drop=True)
    assert (done.restored, done.lost) == (40, 20)
    fresh = TrajectoryBuffer(tmp_path)
    assert count(tmp_path) == 40
    [fault] = check(fresh)
    assert (fault.kind, fault.what.startswith("20 rows")) == ("lost", True)
    shown = CliRunner().invoke(app, ["buffer", "check", "--store", str(tmp_path)])
    assert (shown.exit_code, "sound" in shown.output) == (1, False)
    assert [loss.rows for loss in accept_losses(fresh)] == [20]
    assert check(fresh) == []
    assert [loss.accepted for loss in losses(fresh)] == [True]
    shown = CliRunner().invoke(app, ["buffer", "check", "--store", str(tmp_path)])
    assert (shown.exit_code, "sound" in shown.output) == (0, False)
    assert "20 rows" in shown.output


def test_an_older_schema_is_to_be_migrated_and_no_more(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "old_store_version_0", tmp_path, dirs_exist_ok=True)
    [fault] = check(TrajectoryBuffer(tmp_path))
    assert fault.kind == "schema"
    assert "agentrl buffer migrate" in fault.advice
    with pytest.raises(OlderSchemaError, match="migrate"):
        repair(TrajectoryBuffer(tmp_path))
