"""Bounds that the log keeps for each file: few columns, and queries skip files by them."""

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable
from store_rows import FP, build

import agentrl.datastore.table.writer as writer
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.table import delta_table
from agentrl.datastore.upkeep import check, compact
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA


def appended(store: Path, shards: Sequence[int]) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in shards:
        rows = [build(10 * shard + i, env=f"env-{shard}", policy_version=shard) for i in range(10)]
        buffer.append(rows, stage=f"stage-{shard}", fingerprint=FP, shard=shard)
    return buffer


def adds(store: Path) -> list[dict[str, object]]:
    lines = [
        json.loads(line)
        for path in sorted((store / "trajectories/_delta_log").glob("*.json"))
        for line in path.read_text().splitlines()
    ]
    return [line["add"] for line in lines if "add" in line]


def test_the_log_has_bounds_of_few_columns(tmp_path: Path) -> None:
    appended(tmp_path, [0])
    [add] = adds(tmp_path)
    stats = json.loads(str(add["stats"]))
    assert set(stats["nullCount"]) == {"reward", "success"}  # of the others the schema says that they have none
    assert set(stats["minValues"]) <= set(writer.STATISTICS) >= set(stats["maxValues"])
    assert len(json.dumps(add)) < 1200  # 3,141 with thirty columns
    table = DeltaTable(tmp_path / "trajectories")
    named = table.metadata().configuration["delta.dataSkippingStatsColumns"]
    assert named.split(",") == list(writer.STATISTICS)
    assert set(writer.STATISTICS) <= set(writer.SCALARS) <= set(TRAJECTORY_SCHEMA.names)


def test_delta_rs_keeps_to_the_same_columns(tmp_path: Path) -> None:
    """Another writer, such as delta-rs itself, reads them from the table's properties."""
    import deltalake

    buffer = appended(tmp_path, [0])
    rows = buffer.table().to_pyarrow_table()
    deltalake.write_deltalake(buffer.uri, rows, mode="append")
    stats = json.loads(str(adds(tmp_path)[-1]["stats"]))
    assert set(stats["minValues"]) <= set(writer.STATISTICS)


def test_files_are_skipped_by_what_queries_filter_by(tmp_path: Path) -> None:
    appended(tmp_path, range(4))
    last = str(adds(tmp_path)[-1]["path"])
    for path in (tmp_path / "trajectories").glob("*.parquet"):
        if path.name != last:
            path.write_bytes(b"")  # whoever opens it fails
    for condition in (
        pl.col("env") == "env-3",
        pl.col("stage") == "stage-3",
        pl.col("policy_version") > 2,
        pl.col("trajectory_id") >= build(30).trajectory_id,
        pl.col("task_id") == "t9",
    ):
        rows = TrajectoryBuffer(tmp_path).scan().filter(condition).select("trajectory_id").collect()
        assert 0 < rows.height <= 10


def test_a_table_made_with_bounds_of_all_scalars_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = tuple(name for name in writer.SCALARS if name not in ("prompt", "sampling"))
    with monkeypatch.context() as older:
        older.setattr(writer, "STATISTICS", every)
        older.setitem(delta_table.PROPERTIES, "delta.dataSkippingStatsColumns", ",".join(writer.SCALARS))
        appended(tmp_path, range(2))
    buffer = appended(tmp_path, range(2, 4))
    bounds = [len(json.loads(str(add["stats"]))["minValues"]) for add in adds(tmp_path)]
    assert min(bounds[:2]) > 20 > 11 > max(bounds[2:])
    DeltaTable(buffer.uri).create_checkpoint()

    def asked(condition: pl.Expr) -> int:
        return int(TrajectoryBuffer(tmp_path).scan().filter(condition).select(pl.len()).collect().item())

    for condition, rows in (
        (pl.col("n_tokens") == 12, 40),
        (pl.col("n_tokens") > 12, 0),
        (pl.col("episode_id") == "e35", 1),
        (pl.col("episode_id") == "e5", 1),
        (pl.col("level") == 1, 13),
        (pl.col("env") == "env-1", 10),
    ):
        assert asked(condition) == rows, condition
        assert pl.scan_delta(buffer.uri).filter(condition).collect().height == rows
    assert compact(buffer)["files_after"] == 1
    assert check(buffer) == []
    assert asked(pl.col("episode_id") == "e35") == 1
