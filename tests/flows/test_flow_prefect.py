"""Runs through Prefect with a server of their own: retries, time limits, slots, faults, silence."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_project import Project

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parents[2])

PIPELINE = """
    name: toy
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      b: {uses: "toy:add", inputs: {tables: a}}
      c: {uses: "toy:trouble", inputs: {table: b.sums}, with: {sleep: 0}}
"""


def start(*arguments: str, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "agentrl.flows.cli", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": ROOT, **env}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def agentrl(*arguments: str, **env: str) -> tuple[int, str]:
    process = start(*arguments, **env)
    output = process.communicate(timeout=180)[0]
    return process.returncode, output


def run(project: Project, text: str, *arguments: str) -> tuple[int, str]:
    project.write(text)
    return agentrl("run", "pipeline.yaml", "--prefect", *arguments)


def last(project: Project) -> dict[str, Any]:
    return json.loads(agentrl("show", "last", "--json")[1])


def wait_for(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


def ours() -> list[str]:
    """Command lines of workers and servers of runs that were started in the current directory."""
    matches = []
    for process in psutil.process_iter():
        try:
            line, here = " ".join(process.cmdline()), process.cwd() == os.getcwd()
        except psutil.Error:
            continue
        if here and ("-m agentrl.pipelines.run.worker" in line or "-m agentrl.flows.server" in line):
            matches.append(line)
    return matches


def test_a_run_says_nothing_but_its_own_lines(project: Project) -> None:
    for arguments in ((), ("--set", "stages.a.with.n=6")):
        code, output = run(project, PIPELINE, *arguments)
        assert code == 0, output
        for line in output.splitlines():
            known = ("  [", "stages to run", "store   ", "run 2")
            assert any(part in line for part in known), f"a line that is not ours: {line!r} in\n{output}"
    assert ours() == []
    database = sqlite3.connect(project.folder / "store" / "prefect" / "prefect.db")
    for kind, condition, count in (
        ("flow_run", "state_type = 'COMPLETED'", 2),
        ("task_run", "state_type = 'COMPLETED'", 6),
        ("artifact", "type = 'table'", 2),
    ):
        assert database.execute(f"select count(*) from {kind} where {condition}").fetchone() == (count,)


def test_prefect_shows_progress_of_a_long_stage_and_the_report(project: Project) -> None:
    """Another file of the user's declares a stage that writes a report."""
    (project.folder / "pages.py").write_text(
        "from agentrl.pipelines.handles import Report, Table\n"
        "from agentrl.pipelines.stage import Context, StageConfig, stage\n"
        "@stage('pages.page', version=1)\n"
        "def page(context: Context, config: StageConfig, table: Table) -> Report:\n"
        "    return context.report({'report.md': '# A page', 'report.html': '<h1>A page</h1>'})\n"
    )
    text = PIPELINE.replace("{sleep: 0}", "{sleep: 7}") + "      d: {uses: 'pages:page', inputs: {table: c}}\n"
    code, output = run(project, text)
    assert code == 0, output
    database = sqlite3.connect(project.folder / "store" / "prefect" / "prefect.db")
    artifacts = {kind: (key, data) for kind, key, data in database.execute("select type, key, data from artifact")}
    assert artifacts["markdown"][0] == "toy-d"
    assert "# A page" in artifacts["markdown"][1]
    assert artifacts["progress"][0] == "toy-c"
    assert 0 < float(artifacts["progress"][1]) <= 100


def test_a_failing_stage_is_tried_again(project: Project) -> None:
    text = PIPELINE.replace("with: {sleep: 0}}", "with: {marker: tried}, execution: {retries: 2, retry_delay_s: 0.1}}")
    code, output = run(project, text)
    assert code == 0, output
    assert "c: failed: RuntimeError: the first try fails; 2 more tries" in output
    assert last(project)["stages"]["c"]["failed_tries"] == 1


