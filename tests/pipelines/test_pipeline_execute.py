"""Stages in worker processes: results, failures, kills, races."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from toy_project import Project

from agentrl.pipelines.plan.code import changed_code
from agentrl.pipelines.run.execute import StageJob, job_of
from agentrl.pipelines.run.processes import descendants
from agentrl.pipelines.run.worker import StageError, Workers
from agentrl.rollouts.runner import rare_collections

PIPELINE = """
    name: p
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      t: {uses: "toy:trouble", inputs: {table: a}, with: {error: "%s", sleep: %s}}
"""


def job(project: Project, error: str = "", sleep: float = 0.0) -> StageJob:
    project.run(PIPELINE % (error, sleep), _until_a())
    plan = project.plan(PIPELINE % (error, sleep))
    return job_of(plan.steps["t"], plan, "test-run")


def _until_a() -> object:
    from agentrl.pipelines.plan.plan import Selection

    return Selection(only=("a",))


def test_a_worker_runs_stages_and_reports_progress(project: Project) -> None:
    seen = []
    workers = Workers(lambda *event: seen.append(event))
    try:
        outcome = workers.run(job(project, sleep=0.4), project.folder / "log")
    finally:
        workers.close()
    assert outcome.manifest.outputs["table"].rows == 5
    assert seen[-1] == ("t", 8, 8, {})
    assert project.catalog.manifest("t", outcome.manifest.fingerprint) == outcome.manifest


def test_code_that_was_edited_since_the_plan_does_not_run_under_the_fingerprint_of_the_plan(project: Project) -> None:
    text = PIPELINE % ("", 0.0) + '      b: {uses: "toy:add", inputs: {tables: [a]}}\n'
    project.run(text, _until_a())
    plan = project.plan(text)
    job = job_of(plan.steps["b"], plan, "test-run")
    assert job.sources
    project.edit("deeper", "# start here", "# a comment is no edit of the code")
    assert changed_code(job.sources, job.folders, job.ingredients.code) == []
    project.edit("deeper", "result = 0.0", "result = 0.5")
    workers = Workers(lambda *_: None)
    words = rf"CodeChangedError: code {project.package}/deeper\.py changed since the plan; run again"
    try:
        with pytest.raises(StageError, match=words):
            workers.run(job, project.folder / "log")
        assert project.catalog.manifests("b") == []
        outcome = workers.run(job_of((again := project.plan(text)).steps["b"], again, "r"), project.folder / "log")
        assert outcome.manifest.fingerprint != job.fingerprint
        project.edit("deeper", "result = 0.5", "result = (")
        with pytest.raises(StageError, match=r"code changed since the plan: .*deeper\.py:3 is not Python"):
            workers.run(job, project.folder / "log")
    finally:
        workers.close()


def test_a_failure_has_one_line_and_a_log_with_the_rest(project: Project) -> None:
    workers = Workers(lambda *_: None)
    failing = job(project, error="no such luck")
    try:
        with pytest.raises(StageError, match="stage t: ValueError: no such luck") as error:
            workers.run(failing, project.folder / "log")
    finally:
        workers.close()
    assert "Traceback" in error.value.log.read_text()
    assert project.catalog.manifest("t", failing.fingerprint) is None
    assert not (project.folder / "store" / "artifacts" / "t").exists()


def test_a_killed_worker_is_a_failure_and_the_next_stage_gets_a_new_one(project: Project) -> None:
    workers = Workers(lambda *_: os.kill(next(iter(workers._busy.values())).process.popen.pid, signal.SIGKILL))
    slow, quick = job(project, sleep=5.0), job(project, sleep=0.01)
    try:
        with pytest.raises(StageError, match="signal 9"):
            workers.run(slow, project.folder / "log")
        workers.on_progress = lambda *_: None
        assert workers.run(quick, project.folder / "log").manifest.outputs["table"].rows == 5
    finally:
        workers.close()


def test_an_interrupted_wait_ends_the_stage_and_its_children(project: Project) -> None:
    project.edit(
        "stages",
        "    for number in range(int",
        "    import subprocess\n\n"
        "    child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    open('child', 'w').write(str(child.pid))\n    for number in range(int",
    )
    slow = job(project, sleep=30.0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = set(descendants(os.getpid()))  # a server of another test's, say
    workers = Workers(lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        workers.run(slow, project.folder / "log", listener=interrupt)
    assert not _lives(int(Path("child").read_text()))
    assert set(descendants(os.getpid())) <= before


def test_a_stage_that_was_begun_shows_progress_before_anyone_waits_for_it(project: Project) -> None:
    seen = threading.Event()
    workers = Workers(lambda *_: seen.set())
    slow = job(project, sleep=1.0)
    try:
        workers.begin(slow, project.folder / "log")
        assert seen.wait(20)
        assert workers.run(slow, project.folder / "log").manifest.outputs["table"].rows == 5
    finally:
        workers.close()


WEIGHTS = """
    import psutil
    import torch
    model = {"weights": [torch.ones(50_000) for _ in range(1000)]}  # 200 MB, in pieces that malloc keeps
    model["optimizer"] = model
    open('peak', 'w').write(str(psutil.Process().memory_info().rss))
