"""The command line without Prefect: what is printed, exit codes, that nothing is written on bad input."""

import contextlib
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from toy_project import Project

from agentrl.flows import cli

PIPELINE = """
    name: toy
    stages:
      a: {uses: "toy:numbers", with: {n: 5}}
      b: {uses: "toy:add", inputs: {tables: a}}
      c: {uses: "toy:trouble", inputs: {table: b.sums}, with: {sleep: 0}}
"""


def agentrl(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agentrl.flows.cli", *arguments]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": root, **options.pop("env", {})}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False, **options)


def here(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command in this process, which has imported what it needs."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.call(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def ask(*arguments: str) -> str:
    """What a command that runs no stage prints."""
    done = here(*arguments)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def run(project: Project, *arguments: str, text: str = PIPELINE) -> "subprocess.CompletedProcess[str]":
    project.write(text)
    return here("run", "pipeline.yaml", "--no-prefect", *arguments)


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "pipeline.yaml", "--no-prefect", *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_help_answers_at_once() -> None:
    """How fast is measured in benchmarks/pipelines.py; here: that nothing heavy is imported."""
    done = agentrl("--help")
    assert done.returncode == 0
    for command in (
        "run",
        "plan",
        "validate",
        "status",
        "runs",
        "show",
        "diff",
        "lineage",
        "gc",
        "tag",
        "schedule",
        "buffer",
    ):
        assert command in done.stdout
    code = (
        "import sys, agentrl.flows.cli\n"
        "heavy = {'torch', 'prefect', 'transformers', 'deltalake', 'polars', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_run_then_nothing_to_do(project: Project) -> None:
    project.write(PIPELINE)
    first = agentrl("run", "pipeline.yaml", "--no-prefect")
    assert first.returncode == 0, first.stderr
    assert "3 stages ran, 0 were cached" in first.stdout
    code = (
        "import sys, agentrl.flows.cli; sys.argv = ['agentrl', 'run', 'pipeline.yaml']\n"
        "try: agentrl.flows.cli.main()\n"
        "except SystemExit as error: assert not error.code, error.code\n"
        "assert not {'torch', 'prefect', 'transformers', 'deltalake', 'polars'} & set(sys.modules)"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "toy: everything is up to date, 3 stages cached" in again.stdout


def test_what_a_stage_warns_of_is_in_the_output_of_the_run(project: Project) -> None:
    """A worker runs both stages; each says its own warning, also if the texts are equal."""
    text = PIPELINE + '      d: {uses: "toy:trouble", inputs: {table: c}, with: {warning: "most ended by a limit"}}'
    setting = ("--set", "stages.c.with.warning=most ended by a limit")
    done = run(project, *setting, text=text)
    for stage in "cd":
        assert f"warning: {stage}: most ended by a limit" in done.stdout
    shown = ask("show", "c")
    assert "warning: most ended by a limit" in shown
    again = run(project, "--json", "--only", "c", "--force", *setting, text=text)
    assert json.loads(again.stdout)["stages"]["c"]["warnings"] == ["most ended by a limit"]


def test_a_failure_names_stage_cause_log_cached_and_the_command(project: Project) -> None:
    done = run(project, "--set", "stages.c.with.error=no luck today")
    assert done.returncode == 1
    for part in (
        "stage c failed: ValueError: no luck today",
        "cached    a, b",
        "left      c",
        "go on     agentrl run pipeline.yaml --set 'stages.c.with.error=no luck today'",
    ):
        assert part in done.stdout
    log = Path(done.stdout.partition("log       ")[2].splitlines()[0])
    assert "Traceback" in log.read_text()
    again = run(project, "--set", "stages.c.with.error=''")
    assert "1 stages ran, 2 were cached" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.yaml"], "there is no pipeline file nowhere.yaml"),
        (["run", "pipeline.yaml", "--only", "bb"], "--only: there is no stage 'bb'; did you mean 'b'?"),
        (["run", "pipeline.yaml", "--set", "stages.a.with.n=x"], "stages.a.with.n: Input should be a valid integer"),
        (["run", "pipeline.yaml", "--profile", "big"], "there is no such profile; profiles: none"),
        (
            ["run", "pipeline.yaml", "--only", "c"],
            "stage c is blocked: input b is not cached (never ran); make it",
        ),
        (["show", "last"], "there is no run 'last'; the newest: there are no runs in this store"),
        (["lineage", "x"], "there is no artifact or tag 'x'"),
        (["schema", "train.stf"], "did you mean 'train.sft'"),
        (["schedule", "pipeline.yaml"], 'say when, e.g. --cron "0 2 * * *"'),
        (["schedule", "list"], "schedules need a Prefect server"),
        (["run", "pipeline.yaml", "--nonsense"], "No such option"),
    ],
)
def test_bad_input_is_code_2_and_writes_nothing(project: Project, arguments: list[str], message: str) -> None:
    project.write(PIPELINE)
    before = sorted(path for path in project.folder.rglob("*") if "__pycache__" not in str(path))
    done = agentrl(*arguments, env={"PREFECT_HOME": str(project.folder / "none")})
    assert done.returncode == 2
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path for path in project.folder.rglob("*") if "__pycache__" not in str(path)) == before