def test_a_hanging_stage_is_ended_at_its_limit_and_nothing_after_it_runs(project: Project) -> None:
    text = PIPELINE.replace("with: {sleep: 0}}", "with: {sleep: 60}, execution: {timeout_s: 3}}")
    text += '      d: {uses: "toy:trouble", inputs: {table: c}}\n'
    started = time.monotonic()
    code, output = run(project, text)
    assert time.monotonic() - started < 40
    assert code == 1
    assert "stage c failed: did not end within timeout_s = 3" in output
    assert "left      c, d" in output
    assert ours() == []


BLOCKS = """
import ctypes
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, StageConfig, stage

class Config(StageConfig):
    pass

@stage("blocks.c", version=1)
def block(context: Context, config: Config) -> Table:
    ctypes.PyDLL(None).sleep(90)  # in C, and holding the interpreter's lock
"""


def test_a_stage_that_blocks_in_c_is_ended_at_its_limit_and_prefect_says_nothing_else(project: Project) -> None:
    (project.folder / "blocks.py").write_text(BLOCKS)
    started = time.monotonic()
    code, output = run(project, 'name: p\nstages: {s: {uses: "blocks:block", execution: {timeout_s: 2}}}')
    assert (code, ours()) == (1, [])
    assert time.monotonic() - started < 80
    assert "s: failed: did not end within timeout_s = 2" in output
    assert last(project)["stages"]["s"]["cause"] == "did not end within timeout_s = 2"
    database = sqlite3.connect(project.folder / "store" / "prefect" / "prefect.db")
    logged = [message for (message,) in database.execute("select message from log")]
    database.close()
    assert logged
    assert not [message for message in logged if "cannot interrupt" in message]


def test_stages_run_side_by_side_and_slots_hold_them_back(project: Project) -> None:
    text = """
        name: toy
        stages:
          a: {uses: "toy:numbers"}
          x: {uses: "toy:trouble", inputs: {table: a}, matrix: {sleep: [2.0, 2.05, 2.1]}, execution: {concurrency: %s}}
    """
    code, output = run(project, text % "[]", "--jobs", "3")
    assert code == 0, output
    together = _span(project)
    shutil.rmtree(project.folder / "store")
    code, output = run(project, text % "[judge-endpoint]", "--jobs", "3")
    assert code == 0, output
    assert _span(project) > 6.0
    assert together < 6.0


def _span(project: Project) -> float:
    """Seconds from the first to the last of stages x."""
    from datetime import datetime

    stages = [stage for name, stage in last(project)["stages"].items() if name.startswith("x")]
    starts = [datetime.fromisoformat(stage["started_at"]).timestamp() for stage in stages]
    ends = [start + stage["duration_s"] for start, stage in zip(starts, stages, strict=True)]
    return max(ends) - min(starts)


def test_ctrl_c_in_the_middle_of_a_stage_and_in_a_wait_for_a_retry(project: Project) -> None:
    slow = PIPELINE.replace("with: {sleep: 0}}", "with: {sleep: 60}}")
    waiting = PIPELINE.replace("with: {sleep: 0}}", "with: {error: x}, execution: {retries: 1, retry_delay_s: 60}}")
    for text, moment in ((slow, "c: started"), (waiting, "1 more tries")):
        project.write(text)
        process = start("run", "pipeline.yaml", "--prefect")
        wait_for(process, moment)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)[0]
        assert process.returncode == 130, output
        assert "cancelled" in output
        assert "go on     agentrl run pipeline.yaml" in output
        assert "Traceback" not in output
        assert last(project)["state"] == "cancelled"
        assert _gone()


@pytest.mark.ci
def test_kill_9_of_the_run_leaves_nothing_behind_and_the_next_run_goes_on(project: Project) -> None:
    text = PIPELINE.replace("with: {sleep: 0}}", "with: {sleep: 4}, execution: {concurrency: [gpu]}}")
    project.write(text)
    process = start("run", "pipeline.yaml")
    wait_for(process, "c: started")
    time.sleep(1)
    process.kill()
    process.wait()
    assert _gone()
    code, output = agentrl("run", "pipeline.yaml")
    assert code == 0, output
    assert "1 stages to run, 2 cached" in output


