"""Publishing under stops, kills, wrong clocks and lost answers: one attempt wins whole, and nobody's files go."""

import json
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from catalog_worker import fill, manifest, started

from agentrl.datastore import Catalog, StoreError
from agentrl.datastore.artifacts.unfinished import GRACE, leftovers, unnamed_attempts
from agentrl.datastore.errors import LeaseLostError, LockTimeoutError
from agentrl.datastore.storage import lease
from agentrl.datastore.storage.object_store import storage_of


def go_on(process: "subprocess.Popen[str]") -> str:
    os.kill(process.pid, signal.SIGCONT)
    return process.communicate(timeout=60)[0].strip()


def texts(catalog: Catalog) -> set[str]:
    """What the files of the published artifact say."""
    published = catalog.manifest("expert", "f1")
    assert published is not None
    return {file.read_text() for file in catalog.local(published, "data").iterdir()}


def attempts(catalog: Catalog) -> list[str]:
    return catalog.storage.children("artifacts/expert/f1")[0]


@pytest.mark.parametrize("where", ["staged", "checked"])
def test_a_stopped_publisher_finds_that_another_one_won(
    where: str, s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)
    catalog = Catalog(s3_store)
    worker = started(s3_store, where)
    with catalog.lock("expert", "f1", timeout=30) as check:  # after the worker's lease ran out
        published = catalog.publish(manifest("test"), fill(catalog, "test"), check=check)
    assert published.run_id == "test"
    assert go_on(worker) == "test"
    assert texts(catalog) == {"test"}
    assert attempts(catalog) == [published.attempt]


def test_a_stopped_publisher_notices_that_its_lease_is_another_ones(
    s3_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)
    catalog = Catalog(s3_store)
    worker = started(s3_store, "staged")
    with catalog.lock("expert", "f1", timeout=30):
        assert go_on(worker) == "lost"
    assert catalog.manifest("expert", "f1") is None
    assert attempts(catalog) == []


