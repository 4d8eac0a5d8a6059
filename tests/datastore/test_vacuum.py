"""Vacuum beside writers: what lives stays, what is dead goes, and its cost grows with the log alone."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from store_rows import FP, build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table.delta_log import commit_key
from agentrl.datastore.upkeep import check, compact, retention, vacuum
from agentrl.schemas.trajectory import Trajectory

HERE = Path(__file__).parent


def fill(store: str | Path, shards: int, rows: int = 5) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        part = [build(i) for i in range(shard * rows, shard * rows + rows)]
        buffer.append(part, stage="rollout", fingerprint=FP, shard=shard)
    return buffer


class Slow:
    """An append that waits in the midst, with files written and not committed."""

    def __init__(self, store: str) -> None:
        self.written, self.go_on = threading.Event(), threading.Event()
        self.outcome: object = None
        self._store = store
        self._thread = threading.Thread(target=self._append)
        self._thread.start()
        assert self.written.wait(60)

    def _rows(self) -> Iterator[Trajectory]:
        yield from (build(i) for i in range(1000, 1000 + 4 * 1024))
        self.written.set()
        assert self.go_on.wait(60)
        yield build(9000)

    def _append(self) -> None:
        try:
            self.outcome = TrajectoryBuffer(self._store).append(self._rows(), stage="s", fingerprint="slow").rows
        except StoreError as error:
            self.outcome = str(error)

    def finish(self) -> object:
        self.go_on.set()
        self._thread.join(60)
        return self.outcome


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is spared for its age alone, as if all were hours old."""
    monkeypatch.setattr(retention, "GRACE", timedelta(days=-1))
    monkeypatch.setattr("agentrl.datastore.table.writer.FILE_ROWS", 1024)


def stored(store: str) -> set[str]:
    return {name for name, _ in retention.stored_files(TrajectoryBuffer(store))}


def test_files_of_an_append_under_way_stay_however_old(store: str) -> None:
    buffer = fill(store, 2)
    slow = Slow(store)
    assert len(stored(store)) > 2
    assert [problem.kind for problem in check(buffer)] == []  # they are no orphans
    assert vacuum(buffer, retention_hours=0, dry_run=False) == []
    assert slow.finish() == 4 * 1024 + 1
    assert buffer.scan().select(pl.len()).collect().item() == 10 + 4 * 1024 + 1
    assert check(buffer) == []
    assert not list(buffer.storage.keys("writers"))


def test_files_of_a_killed_append_go(store: str) -> None:
    buffer = fill(store, 2)
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r});"
        "import os, signal, agentrl.datastore.table.writer; agentrl.datastore.table.writer.FILE_ROWS = 1024;"
        "from agentrl.datastore import TrajectoryBuffer; from store_rows import build;"
        "rows = (build(i) if i < 7000 else os.kill(os.getpid(), signal.SIGKILL) for i in range(2000, 7001));"
        f"TrajectoryBuffer({store!r}).append(rows, stage='s', fingerprint='killed')"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -9
    left = stored(store) - set(DeltaTable(buffer.uri, storage_options=buffer.committed.options).file_uris())
    assert len(left) > 2
    dead = vacuum(buffer, retention_hours=0, dry_run=False)
    assert len([name for name in dead if name.endswith(".parquet")]) >= 2
    assert len(stored(store)) == 2
    assert not list(buffer.storage.keys("writers"))
    assert check(TrajectoryBuffer(store)) == []


def test_a_writer_that_was_taken_for_dead_commits_nothing(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped on another machine for so long that nobody could tell."""
    buffer = fill(store, 2)
    monkeypatch.setattr("agentrl.datastore.table.open_writers.STALE", timedelta(days=-1))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("agentrl.datastore.table.open_writers.owners.me", lambda working: "feedfacefeed")
        slow = Slow(store)
    assert vacuum(buffer, retention_hours=0, dry_run=False)
    assert "for dead" in str(slow.finish())
    assert len(stored(store)) == 2
    fresh = TrajectoryBuffer(store)
    assert not fresh.has("slow")
    assert check(fresh) == []


def test_two_thousand_hours_and_nonsense(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 4)
    compact(buffer)
    key = commit_key(buffer.version or 0)
    lines = [json.loads(line) for line in (buffer.storage.read(key) or b"").splitlines()]
    lines[-1]["commitInfo"]["timestamp"] = 10**18
    buffer.storage.write(key, "\n".join(map(json.dumps, lines)).encode())
    assert buffer.history(1)[0]["time"] is None
    for hours in (1e300, float("inf"), 2000):
        assert vacuum(buffer, retention_hours=hours, dry_run=False) == []
    with pytest.raises(StoreError, match="retention_hours nan"):
        vacuum(buffer, retention_hours=float("nan"))
    assert len(vacuum(buffer, retention_hours=0, dry_run=False)) == 4


def test_the_log_is_read_once_and_the_table_seldom_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(tmp_path, 30, 1)
    reads: Counter[str] = Counter()
    read, opened = LocalStorage.read, DeltaTable.__init__

    def counted(self: LocalStorage, key: str) -> bytes | None:
        reads[key] += "_delta_log" in key
        return read(self, key)

    def opening(self: DeltaTable, *arguments: Any, **options: Any) -> None:
        reads["table"] += 1
        opened(self, *arguments, **options)

    monkeypatch.setattr(LocalStorage, "read", counted)
    monkeypatch.setattr(DeltaTable, "__init__", opening)
    assert vacuum(buffer, retention_hours=1) == []
    assert reads["table"] <= 3
    assert {reads[commit_key(version)] for version in range(30)} == {1}


def test_rows_on_their_way_to_quarantine_are_cleaned_when_nobody_writes_them(tmp_path: Path) -> None:
    buffer = fill(tmp_path, 1)
    left = tmp_path / "tmp/quarantine-abcdefabcdef_0.parquet"
    left.write_bytes(b"half")
    assert vacuum(buffer, dry_run=False) == []  # nobody knows its writer, and it is young
    os.utime(left, (0, 0))
    assert vacuum(buffer, dry_run=False) == [str(left)]
    assert not left.exists()


def test_a_reader_goes_on_when_a_vacuum_takes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(tmp_path, 4)
    reader = TrajectoryBuffer(tmp_path)
    files = reader._lookup.files

    def late(table: DeltaTable) -> Any:
        result = files(table)
        if len(result) > 1:  # after the look at the table, before the look at its files
            compact(buffer)
            vacuum(buffer, retention_hours=0, dry_run=False)
        return result

    monkeypatch.setattr(reader._lookup, "files", late)
    assert reader.get(build(7).trajectory_id).prompt == build(7).prompt
