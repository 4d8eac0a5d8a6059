"""Commits: whatever fails, is interrupted or raced, an append is there once or not at all, and the caller is told."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from deltalake import DeltaTable
from store_rows import FP, build

import agentrl.datastore.table.checkpoints
from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.errors import InvalidRowsError
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage
from agentrl.datastore.table.ids import KnownIds
from agentrl.datastore.upkeep import accept_losses, check, compact, migrate, vacuum
from agentrl.datastore.upkeep.compaction import _merge

HERE = Path(__file__).parent
Create = Callable[[Any, str, bytes, str | None], str | None]


def fill(store: str | Path, shards: int = 6, rows: int = 20) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        part = [build(i) for i in range(shard * rows, shard * rows + rows)]
        buffer.append(part, stage="rollout", fingerprint=FP, shard=shard)
    return buffer


def count(store: str | Path) -> int:
    return int(TrajectoryBuffer(store).scan().select(pl.len()).collect().item())


def newest(store: Path) -> Path:
    return max((store / "trajectories/_delta_log").glob("*.json"))


# errors and signals


def after(create: Create, error: BaseException, times: int = 1) -> Create:
    """Creates commits, and then fails: the answer was lost."""
    left = [times]

    def failing(self: Any, key: str, data: bytes, tag: str | None) -> str | None:
        made = create(self, key, data, tag)
        if "_delta_log" in key and left[0]:
            left[0] -= 1
            raise error
        return made

    return failing


def before(create: Create, error: BaseException) -> Create:
    def failing(self: Any, key: str, data: bytes, tag: str | None) -> str | None:
        if "_delta_log" in key:
            raise error
        return create(self, key, data, tag)

    return failing


@pytest.mark.parametrize("error", [OSError("connection reset"), KeyboardInterrupt()], ids=["cut off", "interrupted"])
@pytest.mark.parametrize("what", ["append", "compact", "migrate"])
def test_what_goes_wrong_after_the_commit_leaves_the_rows(
    store: str, monkeypatch: pytest.MonkeyPatch, error: BaseException, what: str
) -> None:
    buffer = fill(store, 3)
    digest = buffer.digest(buffer.ids(FP))
    if what == "migrate":
        if store.startswith("s3://"):
            pytest.skip("the fixture of an older schema is a folder")
        import shutil

        shutil.rmtree(store)
        shutil.copytree(HERE / "old_store_version_0", store)
    kind = S3Storage if store.startswith("s3://") else LocalStorage
    with monkeypatch.context() as patch:
        patch.setattr(kind, "put_if", after(kind.put_if, error))
        act: dict[str, Callable[[], object]] = {
            "append": lambda: buffer.append([build(999)], stage="s", fingerprint="f"),
            "compact": lambda: compact(buffer),
            "migrate": lambda: migrate(TrajectoryBuffer(store)),
        }
        if isinstance(error, OSError):
            act[what]()
        else:
            with pytest.raises(KeyboardInterrupt):
                act[what]()
    fresh = TrajectoryBuffer(store)
    assert check(fresh) == []
    if what == "append":
        assert fresh.has("f")
        assert fresh.get(build(999).trajectory_id).reward == build(999).reward
    elif what == "compact":
        assert fresh.stats()["files"] == 1
        assert fresh.digest(fresh.ids(FP)) == digest
    else:
        assert count(store) == 5
        assert migrate(fresh)["rows"] == 0


@pytest.mark.parametrize("error", [OSError("no route"), KeyboardInterrupt()], ids=["cut off", "interrupted"])
def test_what_goes_wrong_before_the_commit_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    buffer = fill(tmp_path, 2)
    files = sorted((tmp_path / "trajectories").glob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put_if", before(LocalStorage.put_if, error))
        with pytest.raises(StoreError if isinstance(error, OSError) else KeyboardInterrupt):
            buffer.append([build(999)], stage="s", fingerprint="f")
        with pytest.raises(StoreError if isinstance(error, OSError) else KeyboardInterrupt):
            compact(buffer)
    assert sorted((tmp_path / "trajectories").glob("*")) == files
    assert not list((tmp_path / "writers").iterdir())
    assert check(buffer) == []


def test_an_outcome_that_nobody_knows_keeps_the_files(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The put is on its way, and the store answers nothing any more: the put may still arrive."""
    buffer = fill(s3_store, 1)
    late: list[tuple[str, bytes]] = []
    create, read = S3Storage.put_if, S3Storage.read

    def lost(self: S3Storage, key: str, data: bytes, tag: str | None) -> str | None:
        if "_delta_log" in key:
            late.append((key, data))
            raise OSError("timed out")
        return create(self, key, data, tag)

    def silent(self: S3Storage, key: str) -> bytes | None:
        if late and "_delta_log" in key:
            raise OSError("timed out")
        return read(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(S3Storage, "put_if", lost)
        patch.setattr(S3Storage, "read", silent)
        with pytest.raises(StoreError, match="it is unknown whether"):
            buffer.append([build(999)], stage="s", fingerprint="f")
    assert create(buffer.storage, *late[0], None)  # type: ignore[arg-type]
    assert vacuum(buffer, retention_hours=0, dry_run=False) == []
    assert buffer.append([build(999)], stage="s", fingerprint="f").skipped
    assert check(TrajectoryBuffer(s3_store)) == []


# races


def test_two_compactions_at_once_double_no_row(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the lock is lost: here it is never there."""
    monkeypatch.setattr("agentrl.datastore.upkeep.compaction.alone", lambda _: nullcontext())
    buffer = fill(store, 8, 5)
    digest = buffer.digest(buffer.ids(FP))
    ready = threading.Barrier(3)
    merge = _merge

    def together(*arguments: Any) -> set[str]:
        with suppress(threading.BrokenBarrierError):
            ready.wait(5)  # all have chosen the same files
        return merge(*arguments)

    monkeypatch.setattr("agentrl.datastore.upkeep.compaction._merge", together)
    threads = [threading.Thread(target=compact, args=(TrajectoryBuffer(store),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(store) == 40
    fresh = TrajectoryBuffer(store)
    assert fresh.digest(fresh.ids(FP)) == digest
    assert check(fresh) == []


@pytest.mark.slow
def test_processes_that_compact_at_once_double_no_row(store: str) -> None:
    fill(store, 12, 5)
    code = (
        "from agentrl.datastore import TrajectoryBuffer; from agentrl.datastore.upkeep import compact\n"
        f"compact(TrajectoryBuffer({store!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    started = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    assert count(store) == 60
    assert check(TrajectoryBuffer(store)) == []


def test_compaction_comes_to_an_end_while_others_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(tmp_path, 2)
    merge, shards = _merge, iter(range(100, 150))

    def and_appends(*arguments: Any) -> set[str]:
        made = merge(*arguments)
        for shard in (next(shards), next(shards)):
            buffer.append([build(shard)], stage="rollout", fingerprint=FP, shard=shard)
        return made

    monkeypatch.setattr("agentrl.datastore.upkeep.compaction._merge", and_appends)
    assert compact(buffer)["files_after"] == 3
    assert count(tmp_path) == 42


def test_compaction_converges_whatever_the_size_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes decide: files of few big rows are not merged for ever, and `vacuum` frees what was merged."""
    monkeypatch.setattr("agentrl.datastore.upkeep.compaction.GOAL_BYTES", 200_000)
    monkeypatch.setattr("agentrl.datastore.upkeep.compaction.FILE_BYTES", 200_000)
    monkeypatch.setattr("agentrl.datastore.table.writer.FILE_BYTES", 200_000)
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(12):
        big = [build(shard * 2 + i, final_state=f'"{os.urandom(20_000).hex()}"') for i in range(2)]
        buffer.append(big, stage="rollout", fingerprint=FP, shard=shard)
    first = compact(buffer)
    assert 1 < first["files_after"] < first["files_before"]
    again = compact(buffer)
    assert again["version"] == first["version"]
    assert vacuum(buffer, retention_hours=0, dry_run=False)
    stored = list((tmp_path / "trajectories").glob("*.parquet"))
    assert len(stored) == first["files_after"]
    assert check(buffer) == []


def test_checkpoints_are_made_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agentrl.datastore.table.checkpoints, "LEAST_BYTES", 1)
    monkeypatch.setattr(agentrl.datastore.table.checkpoints, "SHARE", 2**40)  # one for every commit
    buffer = fill(tmp_path, 9, 2)
    log = tmp_path / "trajectories/_delta_log"
    assert [int(path.name[:20]) for path in sorted(log.glob("*.checkpoint.parquet"))] == [8, 9]  # two are kept
    assert DeltaTable(buffer.uri).version() == 9
    assert count(tmp_path) == 18


# one id, once


def test_an_id_is_appended_once(store: str) -> None:
    buffer = fill(store, 2)
    with pytest.raises(InvalidRowsError, match=r"row 1 \(rollout-01234567-000003\).*is in the buffer already"):
        buffer.append([build(900), build(3)], stage="other", fingerprint="else")
    assert count(store) == 40
    other = TrajectoryBuffer(store)  # knows nothing yet
    compact(buffer)
    with pytest.raises(InvalidRowsError, match="is in the buffer already"):
        other.append([build(23)], stage="other", fingerprint="else")
    aside = other.append([build(3), build(901)], stage="other", fingerprint="else", on_error="quarantine")
    assert (aside.rows, aside.quarantined) == (1, 1)
    assert check(TrajectoryBuffer(store)) == []


def test_an_id_that_two_append_at_once_goes_in_once(store: str) -> None:
    """Both have checked their rows before either commits."""
    fill(store, 1)
    checked = threading.Barrier(2)
    outcomes: list[object] = []

    def one(fingerprint: str) -> None:
        def rows():  # type: ignore[no-untyped-def]
            yield build(900)
            checked.wait(20)

        buffer = TrajectoryBuffer(store)
        try:
            outcomes.append(buffer.append(rows(), stage="s", fingerprint=fingerprint).rows)
        except InvalidRowsError as error:
            outcomes.append(str(error))

    def waited(fingerprint: str) -> threading.Thread:
        thread = threading.Thread(target=one, args=(fingerprint,))
        thread.start()
        return thread

    for thread in [waited("f1"), waited("f2")]:
        thread.join()
    assert 1 in outcomes
    assert any("by another process" in str(outcome) or "already" in str(outcome) for outcome in outcomes)
    assert count(store) == 21
    assert check(TrajectoryBuffer(store)) == []


def test_a_shard_that_a_twin_appends_while_it_is_checked_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the version that the append began with is gone, so it looks at the newest one, which has its rows."""
    buffer = fill(tmp_path, 2)
    late, twin = TrajectoryBuffer(tmp_path), TrajectoryBuffer(tmp_path)
    look = KnownIds.clashes_now

    def after_the_twin(known: KnownIds, ids: Any) -> dict[str, str]:
        monkeypatch.setattr(KnownIds, "clashes_now", look)
        twin.append([build(10), build(900)], stage="rollout", fingerprint="f2", shard=7, on_error="quarantine")
        compact(buffer)
        assert vacuum(buffer, retention_hours=0, dry_run=False)
        return look(known, ids)

    monkeypatch.setattr(KnownIds, "clashes_now", after_the_twin)
    rows = [build(10), build(900)]
    assert late.append(rows, stage="rollout", fingerprint="f2", shard=7, on_error="quarantine").skipped
    assert late.quarantined().height == 1  # the twin's
    assert count(tmp_path) == 41
    assert check(TrajectoryBuffer(tmp_path)) == []


# power loss


@pytest.mark.parametrize("torn", ["empty", "cut", "zeros"])
def test_a_torn_newest_commit_is_set_aside(tmp_path: Path, torn: str) -> None:
    fill(tmp_path, 3)
    commit = newest(tmp_path)
    whole = commit.read_bytes()
    commit.write_bytes({"empty": b"", "cut": whole[: whole.rindex(b"\n")], "zeros": bytes(len(whole))}[torn])
    with pytest.warns(UserWarning, match=commit.name):
        assert count(tmp_path) == 40
    [aside] = (tmp_path / "aside").iterdir()
    assert aside.name.startswith(commit.name)
    buffer = TrajectoryBuffer(tmp_path)
    kinds = [problem.kind for problem in check(buffer)]
    assert kinds == ["orphan", "lost"]
    assert not buffer.append([build(i) for i in range(40, 60)], stage="rollout", fingerprint=FP, shard=2).skipped
    assert count(tmp_path) == 60
    assert len(accept_losses(buffer)) == 1
    assert [problem.kind for problem in check(buffer)] == ["orphan"]


@pytest.mark.parametrize("part", [0, 100])
def test_a_torn_checkpoint_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(agentrl.datastore.table.checkpoints, "LEAST_BYTES", 1)
    fill(tmp_path, 5)
    checkpoint = max((tmp_path / "trajectories/_delta_log").glob("*.checkpoint.parquet"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:part])
    with pytest.warns(UserWarning, match=checkpoint.name):
        assert count(tmp_path) == 100
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(999)], stage="rollout", fingerprint=FP, shard=9)
    assert check(buffer) == []


def test_what_a_commit_needs_is_on_the_disk_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name appears in the table's folders only when its content, and the files it names, were synced."""
    events: list[tuple[str, str]] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def synced(handle: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def moved(source: Any, target: Any, **options: Any) -> None:
        events.append(("name", str(target)))
        events.append(("from", str(source)))
        replace(source, target, **options)

    def linked(source: Any, target: Any, **options: Any) -> None:
        link(source, target, **options)
        events.append(("name", str(target)))
        events.append(("from", str(source)))

    fill(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", moved)
    monkeypatch.setattr(os, "link", linked)
    fill(tmp_path, 2)
    monkeypatch.undo()
    names = [(at, path) for at, (what, path) in enumerate(events) if what == "name" and "trajectories" in path]
    data, commit = names
    assert data[1].endswith(".parquet")
    assert commit[1] == str(newest(tmp_path))
    table = tmp_path / "trajectories"
    for at, _ in names:
        assert ("sync", events[at + 1][1]) in events[:at]  # the content, under its temporary name
    assert ("sync", str(table)) in events[data[0] : commit[0]]
    assert ("sync", str(table / "_delta_log")) in events[commit[0] :]
