"""Schedules for real: a Prefect server and process workers on loopback."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_project import Project, make_project

from agentrl.datastore.artifacts.catalog import Catalog

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parents[2])

PIPELINE = """
    name: nightly
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      b: {uses: "toy:trouble", inputs: {table: a}, with: {marker: tried}, execution: {retries: 1, retry_delay_s: 0.1}}
"""


@dataclass
class Server:
    """A Prefect server, perhaps with process workers. ``pid`` is that of the server and of its group of processes."""

    project: Project
    env: dict[str, str]
    pid: int

    def agentrl(self, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "agentrl.flows.cli", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout + done.stderr

    def api(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.env['PREFECT_API_URL']}/{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    @contextlib.contextmanager
    def running(self, file: str, **env: str) -> Iterator["subprocess.Popen[str]"]:
        """``agentrl run`` of a file that is at work. Its output goes to ``file`` with the suffix .log."""
        command = [sys.executable, "-P", "-m", "agentrl.flows.cli", "run", file, "--store", "store", "--prefect"]
        with (self.project.folder / f"{file}.log").open("w") as log:
            run = subprocess.Popen(command, env={**self.env, **env}, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield run
        finally:
            run.kill()
            run.wait()

    def told(self) -> str:
        """The runs of the store, and the last that the server, its workers and the runs said."""
        runs = self.agentrl("runs", "--store", self.project.store, "--json")[1]
        return f"{runs}\n{(self.project.folder / 'processes.log').read_text()[-20_000:]}"

    def runs(self, flow: str) -> list[dict[str, Any]]:
        return self.api("flow_runs/filter", {"flows": {"name": {"any_": [flow]}}, "sort": "START_TIME_ASC"})


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@contextlib.contextmanager
def serving(project: Project, *pools: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    env |= {
        "PYTHONPATH": ROOT,
        "PREFECT_HOME": str(project.folder / "prefect-home"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
    }
    log = (project.folder / "processes.log").open("wb")
    options: dict[str, Any] = {
        "env": env,
        "cwd": project.folder,
        "stdout": log,
        "stderr": log,
        "start_new_session": True,
    }
    prefect = [sys.executable, "-m", "prefect"]
    processes = [subprocess.Popen([*prefect, "server", "start", "--port", str(port), "--no-ui"], **options)]
    made = Server(project, env, processes[0].pid)
    try:
        wait_until(lambda: _answers(made), 90, "the server answers")
        for pool in pools:
            command = [*prefect, "worker", "start", "--pool", pool, "--type", "process"]
            processes.append(subprocess.Popen(command, **options))
        if pools:
            wait_until(lambda: len(made.api("work_pools/filter", {})) == len(pools), 60, "all pools exist")
        yield made
    finally:
        for process in reversed(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(make_project(tmp_path_factory.mktemp("scheduled")), "agentrl", "other") as made:
        yield made


def _answers(server: Server) -> bool:
    with contextlib.suppress(OSError):
        return bool(server.api("health"))
    return False


def catalog_runs(server: Server) -> list[dict[str, Any]]:
    return json.loads(server.agentrl("runs", "--store", server.project.store, "--json")[1])


@pytest.mark.ci
def test_a_schedule_fires_and_a_failing_stage_is_tried_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.project.folder)
    for name in ("schemas", "flows", "pipelines", "agentrl", "datastore"):
        (server.project.folder / f"{name}.py").write_text("raise RuntimeError('this is not ours')\n")
    server.project.write(PIPELINE)
    code, output = server.agentrl("schedule", "pipeline.yaml", "--cron", "* * * * *", "--store", "store")
    assert code == 0, output
    assert "nightly/default runs at * * * * * (UTC) in work pool agentrl" in output
    ended = wait_until(lambda: [run for run in catalog_runs(server) if run["state"] == "completed"], 240, "a run ends")
    assert ended[-1]["stages"] == {"ran": 2}, server.told()
    record = json.loads(server.agentrl("show", ended[-1]["run_id"], "--store", server.project.store, "--json")[1])
    assert record["stages"]["b"]["failed_tries"] == 1
    states = wait_until(
        lambda: [run["state"] for run in server.runs("nightly") if run["end_time"]], 30, "its flow run ends"
    )
    assert {state["type"] for state in states} == {"COMPLETED"}, states


def test_schedules_are_listed_updated_paused_resumed_and_deleted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(server.project.folder)
    server.project.write(PIPELINE.replace("nightly", "weekly"), "weekly.yaml")

    def listed() -> dict[str, dict[str, Any]]:
        return {item["name"]: item for item in json.loads(server.agentrl("schedule", "list", "--json")[1])}

    assert server.agentrl("schedule", "weekly.yaml", "--cron", "0 2 * * 0")[0] == 0
    assert server.agentrl("schedule", "weekly.yaml", "--cron", "0 3 * * 0", "--set", "seed=4")[0] == 0
    entry = listed()["weekly/default"]
    assert entry["schedule"] == "0 3 * * 0"
    assert entry["parameters"]["settings"] == ["seed=4"]
    assert entry["parameters"]["store"] == str(server.project.folder / "store")
    assert server.agentrl("schedule", "pause", "weekly") == (0, "weekly: paused\n")
    assert listed()["weekly/default"]["paused"] is True
    assert server.agentrl("schedule", "resume", "weekly/default")[0] == 0
    assert listed()["weekly/default"]["paused"] is False
    assert server.agentrl("schedule", "delete", "weekly")[0] == 0
    assert "weekly/default" not in listed()
    code, output = server.agentrl("schedule", "delete", "nightyl/default")
    assert code == 2
    assert "there is no schedule 'nightyl/default'" in output
    code, output = server.agentrl("schedule", "weekly.yaml", "--cron", "every day")
    assert code == 2
    assert "--cron 'every day'" in output
    code, output = server.agentrl("schedule", "weekly.yaml", "--cron", "0 2 * * *", "--pool", "gpus")
    assert code == 2
    assert "there is no work pool 'gpus'; there are: agentrl, other" in output


def test_a_stage_of_another_pool_runs_there_as_its_own_deployment_run(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(server.project.folder)
    text = PIPELINE.replace("name: nightly", "name: split").replace("tried", "tried2")
    text += '      c: {uses: "toy:trouble", inputs: {table: b}, execution: {pool: other}}\n'
    text += '      d: {uses: "toy:trouble", inputs: {table: c}}\n'
    server.project.write(text, "split.yaml")
    code, output = server.agentrl("run", "split.yaml", "--store", "split-store", "--json")
    assert code == 0, output
    record = json.loads(output)
    assert {name: stage["status"] for name, stage in record["stages"].items()} == dict.fromkeys("abcd", "ran")
    [there] = [run for run in server.runs("split") if run["work_pool_name"] == "other"]
    assert there["name"] == "c"
    assert there["state_type"] == "COMPLETED"
    assert there["parent_task_run_id"]


def test_force_reaches_a_stage_of_another_pool(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.project.folder)
    text = """
        name: forced
        stages:
          a: {uses: "toy:numbers", with: {n: 5}}
          b: {uses: "toy:trouble", inputs: {table: a}, execution: {pool: other}}
          c: {uses: "toy:trouble", inputs: {table: b}}
    """
    server.project.write(text, "forced.yaml")
    catalog = Catalog(server.project.folder / "forced-store")

    def made() -> tuple[int, str]:
        [manifest] = catalog.manifests("b")
        return manifest.made_again, manifest.attempt

    run = ("run", "forced.yaml", "--store", "forced-store", "--json")
    assert server.agentrl(*run)[0] == 0
    first = made()
    code, output = server.agentrl(*run, "--only", "b", "--force")
    assert code == 0, output
    stage = json.loads(output)["stages"]["b"]
    assert (stage["status"], stage["reproduced"]) == ("ran", True)
    again, attempt = made()
    assert (first[0], again) == (0, 1)
    assert attempt != first[1]
    assert len([run for run in server.runs("forced") if run["name"] == "b"]) == 2
    code, output = server.agentrl(*run)
    assert code == 0, output
    assert {stage["status"] for stage in json.loads(output)["stages"]} == {"cached"}


def test_a_cancelled_run_leaves_no_process_and_no_half_artifact(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(server.project.folder)
    text = PIPELINE.replace("name: nightly", "name: long").replace("marker: tried", "sleep: 120")
    server.project.write(text, "long.yaml")
    code, output = server.agentrl("schedule", "long.yaml", "--cron", "0 0 1 1 *", "--store", "long-store")
    assert code == 0, output
    deployment = server.api("deployments/name/long/default")["id"]
    run = server.api(f"deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})["id"]
    folder = server.project.folder / "long-store"
    wait_until(lambda: list(folder.glob("artifacts/b/*/*")), 60, "stage b works")
    workers = _workers_of(folder)
    assert workers
    server.api(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    wait_until(lambda: server.api(f"flow_runs/{run}")["state_type"] == "CANCELLED", 60, "the run is cancelled")
    wait_until(lambda: not _workers_of(folder), 20, "its processes are gone")
    assert not (folder / "artifacts" / "b").exists()
    assert (folder / "artifacts" / "a").exists()


LONG = """
    name: answering
    stages:
      a: {uses: "toy:numbers", with: {n: 7}}
      b: {uses: "toy:trouble", inputs: {table: a}, with: {sleep: 7}}
      c: {uses: "toy:trouble", inputs: {table: b}, with: {sleep: 1}}