def _gone() -> bool:
    deadline = time.monotonic() + 8
    while ours() and time.monotonic() < deadline:
        time.sleep(0.1)
    return ours() == []


def test_the_prefect_database_may_be_deleted_between_runs(project: Project) -> None:
    assert run(project, PIPELINE)[0] == 0
    shutil.rmtree(project.folder / "store" / "prefect")
    code, output = run(project, PIPELINE)
    assert code == 0
    assert "everything is up to date, 3 stages cached" in output
    code, output = run(project, PIPELINE, "--set", "stages.c.with.sleep=0.1")
    assert code == 0, output
    assert "1 stages ran, 2 were cached" in output


def test_simultaneous_first_runs_on_a_fresh_store_take_turns_to_start_prefect(project: Project) -> None:
    for number in range(6):
        project.write(
            PIPELINE.replace("name: toy", f"name: toy{number}").replace("n: 5", f"n: {number + 2}"), f"{number}.yaml"
        )
    runs = [start("run", f"{number}.yaml", "--prefect") for number in range(6)]
    outputs = [process.communicate(timeout=400)[0] for process in runs]
    assert [process.returncode for process in runs] == [0] * 6, outputs
    assert any("waits for another run that starts Prefect on this store" in output for output in outputs)
    assert all("3 stages ran" in output for output in outputs)
    database = sqlite3.connect(project.folder / "store" / "prefect" / "prefect.db")
    assert database.execute("select count(*) from flow_run where state_type = 'COMPLETED'").fetchone() == (6,)


