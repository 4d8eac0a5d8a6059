"""What gc frees and what it keeps."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from catalog_worker import fill, manifest, started
from rich.console import Console
from toy_project import Project

from agentrl.datastore import Catalog, StoreError
from agentrl.datastore.storage import lease
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.flows.session import RunSession
from agentrl.flows.showing import display_for
from agentrl.pipelines.results.gc import BY_COMMAND, collect, find_garbage
from agentrl.schemas.manifest import InputRecord, Manifest


def publish(catalog: Catalog, fingerprint: str, run_id: str = "r", made_from: tuple[str, ...] = ()) -> Manifest:
    inputs = {"data": [InputRecord(stage="expert", output="data", fingerprint=item) for item in made_from]}
    return catalog.publish(manifest(run_id, fingerprint, inputs=inputs), fill(catalog, run_id, 1, fingerprint))


def record(catalog: Catalog, run_id: str, fingerprint: str, state: str = "completed") -> None:
    """A run's record, as a process of another machine wrote it."""
    stages = {"expert": {"status": "ran", "fingerprint": fingerprint}}
    catalog.write_run({"run_id": run_id, "state": state, "host": "elsewhere", "pid": 1, "stages": stages})


def left(catalog: Catalog) -> list[str]:
    return sorted(item.fingerprint for item in catalog.all())


def test_what_commands_published_stays(store: str) -> None:
    catalog = Catalog(store)
    publish(catalog, "upstream")
    publish(catalog, "curated", BY_COMMAND, ("upstream",))
    publish(catalog, "old")
    record(catalog, "2026-1", "old")
    freed = collect(catalog, keep_runs=0)
    assert [artifact.fingerprint for artifact in freed.artifacts] == ["old"]
    assert left(catalog) == ["curated", "upstream"]


def test_a_damaged_record_frees_no_artifact_and_is_set_aside(store: str) -> None:
    catalog = Catalog(store)
    publish(catalog, "f1")
    catalog.storage.write("runs/2026-1.json", b'{"run_id": "2026-1", "stages": {"expe')
    with pytest.warns(UserWarning, match=r"2026-1.json cannot be read, so nobody knows which artifacts"):
        assert collect(catalog, keep_runs=5).artifacts == []
    assert left(catalog) == ["f1"]
    assert [artifact.fingerprint for artifact in collect(catalog, keep_runs=5).artifacts] == ["f1"]
    assert len(list(catalog.storage.keys("damaged/runs"))) == 1


def test_replaced_and_killed_attempts_go_and_the_rest_stays(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    catalog = Catalog(store)
    started(store, "killed").wait()
    killed = catalog.storage.children("artifacts/expert/f1")[0]
    first = publish(catalog, "f2", BY_COMMAND)
    catalog.publish(manifest(BY_COMMAND, "f2"), fill(catalog, "forced", 1, "f2"), instead_of=first)
    at_work = fill(catalog, "mine", 1, "f3")
    problems = find_garbage(catalog, keep_runs=1)
    assert problems.attempts == [f"artifacts/expert/f1/{killed[0]}"]  # the replaced one's process still lives: this one
    collect(catalog, keep_runs=1)
    assert not (tmp_path / "store/artifacts/expert/f1").exists()
    assert at_work.exists()
    assert left(catalog) == ["f2"]
    assert first.attempt in catalog.storage.children("artifacts/expert/f2")[0]


def test_a_run_at_work_keeps_what_it_named(store: str) -> None:
    catalog = Catalog(store)
    publish(catalog, "f1")
    publish(catalog, "f2", made_from=("f1",))
    record(catalog, "2026-1", "f2", state="running")
    assert collect(catalog, keep_runs=0).artifacts == []


def test_gc_waits_for_a_run_that_says_what_it_needs(store: str) -> None:
    catalog = Catalog(store)
    publish(catalog, "f1")
    done = threading.Event()

    def gc() -> None:
        collect(Catalog(store), keep_runs=0)
        done.set()

    thread = threading.Thread(target=gc)
    with catalog.lock_garbage():
        thread.start()
        assert not done.wait(1)
        record(catalog, "2026-1", "f1", state="running")
    thread.join()
    assert left(catalog) == ["f1"]


def test_gc_walks_a_long_chain_and_a_dense_graph_in_no_time(tmp_path: Path) -> None:
    """2,000 artifacts, each made from the two before it: too deep for recursion, and 10^400 paths."""
    catalog = Catalog(tmp_path)
    assert isinstance(catalog.storage, LocalStorage)
    number = 2000
    for item in range(number):
        folder = tmp_path / catalog.folder("expert", f"f{item}")
        folder.mkdir(parents=True)
        two = [InputRecord(stage="expert", output="data", fingerprint=f"f{below}") for below in (item - 1, item - 2)]
        (folder / "manifest.json").write_text(manifest("r", f"f{item}", inputs={"a": two}).model_dump_json())
    record(catalog, "2026-1", f"f{number - 1}")
    began = time.process_time()
    garbage = find_garbage(catalog, keep_runs=1)
    assert time.process_time() - began < 5
    assert (garbage.kept, garbage.artifacts) == (number, [])


def test_a_run_whose_artifacts_were_freed_meanwhile_says_so(project: Project) -> None:
    text = 'name: p\nstages: {a: {uses: "toy:numbers"}, b: {uses: "toy:numbers", with: {n: 7}}}'
    first = project.run(text)
    plan = project.plan(
        text + "\n",
    )
    assert not plan.to_run
    project.catalog.remove(first["a"].manifest)
    session = RunSession(plan, project.catalog, display_for(Console(), quiet=True))
    with pytest.raises(StoreError, match="artifacts of a were freed since the plan was made"), session.recorded():
        pass
    assert project.catalog.runs() == []


def test_a_lock_leaves_no_file_and_excludes_all_the_same(tmp_path: Path) -> None:
    catalog, counts = Catalog(tmp_path), [0]

    def count() -> None:
        for _ in range(20):
            with Catalog(tmp_path).lock("expert", "f1"):
                before = counts[0]
                time.sleep(0.0005)
                counts[0] = before + 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [80]
    assert catalog.storage.children("locks") == ([], [])
    started(str(tmp_path), "killed").wait()
    assert catalog.storage.children("locks")[1] == ["expert-f1.lock"]
    collect(catalog, keep_runs=1)
    assert catalog.storage.children("locks") == ([], [])


def test_gc_frees_the_lease_of_a_killed_process_at_once(s3_store: str) -> None:
    """Its owner is forgotten, so nobody could tell later that it died here."""
    started(s3_store, "killed", 60).wait()
    catalog = Catalog(s3_store)
    collect(catalog, keep_runs=1)
    assert not list((catalog.storage.working_folder() / "owners").glob("*.lock"))[1:]  # only this process is known
    began = time.monotonic()
    with Catalog(s3_store).lock("expert", "f1", timeout=30):
        assert time.monotonic() - began < 10


def test_gc_removes_leases_that_nobody_has_touched_for_long(s3_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(s3_store)
    for number in range(3):
        with catalog.lock("expert", f"f{number}"):
            pass
    collect(catalog, keep_runs=1)
    assert len(list(catalog.storage.keys("locks"))) == 4  # they are young
    monkeypatch.setattr(lease, "UNUSED", timedelta(0))
    time.sleep(1.1)  # the store tells whole seconds
    collect(catalog, keep_runs=1)
    assert list(catalog.storage.keys("locks")) == ["locks/gc.lock"]