def test_json_everywhere(project: Project) -> None:
    project.write(PIPELINE)
    assert json.loads(ask("validate", "pipeline.yaml", "--json"))["stages"] == ["a", "b", "c"]
    bad = here("validate", "pipeline.yaml", "--json", "--set", "stages.a.with.n=x")
    assert bad.returncode == 2
    [problem] = json.loads(bad.stdout)["problems"]
    assert problem["key"] == "stages.a.with.n"
    record = json.loads(run(project, "--json").stdout)
    assert record["state"] == "completed"
    assert {name: stage["status"] for name, stage in record["stages"].items()} == dict.fromkeys("abc", "ran")
    assert json.loads(run(project, "--json").stdout)["state"] == "up to date"
    assert json.loads(ask("plan", "pipeline.yaml", "--json"))["counts"]["cached"] == 3
    assert json.loads(ask("status", "pipeline.yaml", "--json"))["runs"][0]["state"] == "completed"
    assert json.loads(ask("runs", "--json"))[0]["stages"] == {"ran": 3}
    assert json.loads(ask("show", "last", "--json"))["run_id"] == record["run_id"]
    assert json.loads(ask("show", "b", "--json"))["metrics"] == {"total": 10.0}
    assert json.loads(ask("lineage", "c", "--json"))["inputs"][0]["stage"] == "b"
    assert json.loads(ask("schema", "pipeline"))["title"] == "PipelineSpec"