def test_a_stopped_publisher_keeps_its_files_and_may_win(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody deletes the files of an attempt that may still be published."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)
    catalog = Catalog(s3_store)
    worker = started(s3_store, "checked")
    with catalog.lock("expert", "f1", timeout=30):
        assert list(unnamed_attempts(catalog, at_work=False)) == []
    assert go_on(worker) == "worker"
    assert texts(catalog) == {"worker"}


def test_the_first_of_two_publishers_at_once_wins(store: str) -> None:
    catalog = Catalog(store)
    won: list[str] = []

    def publish(number: int) -> None:
        catalog = Catalog(store)
        won.append(catalog.publish(manifest(f"run-{number}"), fill(catalog, f"run-{number}")).run_id)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    published = catalog.manifest("expert", "f1")
    assert published is not None
    assert set(won) == {published.run_id}
    assert texts(catalog) == {published.run_id}
    assert attempts(catalog) == [published.attempt]


@pytest.mark.parametrize("seconds", [-90, 90])
def test_a_clock_that_is_off_takes_no_lease(seconds: int, s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, two = Catalog(s3_store), Catalog(s3_store)
    real = time.time
    with first.lock("a", "b") as check:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)
        with pytest.raises(LockTimeoutError, match=f"process {os.getpid()}"), two.lock("a", "b", timeout=1):
            pass
        check()


def test_a_lease_of_another_machine_runs_out(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.5)
    catalog = Catalog(s3_store)
    catalog.storage.write("locks/a-b.lock", b'{"owner": "f00", "host": "elsewhere", "pid": 1, "since": "then"}')
    began = time.monotonic()
    with pytest.raises(LockTimeoutError, match="elsewhere, process 1, since then"), catalog.lock("a", "b", timeout=0):
        pass
    taken = False
    while not taken and time.monotonic() < began + 30:
        with suppress(LockTimeoutError), catalog.lock("a", "b", timeout=0.3):  # in small steps, too
            taken = True
    assert 1.4 < time.monotonic() - began < 20


def test_a_holder_that_died_on_this_machine_is_replaced_at_once(s3_store: str) -> None:
    worker = started(s3_store, "killed", 60)
    worker.wait()
    began = time.monotonic()
    with Catalog(s3_store).lock("expert", "f1", timeout=30):
        assert time.monotonic() - began < 10


def test_who_waits_is_told_for_whom(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "QUIET_SECONDS", 0.3)
    first, two = Catalog(store), Catalog(store)
    release = threading.Event()

    def keep() -> None:
        with two.lock("a", "b"):
            release.wait(2)

    thread = threading.Thread(target=keep)
    thread.start()
    time.sleep(0.5)
    with pytest.warns(UserWarning, match=r"waiting: .*a-b.lock is held by"), first.lock("a", "b"):
        thread.join()
    with (
        pytest.raises(LockTimeoutError, match="mine"),
        first.lock("a", "c"),
    ):  # an error of the caller's is the caller's
        raise LockTimeoutError("mine")


def test_a_lost_lease_is_noticed_at_once(s3_store: str) -> None:
    catalog = Catalog(s3_store)
    with catalog.lock("expert", "f1") as check:
        folder = fill(catalog, "late")
        catalog.storage.write("locks/expert-f1.lock", b'{"owner": "f00", "host": "elsewhere"}')
        with pytest.raises(LeaseLostError, match="taken over by another process"):
            catalog.publish(manifest("late"), folder, check=check)
    assert catalog.manifest("expert", "f1") is None
    assert attempts(catalog) == []
    assert b"elsewhere" in (catalog.storage.read("locks/expert-f1.lock") or b"")  # whose it is now


def test_a_lost_answer_is_no_refusal(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put that was carried out, whose answer was lost, and that the client sent again."""
    import obstore

    real: Callable[..., Any] = obstore.put

    def twice(*arguments: Any, **options: Any) -> Any:
        if "mode" in options:
            real(*arguments, **options)
        return real(*arguments, **options)

    catalog = Catalog(s3_store)
    monkeypatch.setattr(obstore, "put", twice)
    with catalog.lock("expert", "f1", timeout=5) as check:
        published = catalog.publish(manifest("once"), fill(catalog, "once"), check=check)
        again = catalog.publish(manifest("twice"), fill(catalog, "twice"), instead_of=published, check=check)
    assert (published.run_id, again.run_id) == ("once", "twice")
    assert texts(catalog) == {"twice"}


def test_conditional_puts_are_honoured(store: str) -> None:
    storage = storage_of(store)
    first = storage.put_if("k", b"1", None)
    assert first
    assert storage.put_if("k", b"2", None) is None
    second = storage.put_if("k", b"3", first)
    assert second
    assert storage.put_if("k", b"4", first) is None
    assert storage.put_if("none", b"4", first) is None
    assert storage.tagged("k") == (b"3", second)


def test_no_machine_reads_its_old_download_after_force_elsewhere(
    s3_store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, elsewhere = Catalog(s3_store), Catalog(s3_store)
    caches = {id(here): tmp_path / "here", id(elsewhere): tmp_path / "elsewhere"}

    def on(catalog: Catalog) -> Catalog:
        monkeypatch.setenv("XDG_CACHE_HOME", str(caches[id(catalog)]))
        return catalog

    first = on(here).publish(manifest("first"), fill(here, "first"))
    assert texts(on(here)) == {"first"}
    on(elsewhere).publish(manifest("forced"), fill(elsewhere, "forced"), instead_of=first)
    assert texts(on(here)) == {"forced"}
    # whoever still holds the old manifest reads the old files
    assert {file.read_text() for file in on(elsewhere).local(first, "data").iterdir()} == {"first"}


def test_only_the_manifest_that_was_named_is_replaced(store: str) -> None:
    catalog = Catalog(store)
    first = catalog.publish(manifest("first"), fill(catalog, "first"))
    second = catalog.publish(manifest("second"), fill(catalog, "second"), instead_of=first)
    third = catalog.publish(manifest("third"), fill(catalog, "third"), instead_of=first)
    assert (second.run_id, third.run_id) == ("second", "second")
    assert texts(catalog) == {"second"}
    assert sorted(attempts(catalog)) == sorted([first.attempt, second.attempt])


def test_an_error_after_the_manifest_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal may arrive between the commit and its return."""
    catalog = Catalog(tmp_path)
    real = catalog.storage.put_if

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog.storage, "put_if", interrupted)
    folder = fill(catalog, "one")
    with pytest.raises(KeyboardInterrupt):
        catalog.publish(manifest("one"), folder)
    catalog.discard("expert", "f1", folder)
    assert texts(catalog) == {"one"}


def test_artifacts_of_version_1_are_read_and_removed(store: str) -> None:
    catalog = Catalog(store)
    old = manifest("old").model_copy(update={"manifest_version": 1})
    body = json.loads(old.model_dump_json())
    del body["attempt"]
    catalog.storage.write("artifacts/expert/f1/data/0.txt", b"old")
    catalog.storage.write("artifacts/expert/f1/manifest.json", json.dumps(body).encode())
    assert texts(catalog) == {"old"}
    forced = catalog.publish(manifest("forced"), fill(catalog, "forced"), instead_of=catalog.manifest("expert", "f1"))
    assert texts(catalog) == {"forced"}
    catalog.remove(forced)
    assert catalog.manifest("expert", "f1") is None


def test_the_manifest_comes_after_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(tmp_path / "store")
    folder = fill(catalog, "one")
    events: list[str] = []
    sync, link = os.fsync, os.link
    path_of = {"_": lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name}["_"]
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append(f"sync {path_of(handle)}"), sync(handle))[1])
    monkeypatch.setattr(os, "link", lambda a, b: (events.append(f"name {Path(b).name}"), link(a, b))[1])
    catalog.publish(manifest("one"), folder)
    named = events.index("name manifest.json")
    before, after = events[:named], events[named + 1 :]
    assert {"sync 0.txt", "sync 1.txt", "sync 2.txt", "sync data", f"sync {folder.name}", "sync f1"} <= set(before)
    assert before[-1].startswith("sync .manifest.json.")
    assert after[0] == "sync f1"