"""


def test_a_worker_that_waits_holds_no_model_of_the_stage_before(project: Project) -> None:
    project.edit("stages", "    for number in range(int", WEIGHTS + "    for number in range(int")
    workers = Workers(lambda *_: None)
    try:
        workers.run(job(project), project.folder / "log")
        (waiting,) = psutil.Process(workers._idle[0].popen.pid).children()
        assert waiting.memory_info().rss < int(Path("peak").read_text()) - 100e6
    finally:
        workers.close()


def test_rollouts_leave_frozen_what_a_worker_has_frozen() -> None:
    for freeze, kept in ((gc.freeze, True), (gc.unfreeze, False)):
        freeze()
        with rare_collections():
            assert gc.get_freeze_count()
        assert bool(gc.get_freeze_count()) == kept


@pytest.mark.slow
@pytest.mark.ci
def test_a_prepared_worker_waits_for_a_stage_with_a_model(project: Project) -> None:
    project.edit(
        "stages",
        "    for number in range(int",
        "    import os, sys\n\n    mine = f'{os.getppid()} {\"transformers.modeling_utils\" in sys.modules}'\n"
        "    open('worker', 'w').write(mine)\n    for number in range(int",
    )
    light, workers = job(project), Workers(lambda *_: None)
    try:
        workers.prepare(project.folder / "prepared.log")
        prepared = workers._idle[0].popen.pid
        workers.run(light, project.folder / "log")
        assert Path("worker").read_text().split()[0] != str(prepared)
        workers.run(replace(light, forced=True, has_model=True), project.folder / "log")
        assert Path("worker").read_text() == f"{prepared} True"
        workers.run(replace(light, forced=True), project.folder / "log")
        assert len(workers._idle) == 2
        assert Path("worker").read_text().split()[0] != str(prepared), "who has imported much is left to who needs it"
        workers.run(replace(light, forced=True, has_model=True), project.folder / "log")
        assert Path("worker").read_text() == f"{prepared} True"
    finally:
        workers.close()


def test_children_left_behind_cost_the_worker_its_life(project: Project) -> None:
    project.edit(
        "stages",
        "    for number in range(int",
        "    import subprocess\n\n"
        "    child = subprocess.Popen(['sleep', '60'])\n    open('child', 'w').write(str(child.pid))\n"
        "    for number in range(int",
    )
    workers = Workers(lambda *_: None)
    try:
        workers.run(job(project), project.folder / "log")
        assert not _lives(int(Path("child").read_text()))
    finally:
        workers.close()


DAEMON = """
    import sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open('daemon', 'w').write(str(os.getpid()))
            time.sleep(60)
        os._exit(0)
    os.wait()
    while not os.path.exists('daemon') or not open('daemon').read():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("error", ["", "no such luck"])
def test_a_daemon_that_forked_twice_ends_with_its_stage(project: Project, error: str) -> None:
    project.edit("stages", "    for number in range(int", DAEMON + "    for number in range(int")
    workers = Workers(lambda *_: None)
    try:
        with contextlib.suppress(StageError):
            workers.run(job(project, error=error), project.folder / "log")
        assert not _lives(int(Path("daemon").read_text()))
    finally:
        workers.close()