@pytest.mark.slow
def test_prefect_runs_only_where_something_needs_it(project: Project) -> None:
    """It is not even imported if nothing does; what runs the stages is in the plan, the output and the record."""
    project.write(PIPELINE)
    code = (
        "import sys, agentrl.flows.cli; sys.argv = ['agentrl', 'run', 'pipeline.yaml', '--jobs', '2']\n"
        "try: agentrl.flows.cli.main()\n"
        "except SystemExit as error: assert not error.code, error.code\n"
        "assert 'prefect' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 stages to run, 0 cached; without Prefect (no stage needs it)" in done.stdout
    record = json.loads(agentrl("show", "last", "--json").stdout)
    assert (record["engine"], record["state"]) == ("none", "completed")
    needy = PIPELINE.replace("with: {sleep: 0}}", "with: {sleep: 0.1}, execution: {retries: 2, timeout_s: 9}}")
    project.write(needy)
    assert "a run starts Prefect (c: retries, timeout_s)" in agentrl("plan", "pipeline.yaml").stdout
    assert json.loads(agentrl("plan", "pipeline.yaml", "--json").stdout)["engine"] == "prefect"
    without = run(project, text=needy)
    assert without.returncode == 0
    assert "--no-prefect: what stages ask of Prefect does not apply (c: retries, timeout_s)" in without.stdout
    assert "without Prefect (--no-prefect)" in without.stdout


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_that_waits_for_another_says_for_whom(project: Project) -> None:
    project.write(PIPELINE)
    slow = start("--set", "stages.c.with.sleep=60")
    assert slow.stdout
    while "c: started" not in slow.stdout.readline():
        pass
    waits = start("--set", "stages.c.with.sleep=60")
    assert waits.stdout
    lines = [""]
    while "waits for run" not in lines[-1] and waits.poll() is None:
        lines.append(waits.stdout.readline().rstrip())
    for process in (waits, slow):
        process.terminate()
        process.communicate(timeout=60)
    assert f"(host {socket.gethostname()}, pid {slow.pid}), at work since" in lines[-1], lines
    assert lines[-1].endswith(f"or end it there: kill {slow.pid}")


def test_a_stage_with_two_inputs_waits_for_both_and_others_run_beside_it(project: Project) -> None:
    text = """
        name: toy
        stages:
          a: {uses: "toy:numbers"}
          x: {uses: "toy:trouble", inputs: {table: a}, matrix: {sleep: [1.5, 1.55]}}
          s: {uses: "toy:add", inputs: {tables: x}}
    """
    assert run(project, "--jobs", "2", text=text).returncode == 0
    stages = json.loads(ask("show", "last", "--json"))["stages"]
    began = {name: datetime.fromisoformat(stage["started_at"]).timestamp() for name, stage in stages.items()}
    assert abs(began["x-1.5"] - began["x-1.55"]) < 1.0
    assert began["s"] >= max(began["x-1.5"] + stages["x-1.5"]["duration_s"], began["x-1.55"] + 1.55)


def test_diff_names_config_inputs_metrics_and_rows(project: Project) -> None:
    first = json.loads(run(project, "--json").stdout)
    second = json.loads(run(project, "--json", "--set", "stages.a.with.n=7").stdout)
    printed = json.loads(ask("diff", first["run_id"], second["run_id"], "--json"))["stages"]
    assert printed["a"] == {"ingredients": ["config n: 5 -> 7"], "metrics": {}, "rows": {"table": [5, 7]}}
    assert printed["b"]["ingredients"] == ["input a changed"]
    assert printed["b"]["metrics"] == {"total": [10.0, 21.0]}
    shown = ask("diff", first["run_id"], second["run_id"])
    assert "rows table: 5 -> 7" in shown
    assert "metrics total: 10 -> 21" in shown


def test_lineage_as_tree_and_mermaid(project: Project) -> None:
    run(project)
    tree = ask("lineage", "c").splitlines()
    assert tree[0].startswith("c/")
    assert "table = b/" in tree[1]
    assert "tables = a/" in tree[2]
    mermaid = ask("lineage", "c", "--mermaid")
    assert mermaid.startswith("flowchart LR")
    assert mermaid.count("-->|") == 2


@pytest.mark.slow
def test_gc_keeps_runs_tags_and_lineage_and_never_rows(project: Project) -> None:
    for n in (1, 2, 3):
        assert run(project, "--set", f"stages.a.with.n={n}").returncode == 0
    prints = [stage["fingerprint"] for stage in _runs_of(project, "b")]
    assert agentrl("tag", f"b/{prints[2][:10]}", "first-b").returncode == 0
    dry = json.loads(agentrl("gc", "--keep-runs", "1", "--dry-run", "--json").stdout)
    assert sorted(item["stage"] for item in dry["artifacts"]) == ["a", "b", "c", "c"]
    assert len(list(project.catalog.all())) == 9
    agentrl("gc", "--keep-runs", "1")
    left = {(manifest.ingredients.stage, manifest.fingerprint) for manifest in project.catalog.all()}
    assert len(left) == 5
    assert ("b", prints[2]) in left
    assert project.catalog.tags() == {"first-b": ("b", prints[2])}
    assert "everything is up to date" in run(project, "--set", "stages.a.with.n=3").stdout


def _runs_of(project: Project, stage: str) -> list[dict[str, Any]]:
    return [run["stages"][stage] for run in json.loads(json.dumps(project.catalog.runs(), default=str))][::-1]


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(project: Project) -> None:
    project.write(PIPELINE)
    process = start("--set", "stages.c.with.sleep=30")
    assert process.stdout
    while "c: started" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=15)[0]
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "cached    a, b" in output
    assert "go on     agentrl run pipeline.yaml --set stages.c.with.sleep=30" in output
    assert json.loads(ask("show", "last", "--json"))["state"] == "cancelled"
    assert sorted(path.name for path in (project.folder / "store" / "artifacts").iterdir()) == ["a", "b"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_forced_run_that_ended_early_goes_on_with_the_forced_stages_that_are_left(project: Project) -> None:
    run(project)
    failing = PIPELINE.replace("sleep: 0", "error: no luck")
    done = run(project, "--force", "--from", "b", text=failing)
    assert "cached    a, b" in done.stdout
    assert "go on     agentrl run pipeline.yaml --only c --force" in done.stdout
    assert json.loads(ask("show", "last", "--json"))["command"].endswith("--from b --force")
    done = run(project, "--force", "--only", "c", text=failing)
    assert "go on     agentrl run pipeline.yaml --only c --force" in done.stdout


def test_a_killed_run_is_called_killed(project: Project) -> None:
    project.write(PIPELINE)
    process = start("--set", "stages.c.with.sleep=30")
    assert process.stdout
    while "c: started" not in process.stdout.readline():
        assert process.poll() is None
    while not list((project.folder / "store/artifacts").glob("c/*/*")):  # the stage's own process has to start
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(0.5)
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    psutil.wait_procs(started, timeout=60)  # its guard ends them, and only then is the attempt nobody's
    record = json.loads(ask("show", "last", "--json"))
    assert record["state"] == "killed"
    assert record["stages"]["c"]["status"] == "killed"
    freed = json.loads(ask("gc", "--keep-runs", "0", "--json"))
    assert len(freed["artifacts"]) == 2
    assert [attempt.split("/")[1] for attempt in freed["attempts"]] == ["c"]
    assert [Path(folder).parts[-3:-1] for folder in freed["folders"]] == [("scratch", "c")]
    assert not list((project.folder / "store" / "artifacts").glob("*/*/*"))


def test_a_store_of_a_newer_agentrl_is_refused_before_anything_runs(project: Project) -> None:
    from deltalake import DeltaTable

    from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

    folder = str(project.folder / "store" / "trajectories")
    DeltaTable.create(
        folder, TRAJECTORY_SCHEMA, configuration={"agentrl.schema_version": "99"}, raise_if_key_not_exists=False
    )
    done = run(project)
    assert done.returncode == 2
    assert "schema_version 99" in done.stderr
    assert not (project.folder / "store" / "runs").exists()


def test_a_damaged_manifest_is_one_line_of_warning(project: Project) -> None:
    assert run(project).returncode == 0
    [manifest] = (project.folder / "store" / "artifacts" / "b").glob("*/manifest.json")
    manifest.write_text(manifest.read_text()[:100])
    done = agentrl("plan", "pipeline.yaml")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: ")
    assert "corrupt" in done.stderr
    assert "1 stages ran, 2 were cached" in run(project).stdout


@pytest.mark.parametrize("limit", [0, 1500])
def test_a_full_disk_ends_the_run_with_one_line_and_code_1(project: Project, limit: int) -> None:
    """Files may not grow beyond ``limit`` bytes: not even the record fits, or the record does and artifacts do not."""
    project.write(PIPELINE)
    command = [
        sys.executable,
        "-m",
        "agentrl.flows.cli",
        "run",
        "pipeline.yaml",
        "--no-prefect",
        "--set",
        "stages.a.with.n=9000",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    full = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))  # noqa: E731
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, preexec_fn=full, timeout=120)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stdout + done.stderr
    assert "File too large" in done.stdout + done.stderr
