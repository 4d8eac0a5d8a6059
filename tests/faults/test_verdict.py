"""That a storm's verdict sees what it is to see."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import verdict
from actors import rows
from chaos import environment, survivors
from deltalake import DeltaTable, write_deltalake
from diary import Diary, entries, shards
from mishaps import FAIL, FAIL_AFTER, mishap
from store_rows import FP, build

from agentrl.datastore import TrajectoryBuffer


@pytest.fixture
def store(tmp_path: Path) -> str:
    buffer = TrajectoryBuffer(tmp_path / "store")
    for shard in range(3):
        buffer.append(rows(shard), stage="rollout", fingerprint=FP, shard=shard)
    return buffer.store


def test_a_sound_store_has_no_faults(store: str) -> None:
    assert list(verdict.kept(store, {0, 1, 2})) == []
    assert list(verdict.unsound(store, set())) == []
    assert list(verdict.leftovers(store)) == []


def test_lost_doubled_and_torn_shards_are_found(store: str) -> None:
    table = DeltaTable(TrajectoryBuffer(store).uri)
    whole = table.to_pyarrow_table()
    assert "acknowledged shards are lost, such as [3]" in next(verdict.kept(store, {0, 1, 2, 3}))
    table.delete(f"trajectory_id = '{build(21).trajectory_id}'")
    assert "1 shards are there in part, such as [1]" in next(verdict.kept(store, {0, 1, 2}))
    write_deltalake(table, whole, mode="append")
    assert "59 rows are doubled" in next(verdict.kept(store, {0, 1, 2}))


def test_strays_and_differences_are_found(store: str, tmp_path: Path) -> None:
    (Path(store) / "trajectories/.part-1.tmp").write_bytes(b"half")
    assert "1 strays" in next(verdict.leftovers(store))
    other = TrajectoryBuffer(tmp_path / "other")
    changed = [row.model_copy(update={"prompt": "else"}) for row in rows(0)]
    other.append([*changed, *rows(1), *rows(2)], stage="rollout", fingerprint=FP)
    assert "digest of 60 rows differs" in next(verdict.different(store, other.store, {0, 1, 2}))


def test_a_diary_forgets_what_a_kill_has_cut_off(tmp_path: Path) -> None:
    diary = Diary(tmp_path, "appender-0")
    diary.say("acknowledged", shard=1)
    with (tmp_path / "appender-0.jsonl").open("ab") as file:
        file.write(json.dumps({"what": "acknowledged", "shard": 2})[:-3].encode())
    assert shards(tmp_path, "acknowledged") == {1}
    assert [entry["actor"] for entry in entries(tmp_path)] == ["appender-0"]


def test_mishaps_happen_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def always(what: str, name: str) -> None:
        monkeypatch.setattr("mishaps.SHARES", {what: 1.0})
        with pytest.raises(OSError, match="as the storm wants it"):
            mishap(os.mkdir, random.Random(0))(tmp_path / name)

    always(FAIL, "before")
    always(FAIL_AFTER, "after")
    assert [path.name for path in tmp_path.iterdir()] == ["after"]


def test_a_process_that_outlives_the_storm_is_found(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment(tmp_path, {}))
    try:
        assert process.pid in [survivor.pid for survivor in survivors(tmp_path, patience_s=0)]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert survivors(tmp_path, patience_s=0) == []
