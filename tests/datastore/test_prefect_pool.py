"""Shards in a work pool of Prefect: a real server on loopback and real process workers."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import shard_work
from divided_rows import filled, kept, rows

from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards import engine, queued
from agentrl.datastore.shards.engine import run
from agentrl.datastore.shards.engines import engine_of, running, shared_folder
from agentrl.datastore.shards.prefect_jobs import PrefectJobs
from agentrl.datastore.shards.queued import Queued
from agentrl.datastore.shards.shard import Shard, ShardError
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.shards import ShardsNow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def shard(function: str, path: Path, *more: object) -> Shard:
    return Shard(f"{function} of {path.name}", f"{shard_work.__name__}:{function}", (path, *more))


def silent(done: int, total: int, now: ShardsNow) -> None:
    pass


@contextlib.contextmanager
def named_server(url: str | None) -> Iterator[None]:
    settings = pytest.importorskip("prefect.settings")
    change = (
        {"restore_defaults": {settings.PREFECT_API_URL}}
        if url is None
        else {"updates": {settings.PREFECT_API_URL: url}}
    )
    with settings.temporary_settings(**change):
        yield


def test_what_an_engine_of_prefect_needs_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("prefect", {"type": "ray", "pool": "x"}):
        with pytest.raises(StoreError, match="type: prefect and pool: NAME belong together"):
            engine_of(wrong)
    with pytest.raises(StoreError, match=r"is said by the pool; set it there .*leave out memory_gib"):
        engine_of({"type": "prefect", "pool": "x", "gpus": 1})
    with pytest.raises(StoreError, match=r"workers of prefect do not see .*; set execution\.engine\.folder"):
        shared_folder(ShardEngine(type="prefect", pool="x"), "s3://bucket/store")


@pytest.mark.slow
def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with named_server(None), pytest.raises(ShardError, match="none is named; set PREFECT_API_URL"):
        PrefectJobs("x")
    with named_server("http://127.0.0.1:9/api"):
        reason = r"the Prefect server at http://127\.0\.0\.1:9/api does not answer: .*; start it, or set"
        with pytest.raises(ShardError, match=reason) as error:
            PrefectJobs("x")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "prefect.settings", None)
    with (
        running(ShardEngine(type="prefect", pool="x"), tmp_path, silent) as run_them,
        pytest.raises(StoreError, match=r"this needs prefect, which is not installed: pip install .*\[.*prefect"),
    ):
        run_them([shard("write", tmp_path / "0", "")], "writing")


@dataclass
class Prefect:
    """A server, whose workers are started by the pool."""

    folder: Path
    env: dict[str, str]
    processes: list["subprocess.Popen[bytes]"]

    def start(self, *command: str, **env: str) -> None:
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "prefect", *command],
                env={**self.env, **env}, cwd=self.folder, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)

    def work(self, pool: str, first: Path = ROOT) -> None:
        """A worker that looks for packages in a folder first."""
        path = os.pathsep.join([str(first), str(ROOT), str(HERE)])
        self.start("worker", "start", "--pool", pool, "--type", "process", PYTHONPATH=path)


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    pytest.importorskip("prefect")
    folder = tmp_path_factory.mktemp("prefect")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | {
        "PREFECT_HOME": str(folder),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
    }
    env.pop("SOME_KEY", None)
    server = Prefect(folder, env, [])
    server.start("server", "start", "--port", str(port), "--no-ui")
    try:
        end = time.monotonic() + 240
        while not _answers(f"{env['PREFECT_API_URL']}/health"):
            assert time.monotonic() < end, (folder / "0.log").read_text()
            time.sleep(0.5)
        with named_server(env["PREFECT_API_URL"]):
            yield server
    finally:
        for process in reversed(server.processes):
            process.terminate()
        for process in server.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def until_pool_is_there(name: str) -> PrefectJobs:
    """A worker makes its pool when it starts."""
    end = time.monotonic() + 180
    while time.monotonic() < end:
        with contextlib.suppress(ShardError):
            return PrefectJobs(name)
        time.sleep(1)
    return PrefectJobs(name)


@pytest.mark.slow
@pytest.mark.ci
def test_shards_in_a_work_pool(tmp_path: Path, prefect: Prefect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "LOOK_S", 1.0)
    with pytest.raises(ShardError, match=r"has no work pool 'cpus'; it has: .*; create it by `prefect worker start"):
        PrefectJobs("cpus")
    prefect.work("cpus")
    shards = [shard("write", tmp_path / "0", "done"), shard("dies", tmp_path / "dies", 1)]
    shards += [shard("full_disk", tmp_path / "full", 1), shard("dies", tmp_path / "bad", 99)]
    pool = Queued(tmp_path, until_pool_is_there("cpus"))
    told: list[tuple[int, int, ShardsNow]] = []
    try:
        with pytest.raises(ShardError, match=r"'dies of bad' ended its process 3 times.*the job is gone: flow run"):
            run(shards, pool, lambda *state: told.append(state))
    finally:
        pool.close()
    assert [(tmp_path / name).read_text() for name in ("0", "dies", "full")] == ["done"] * 3
    assert told[-1][:2] == (3, 4)
    workers = {each.worker for _, _, now in told for each in now.tries if each.state == "running"}
    assert any(worker.startswith(f"{os.uname().nodename}, process ") for worker in workers)


@pytest.mark.slow
def test_what_workers_of_a_pool_lack_is_named(
    tmp_path: Path, prefect: Prefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "LOOK_S", 1.0)
    bare = tmp_path / "bare" / "agentrl"
    bare.mkdir(parents=True)
    (bare / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'agentrl'\")\n")
    prefect.work("cpus")
    prefect.work("bare", bare.parent)
    pool = Queued(tmp_path, until_pool_is_there("cpus"))
    needs = Shard("needs a key", "agentrl.pipelines.stage:reveal", ("${SOME_KEY}",))
    try:
        with pytest.raises(ShardError, match=r"'needs a key' on .*SOME_KEY is not set.*set it where workers start"):
            run([needs], pool, silent)
        monkeypatch.setattr(queued, "installed", lambda: "0.0.1 (code 0)")
        with pytest.raises(ShardError, match=r"it has agentrl .*the run has 0\.0\.1.*install the same on all workers"):
            run([needs], pool, silent)
    finally:
        pool.close()
    monkeypatch.setattr(engine, "TRIES", 1)
    jobs = until_pool_is_there("bare")
    pool = Queued(tmp_path, jobs)
    try:
        with pytest.raises(
            ShardError, match=r"is Crashed: Process exited with .*it never began.* have agentrl"
        ) as error:
            run([shard("write", tmp_path / "x", "")], pool, silent)
        assert "No module named 'agentrl'" in (prefect.folder / f"{len(prefect.processes) - 1}.log").read_text()
        assert "memory" not in str(error.value)
    finally:
        pool.close()
    jobs = until_pool_is_there("cpus")
    submit = jobs.submit
    monkeypatch.setattr(jobs, "submit", lambda folder, numbers: submit(tmp_path / "unseen", numbers))
    pool = Queued(tmp_path, jobs)
    try:
        with pytest.raises(ShardError, match=r"FileNotFoundError.*it never began: its worker must see .*jobs-"):
            run([shard("write", tmp_path / "x", "")], pool, silent)
    finally:
        pool.close()


@pytest.mark.slow
def test_a_work_pool_gives_the_same(tmp_path: Path, prefect: Prefect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given, rule = rows(200), [{"rule": "exact_duplicates"}]  # a flow run takes long to start
    expected = kept(filled(tmp_path / "whole", given, 1), ShardEngine(type="here", shards=1), rules=rule)
    assert expected[1]
    prefect.work("cpus")
    until_pool_is_there("cpus").close()
    chosen = ShardEngine(type="prefect", pool="cpus", workers=2, shards=2)
    assert kept(filled(Path("store"), given), chosen, rules=rule) == expected