def test_artifacts_on_another_filesystem(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem here")
    elsewhere = other / f"agentrl-test-{os.getpid()}-{tmp_path.name}"
    elsewhere.mkdir()
    try:
        store = tmp_path / "store"
        store.mkdir()
        (store / "artifacts").symlink_to(elsewhere)
        catalog = Catalog(store)
        first = catalog.publish(manifest("one"), fill(catalog, "one"))
        catalog.publish(manifest("two"), fill(catalog, "two"), instead_of=first)
        assert texts(catalog) == {"two"}
        catalog.remove(catalog.manifest("expert", "f1") or first)
        assert catalog.manifest("expert", "f1") is None
    finally:
        subprocess.run(["rm", "-r", str(elsewhere)], check=True)


def test_what_a_killed_process_left_is_found_and_what_a_living_one_uses_is_not(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    catalog = Catalog(store)
    worker = started(store, "killed")
    worker.wait()
    dead = attempts(catalog)
    mine = fill(catalog, "mine")
    assert list(unnamed_attempts(catalog, at_work=True)) == [f"artifacts/expert/f1/{dead[0]}"]
    owner = dead[0].split("_")[0]
    working = catalog.storage.working_folder()
    (tmp_path / "store/trajectories").mkdir()
    for name in (
        f"trajectories/.part-1.parquet.{owner}_1.tmp",
        f"tmp/embedder-{owner}_2.npz",
        "tmp/quarantine-x.parquet",
    ):
        (tmp_path / "store" / name).touch()
    (working / f"embedder-{mine.name}.npz").touch()
    old = time.time() - GRACE.total_seconds() - 60
    os.utime(working / "quarantine-x.parquet", (old, old))
    (working / "quarantine-young.parquet").touch()
    names = {path.name for path in leftovers(catalog.storage)}
    assert names == {f".part-1.parquet.{owner}_1.tmp", f"embedder-{owner}_2.npz", "quarantine-x.parquet"}


def test_a_store_without_a_name_is_refused() -> None:
    for name in ("", " "):
        with pytest.raises(StoreError, match="is empty; name a folder"):
            Catalog(name)


def test_a_file_uri_is_decoded_and_a_path_is_not(tmp_path: Path) -> None:
    assert Catalog(f"file://{tmp_path}/a%20b").storage.uri == f"{tmp_path}/a b"
    assert Catalog(f"{tmp_path}/a%20b").storage.uri == f"{tmp_path}/a%20b"
    with pytest.raises(StoreError, match="names the host 'server'"):
        Catalog("file://server/share")


@pytest.mark.parametrize("stray", ["runs/x.json", "tags/x.json"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"run_',
        b"[]",
        b"{}",
        b'{"run_id": "x", "state": "completed", "host": "h", "pid": 1, "stages": {"a": []}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_record_is_named_and_passed_over(stray: str, body: bytes, store: str) -> None:
    catalog = Catalog(store)
    published = catalog.publish(manifest("one"), fill(catalog, "one"))
    catalog.tag("best", "expert", "f1")
    catalog.write_run({"run_id": "2026-a", "state": "completed", "host": "here", "pid": 1, "stages": {}})
    catalog.storage.write(stray, body)
    with pytest.warns(UserWarning, match=rf"{stray} is damaged and passed over"):
        assert (len(catalog.runs()), list(catalog.tags())) == (1, ["best"])
    assert catalog.damaged() == [stray]
    with pytest.warns(UserWarning, match="set aside"):
        aside = catalog.set_aside(stray)
    assert catalog.damaged() == []
    assert catalog.storage.read(aside) == body
    assert catalog.manifest("expert", "f1") == published


def test_strays_are_named_and_left_alone(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    published = catalog.publish(manifest("one"), fill(catalog, "one"))
    catalog.tag("best", "expert", "f1")
    catalog.write_run({"run_id": "2026-a", "state": "completed", "host": "here", "pid": 1, "stages": {}})
    for folder in ("artifacts", "artifacts/expert", "runs", "tags"):
        (tmp_path / folder / "notes.txt").write_text("mine")
        (tmp_path / folder / "my folder").mkdir()
        (tmp_path / folder / ".hidden").mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(catalog.all()) == [published]
        assert list(catalog.tags()) == ["best"]
        assert [run["run_id"] for run in catalog.runs()] == ["2026-a"]
    text = "\n".join(str(text.message) for text in caught)
    for folder in ("artifacts", "artifacts/expert", "runs", "tags"):
        assert f"{folder} holds files that agentrl did not write" in text
    assert "notes.txt" in text