"""


def test_no_stage_waits_for_a_server_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(server.project.folder)
    log = server.project.write(LONG, "stopped.yaml").with_suffix(".yaml.log")
    with server.running("stopped.yaml") as run:
        wait_until(lambda: "b: started" in log.read_text(), 60, "stage b works")
        os.killpg(server.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: "c: done" in log.read_text(), 40, "the stages end")
        finally:
            os.killpg(server.pid, signal.SIGCONT)
        assert run.wait(120) == 0
    assert "3 stages ran" in log.read_text()


def test_a_server_that_dies_costs_nothing_that_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(make_project(tmp_path)) as server:
        log = server.project.write(LONG, "dying.yaml").with_suffix(".yaml.log")
        with server.running("dying.yaml", PREFECT_CLIENT_MAX_RETRIES="1") as run:
            wait_until(lambda: "b: started" in log.read_text(), 60, "stage b works")
            os.killpg(server.pid, signal.SIGKILL)
            assert run.wait(180) == 0, log.read_text()
        log_text = log.read_text()
        assert "warning: Prefect's server does not show the progress of b" in log_text
        assert "warning: Prefect's server does not know how this run ended" in log_text
        assert "3 stages ran" in log_text
        [run_of] = catalog_runs(server)
        assert (run_of["state"], run_of["stages"]) == ("completed", {"ran": 3})
        code, output = server.agentrl("run", "dying.yaml", "--store", "other-store", "--prefect")
        assert code == 1
        assert "does not answer" in output
        assert "run with --no-prefect" in output


def _workers_of(store: Path) -> list[int]:
    """Processes whose standard output is a log of this store."""
    matches = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.fd == 1 and file.path.startswith(str(store)) for file in process.open_files()):
                matches.append(process.pid)
    return matches
