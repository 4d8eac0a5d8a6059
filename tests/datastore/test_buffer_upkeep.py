import json
import os
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from deltalake import DeltaTable
from store_rows import FP, build

from agentrl.datastore import Catalog, TrajectoryBuffer
from agentrl.datastore.errors import OlderSchemaError
from agentrl.datastore.upkeep import check, compact, migrate, repair, vacuum
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord
from agentrl.schemas.trajectory import TRAJECTORY_VERSION, Span


def fill(store: str | Path, shards: int = 6, rows: int = 20) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        part = [build(i) for i in range(shard * rows, shard * rows + rows)]
        buffer.append(part, stage="rollout", fingerprint=FP, shard=shard)
    return buffer


def data_files(store: Path) -> list[Path]:
    return sorted((store / "trajectories").glob("*.parquet"))


def publish(store: Path, version: int | None, ids: list[str]) -> None:
    catalog = Catalog(store)
    folder = catalog.staging("keep", "k1")
    pl.DataFrame({"trajectory_id": ids, "weight": [1.0] * len(ids)}).write_parquet(folder / "t.parquet")
    ingredients = Ingredients(scheme=1, stage="keep", uses="x", uses_version="1", config={}, seed=0, inputs={}, code={})
    output = OutputRecord(kind=Kind.TRAJECTORIES, path="t.parquet", digest="d", rows=len(ids))
    manifest = Manifest(
        fingerprint="k1",
        ingredients=ingredients,
        outputs={"trajectories": output},
        run_id="r",
        created_at=datetime.now(UTC),
        duration_s=0,
        buffer_version=version,
    )
    catalog.publish(manifest, folder)


def test_compaction_changes_files_and_no_row(store: str) -> None:
    buffer = fill(store)
    ids, version = buffer.ids(FP), buffer.version
    digest = buffer.digest(ids)
    result = compact(buffer)
    assert (result["files_before"], result["files_after"]) == (6, 1)
    assert TrajectoryBuffer(store).digest(ids) == buffer.digest(ids) == digest
    assert buffer.scan(version).select(pl.len()).collect().item() == 120
    assert buffer.has(FP, 3)
    assert compact(buffer)["files_after"] == 1  # nothing left to do
    buffer.append([build(999)], stage="rollout", fingerprint=FP, shard=99)
    assert len(buffer.ids(FP)) == 121
    assert check(buffer) == []


def test_vacuum_keeps_what_artifacts_need(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 3)
    ids = buffer.ids(FP)
    publish(tmp_path, buffer.version, ids)
    pinned = buffer.version
    buffer.append([build(999)], stage="rollout", fingerprint=FP, shard=9)
    compact(buffer)
    assert vacuum(buffer, retention_hours=1, dry_run=False) == []  # all versions are young
    dead = vacuum(buffer, retention_hours=0)
    assert len(dead) == 1  # the file of shard 9: only versions 4 and later had it, and no artifact names one
    assert len(data_files(tmp_path)) == 5  # a dry run
    assert vacuum(buffer, retention_hours=0, dry_run=False) == dead
    assert len(data_files(tmp_path)) == 4
    assert buffer.scan(pinned).select(pl.len()).collect().item() == 60
    assert buffer.scan().select(pl.len()).collect().item() == 61
    catalog = Catalog(tmp_path)
    catalog.remove(next(iter(catalog.all())))
    assert len(vacuum(buffer, retention_hours=0, dry_run=False)) == 3
    assert buffer.digest(ids)
    assert check(buffer) == []


def test_vacuum_spares_an_append_under_way(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 1)
    orphan = tmp_path / "trajectories/part-00000-dead.zstd.parquet"
    orphan.write_bytes(b"half")
    assert vacuum(buffer, retention_hours=0, dry_run=False) == []  # no writer of ours, so nobody knows whether it lives
    assert check(buffer) == []
    os.utime(orphan, (time.time() - 7200,) * 2)
    assert [problem.kind for problem in check(buffer)] == ["orphan"]
    assert vacuum(buffer, retention_hours=0, dry_run=False) == [orphan.name]
    assert check(buffer) == []