@pytest.mark.parametrize("name", ["a b ü 🦊 \"q\" 's' [x] {y} %20 #h ?q=1 & $HOME ;", "%(here)s 100%"])
def test_a_folder_of_any_name_holds_pipeline_and_store(
    project: Project, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(PIPELINE)
    folder = project.folder / name
    folder.mkdir()
    for item in (project.folder / project.package, project.folder / "pipeline.yaml"):
        item.rename(folder / item.name)
    monkeypatch.chdir(folder)
    code, output = agentrl("run", "pipeline.yaml", "--prefect")
    assert code == 0, output
    assert "3 stages ran, 0 were cached" in output
    assert (folder / "store" / "prefect" / "prefect.db").is_file()
    assert "everything is up to date" in agentrl("run", "pipeline.yaml", "--prefect")[1]


def test_two_runs_at_once_share_a_store(project: Project) -> None:
    project.write(PIPELINE.replace("with: {sleep: 0}}", "with: {sleep: 2}}"))
    both = [start("run", "pipeline.yaml", "--prefect", "--json") for _ in range(2)]
    records = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert [record["state"] for record in records] == ["completed"] * 2
    for name in "abc":
        assert sorted(record["stages"][name]["status"] for record in records) == ["ran", "reused"], records


SLOTTED = PIPELINE.replace("with: {sleep: 0}}", "with: {sleep: %s}, execution: {concurrency: [gpu]}}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_waits_for_a_slot_says_for_whom_and_ends_at_once(project: Project, number: signal.Signals) -> None:
    project.write(SLOTTED % 600)
    first = start("run", "pipeline.yaml")
    try:
        wait_for(first, "c: started")
        holder = last(project)
        second = start("run", "pipeline.yaml", "--set", "stages.c.with.sleep=0.1")
        seen = wait_for(second, "waits for slot gpu")
        assert f"held by run {holder['run_id']} (host {holder['host']}, pid {first.pid})" in seen
        assert f"kill {first.pid}" in seen
        waiting = last(project)["stages"]["c"]
        assert (waiting["status"], waiting["slots"]) == ("waiting", ["gpu"])
        time.sleep(0.5)
        began = time.monotonic()
        second.send_signal(number)
        output = second.communicate(timeout=30)[0]
        took = time.monotonic() - began
        print(f"ended after {took:.2f} s")  # `pytest -rP` shows it
        assert took < 5.0  # it should take 2 s; the rest is for a busy machine
        assert second.returncode == 130
        assert "cancelled; nothing is half done" in output
        assert "Traceback" not in output
        assert last(project)["state"] == "cancelled"
        third = start("run", "pipeline.yaml", "--set", "stages.c.with.sleep=0.1")
        wait_for(third, "waits for slot gpu")
        first.kill()  # the slot of a run that is gone is free
        assert third.communicate(timeout=30)[0].count("done in") == 1
        assert third.returncode == 0
    finally:
        first.kill()
        first.wait()
    assert _gone()


TELLS = """
import logging, os, sys
from agentrl.pipelines.handles import Table
from agentrl.pipelines.stage import Context, Secret, StageConfig, reveal, stage

class Config(StageConfig):
    key: Secret
    fails: bool = True

@stage("tells.all", version=1)
def tell(context: Context, config: Config, table: Table) -> Table:
    key, token = reveal(config.key), os.environ["OTHER_TOKEN"]
    context.metrics["url"] = f"https://host/?key={key}"
    print("printed", key, token)
    print("printed", key, token, file=sys.stderr)
    logging.getLogger("tells").error("logged %r %s", key, token)
    context.progress(1, 2, url=f"https://host/?key={key}")
    if config.fails:
        raise ValueError(f"no answer from https://{key}:{token}@host")
    return context.table(table.table())
"""


def test_a_secret_reaches_no_record_no_log_and_nothing_of_prefects(project: Project) -> None:
    key, token = "kE7-very-secret-value", "tOk-also-a-secret"
    env = {"JUDGE": key, "OTHER_TOKEN": token}  # the first is a secret by its field, the second by its name
    (project.folder / "tells.py").write_text(TELLS)
    text = (
        PIPELINE + '      d: {uses: "tells:tell", inputs: {table: c}, with: {key: "${JUDGE}"}, execution: EXECUTION}\n'
    )
    project.write(text.replace("EXECUTION", "{retries: 1, retry_delay_s: 0.1}"))
    outputs = []
    for arguments, expected in ((), 1), (("--set", "stages.d.with.fails=false"), 0):
        code, output = agentrl("run", "pipeline.yaml", "--prefect", *arguments, **env)
        assert code == expected, output
        outputs.append(output)
    assert outputs[0].count("no answer from https://***:***@host") >= 2  # two tries and the end
    code, output = agentrl("run", "pipeline.yaml", "--prefect", "--set", f"stages.d.with.key={key}", **env)
    assert code == 2, output
    outputs += [output, *(agentrl(*item)[1] for item in (("show", "last", "--json"), ("runs", "--json")))]
    database = sqlite3.connect(project.folder / "store" / "prefect" / "prefect.db")
    for told in ("select data from artifact", "select name, message from task_run_state"):  # there to be found
        assert "no answer from https://***:***@host" in str(database.execute(told).fetchall())
    database.close()
    files = {str(path): path.read_bytes() for path in (project.folder / "store").rglob("*") if path.is_file()}
    assert any("prefect.db" in name for name in files)
    assert any(b"printed *** ***" in content for content in files.values())
    for secret in (key, token):
        assert not [output for output in outputs if secret in output]
        assert not [name for name, content in files.items() if secret.encode() in content]


def test_a_stage_in_another_pool_needs_a_server_that_is_there(project: Project) -> None:
    code, output = run(project, PIPELINE.replace("with: {sleep: 0}}", "execution: {pool: gpu}}"))
    assert code == 2
    assert "stages run in work pools: c (gpu)" in output
    code, output = run(project, PIPELINE.replace("with: {sleep: 0}}", "execution: {pool: gpu}}"), "--no-prefect")
    assert code == 0, output