def test_a_secret_in_an_exception_a_print_or_a_metric_is_not_kept(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = 'sk-1234 "quoted" + more'
    monkeypatch.setenv("JUDGE", secret)  # its name says nothing, its field does
    monkeypatch.setenv("OTHER_TOKEN", "tok-987654321")  # its name does, and no field holds it
    project.edit(
        "stages",
        "    return context.table(table.table())\n\n\nclass Loose",
        "    from agentrl.pipelines.stage import reveal\n    from urllib.parse import quote\n    import logging, sys\n"
        "    value = reveal(config.key)\n    context.metrics['url'] = 'https://x/?key=' + quote(value)\n"
        "    print('stdout', value, os.environ['OTHER_TOKEN'])\n    logging.warning('logged %r', value)\n"
        "    if config.base == 'fail':\n        raise ValueError(f'no answer from https://{value}@host')\n"
        "    return context.table(table.table())\n\n\nclass Loose",
    )
    project.edit("stages", 'Annotated[str | None, External("model")]', "str | None")
    text = (
        'name: p\nstages:\n  a: {uses: "toy:numbers"}\n'
        '  o: {uses: "toy:outside", inputs: {table: a}, with: {key: "${JUDGE}", base: %s}}'
    )
    project.run(text % "fine", _until_a())
    workers = Workers(lambda *_: None)
    log = project.folder / "log"
    try:
        for base in ("fine", "fail"):
            plan = project.plan(text % base)
            with contextlib.suppress(StageError):
                outcome = workers.run(job_of(plan.steps["o"], plan, "r"), log)
    finally:
        workers.close()
    assert outcome.manifest.metrics["url"] == "https://x/?key=***"
    assert "no answer from https://***@host" in log.read_text()
    kept = [path for path in project.folder.rglob("*") if path.is_file()]
    for form in ("sk-1234", "tok-987654321"):
        assert not [path for path in kept if form.encode() in path.read_bytes()]


RUN = """
import sys
from pathlib import Path
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.run.execute import job_of
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.run.worker import Workers
plan = make_plan(load(sys.argv[1]), Catalog(sys.argv[2]), sys.argv[2])
workers = Workers(lambda *_: print("progress", flush=True))
for step in plan.to_run:
    outcome = workers.run(job_of(step, plan, "run"), Path(sys.argv[2]) / "log")
    print(step.name, "reused" if outcome.reused else "ran", flush=True)
workers.close()
"""


def start(project: Project) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", RUN, str(project.folder / "pipeline.yaml"), project.store]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_kill_9_of_the_run_leaves_no_worker_and_nothing_half_made(project: Project) -> None:
    slow = job(project, sleep=3.0)
    process = start(project)
    assert process.stdout
    while "progress" not in process.stdout.readline():
        pass
    below = [item.pid for item in descendants(process.pid)]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while any(map(_lives, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert below
    assert not any(map(_lives, below))
    assert project.catalog.manifest("t", slow.fingerprint) is None
    assert set(project.run(PIPELINE % ("", 3.0))) == {"t"}


def test_kill_9_of_the_run_ends_a_stage_that_holds_the_interpreter_lock(project: Project) -> None:
    """A thread of the worker could not see that the run is gone; and a daemon of the stage is ended too."""
    hold = "    context.progress(0)\n    import ctypes\n    ctypes.PyDLL(None).sleep(8)\n"
    project.edit("stages", "    for number in range(int", DAEMON + hold + "    for number in range(int")
    job(project, sleep=3.0)
    process = start(project)
    assert process.stdout
    while "progress" not in process.stdout.readline():
        pass
    time.sleep(0.2)
    below = [item.pid for item in descendants(process.pid)] + [int(Path("daemon").read_text())]
    process.kill()
    process.wait()
    deadline = time.monotonic() + 3
    while any(map(_lives, below)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in below if _lives(pid)]


@pytest.mark.slow
@pytest.mark.ci
def test_two_runs_at_once_compute_each_stage_once(project: Project) -> None:
    project.write(PIPELINE % ("", 1.5))
    both = [start(project), start(project)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    lines = sorted(line for output in outputs for line in output.splitlines() if line != "progress")
    assert lines == ["a ran", "a reused", "t ran", "t reused"]


def test_a_kill_between_data_and_manifest_publishes_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data's last step before the manifest is simulated by data without one, as object stores may leave it."""
    outcome = project.run(PIPELINE % ("", 0))["t"]
    folder = project.folder / "store" / "artifacts" / "t" / outcome.manifest.fingerprint
    (folder / "manifest.json").unlink()
    assert folder.joinpath(outcome.manifest.attempt, "table.parquet").exists()
    again = project.run(PIPELINE % ("", 0))
    assert set(again) == {"t"}
    assert again["t"].manifest.outputs == outcome.manifest.outputs


def test_a_full_disk_fails_cleanly(project: Project) -> None:
    project.edit(
        "stages",
        "    if config.error:",
        "    if os.environ.get('FULL'):\n        import resource\n\n"
        "        import signal\n\n        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n    if config.error:",
    )
    full = job(project)
    workers = Workers(lambda *_: None)
    try:
        with pytest.raises(StageError, match=r"OSError|File too large"):
            workers.run(full, project.folder / "log", env={"FULL": "1"})
        assert project.catalog.manifest("t", full.fingerprint) is None
        assert workers.run(full, project.folder / "log").manifest.outputs["table"].rows == 5
    finally:
        workers.close()


def test_threads_share_workers(project: Project) -> None:
    text = 'name: p\nstages: {a: {uses: "toy:numbers", matrix: {n: [1, 2, 3, 4]}}}'
    plan = project.plan(text)
    workers = Workers(lambda *_: None)
    try:
        threads = [
            threading.Thread(target=workers.run, args=(job_of(step, plan, "r"), project.folder / "log"))
            for step in plan.to_run
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        workers.close()
    assert {str(step.status) for step in project.plan(text).steps.values()} == {"cached"}


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