def test_an_orphan_that_is_found_goes_at_once(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 1)
    orphan = tmp_path / f"trajectories/part-00000-{'0' * 32}.zstd.parquet"
    orphan.write_bytes(b"half")
    problems = check(buffer)
    assert [(item.kind, item.what) for item in problems] == [("orphan", orphan.name)]
    assert "`agentrl buffer vacuum --yes --retention-hours 0` removes it now" in problems[0].advice
    assert vacuum(buffer, retention_hours=1, dry_run=False) == []  # as the advice says
    assert vacuum(buffer, retention_hours=0, dry_run=False) == [orphan.name]
    assert check(buffer) == []


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
def test_damaged_files_are_found_and_their_shards_can_be_appended_again(tmp_path: Path, damage: str) -> None:
    buffer = fill(tmp_path, 3)
    ids = buffer.ids(FP)
    digest = buffer.digest(ids)
    publish(tmp_path, buffer.version, ids)
    name = DeltaTable(buffer.uri).file_uris()[1]
    victim = tmp_path / "trajectories" / Path(name).name
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 2])
    findings = check(TrajectoryBuffer(tmp_path))
    assert [(finding.kind, finding.what) for finding in findings[:1]] == [(damage, victim.name)]
    assert "check --drop" in findings[0].advice
    assert findings[-1].kind == "manifest"
    assert "20 rows" in findings[-1].advice
    dropped = repair(buffer, drop=True)
    assert dropped.dropped == [victim.name]
    assert len(dropped.shards) == 1
    shard = int(dropped.shards[0].split("/")[1])
    assert not buffer.has(FP, shard)
    assert len(buffer.ids(FP)) == 40
    rows = [build(i) for i in range(shard * 20, shard * 20 + 20)]
    assert not buffer.append(rows, stage="rollout", fingerprint=FP, shard=shard).skipped
    assert buffer.append(rows, stage="rollout", fingerprint=FP, shard=shard).skipped
    assert buffer.digest(buffer.ids(FP)) == digest
    assert [problem.kind for problem in check(buffer)] in ([], ["orphan"])


def test_a_corrupt_commit_is_named(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    commit = sorted((tmp_path / "trajectories/_delta_log").glob("*.json"))[-1]
    before = sorted((tmp_path / "trajectories/_delta_log").glob("*.json"))[-2]
    whole = before.read_bytes()
    before.write_bytes(whole[: len(whole) // 2])
    [fault] = check(TrajectoryBuffer(tmp_path))
    assert (fault.kind, before.name in fault.what) == ("log", True)
    assert "others build on what it held" in fault.advice
    assert commit.exists()
    assert before.exists()  # only a newest commit is ever set aside


def test_readers_see_whole_versions_during_upkeep(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 8, 10)
    problems: list[object] = []
    stop = threading.Event()

    def read() -> None:
        reader = TrajectoryBuffer(tmp_path)
        while not stop.is_set():
            try:
                count = reader.scan().select(pl.len(), pl.col("input_ids").list.sum().sum()).collect().row(0)[0]
                rows = reader.read(reader.ids(FP), ["messages"]).num_rows
                if count % 10 or rows % 10 or rows < 80:
                    problems.append((count, rows))
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for shard in range(8, 20):
        buffer.append([build(i) for i in range(shard * 10, shard * 10 + 10)], stage="r", fingerprint=FP, shard=shard)
        if shard % 3 == 0:
            compact(buffer)
            vacuum(buffer, dry_run=False)
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(buffer.ids(FP)) == 200


OLD_STORES = Path(__file__).parent
"""``old_store_version_<n>`` holds rows (``build(0)``, ``build(1)``, and so on) as a buffer of schema version n holds
them, in files. Version 0 has five rows without ``agent``, ``segment`` and ``final_state``. Version 1 has four, whose
``reward`` and ``success`` could not be null. Version 2 has six without ``pipeline``, ``fork_at`` and ``spans``; the
fourth was sampled by version 7 of a policy, the fifth is unscored, and the sixth has no tokens. Version 3 has five with
all columns of then, whose digests were computed in another way. Version 4 has four without ``source_id``,
``model`` and the other columns of the origin. Version 5 has four without ``message_seconds``, the first of which has a
model, a cost and the id of a record. A later schema gets a folder beside them; none is ever written again."""


@pytest.mark.parametrize(("version", "rows"), [(0, 5), (1, 4), (2, 6), (3, 5), (4, 4), (5, 4)])
def test_an_older_schema_is_migrated(version: int, rows: int, tmp_path: Path) -> None:
    shutil.copytree(OLD_STORES / f"old_store_version_{version}", tmp_path, dirs_exist_ok=True)
    buffer = TrajectoryBuffer(tmp_path)
    assert buffer.scan().select(pl.len()).collect().item() == rows  # it can be read before
    with pytest.raises(OlderSchemaError, match=f"has schema_version {version}"):
        buffer.append([build(9)], stage="s", fingerprint="f")
    assert migrate(buffer) == {"from": version, "to": TRAJECTORY_VERSION, "rows": rows}
    row = buffer.get("rollout-01234567-000002")
    assert (row.agent, row.segment, row.final_state) == ("main", 0, "null")
    assert (row.input_ids, row.reward, row.success) == (build(2).input_ids, 0.0, False)
    assert (row.pipeline, row.fork_at) == (None, 0)
    assert (row.source_id, row.source_file, row.model, row.prompt_tokens, row.cost_usd) == (None,) * 5
    assert row.message_seconds is None
    buffer.append([build(9), build(10, reward=None, success=None)], stage="s", fingerprint="f", pipeline="p")
    assert buffer.get(build(9).trajectory_id).pipeline == "p"
    assert buffer.scan().select(pl.len()).collect().item() == rows + 2
    assert buffer.get(build(10).trajectory_id).success is None
    assert check(buffer) == []
    assert migrate(buffer)["rows"] == 0
    assert json.loads(json.dumps(buffer.history(), default=str))


def test_rows_of_an_older_schema_are_read_as_they_are_migrated(tmp_path: Path) -> None:
    shutil.copytree(OLD_STORES / "old_store_version_2", tmp_path, dirs_exist_ok=True)
    buffer = TrajectoryBuffer(tmp_path)
    ids = [build(number).trajectory_id for number in range(6)]
    columns = "trajectory_id, pipeline, fork_at, spans, prompt"
    query = f"select {columns} from trajectories where fork_at = 0 and pipeline is null order by trajectory_id"
    rows, digest = buffer.get_many(ids), buffer.digest(ids)
    result, table = buffer.sql(query), buffer.read(ids, ["spans", "level"])
    assert [row.spans for row in rows] == [[], [], [], [Span(version=7, start=4, end=12)], [], []]
    assert result["trajectory_id"].to_list() == ids
    migrate(buffer)
    assert [row.model_dump_json() for row in buffer.get_many(ids)] == [row.model_dump_json() for row in rows]
    assert buffer.digest(ids) == digest
    assert buffer.sql(query).equals(result)
    assert buffer.read(ids, ["spans", "level"]).equals(table)


def test_digests_of_version_3_are_not_taken_for_ours(tmp_path: Path) -> None:
    shutil.copytree(OLD_STORES / "old_store_version_3", tmp_path, dirs_exist_ok=True)
    buffer = TrajectoryBuffer(tmp_path)
    ids = [build(number).trajectory_id for number in range(4)]
    assert [fault.kind for fault in check(buffer)] == ["schema"]
    before = buffer.digest(ids)
    migrate(buffer)
    assert check(buffer) == []
    fresh = TrajectoryBuffer(tmp_path / "fresh")
    fresh.append([build(number) for number in range(4)], stage="rollout", fingerprint="f")
    assert buffer.digest(ids) == before == fresh.digest(ids)


def test_an_older_table_can_be_counted_and_limited(tmp_path: Path) -> None:
    shutil.copytree(OLD_STORES / "old_store_version_2", tmp_path, dirs_exist_ok=True)
    rows = TrajectoryBuffer(tmp_path).scan()
    assert rows.head(4).collect().height == 4
    assert rows.filter(pl.col("level") == 2).select("pipeline").collect().height == 2
    assert rows.select(pl.len()).collect().item() == 6
