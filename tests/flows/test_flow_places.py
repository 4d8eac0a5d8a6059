"""A whole pipeline, from tasks to a report, where names of folders, files and modules are as awkward as they get."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = str(Path(__file__).parents[2])

WHOLE = """
name: whole
execution: {env: {OMP_NUM_THREADS: "1"}}
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 16, dev: 4, heldout: 4}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {coverage: 1.0, noise: 0.5}}
  kept: {uses: trajectories.reject, inputs: {trajectories: expert}, with: {keep: 1}}
  warm: {uses: train.sft, inputs: {trajectories: kept}, with: {model: {init: tiny}, steps: 2, batch: 4}}
  sampled: {uses: trajectories.sample, inputs: {model: warm, tasks: tasks.dev}, with: {samples: 1}}
  eval: {uses: evaluate.policy, inputs: {model: warm, tasks: tasks.heldout}}
  report: {uses: report.training, inputs: {evaluations: [eval], metrics: [warm.metrics], examples: [eval]}}
"""

NAME = "-a b ü 🦊 \"q\" 's' [x]{y}(z) %20 %(h)s #h ?q=1&r $HOME `id` *;,\\ @~"


@pytest.mark.parametrize("engine", ["--no-prefect", "--prefect"])
def test_a_whole_pipeline_runs_in_a_folder_of_any_name_among_modules_named_as_ours(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    for name in ("schemas", "flows", "pipelines", "agentrl", "datastore"):
        (folder / f"{name}.py").write_text("raise RuntimeError('this is not ours')\n")
    (folder / f"{NAME}.yaml").write_text(WHOLE)

    def agentrl(*arguments: str) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        command = [
            sys.executable,
            "-P",
            "-m",
            "agentrl.flows.cli",
            *arguments,
            f"--store={NAME}",
        ]  # -P: as the script does
        done = subprocess.run(
            command,
            cwd=folder,
            env={**env, "PYTHONPATH": ROOT},
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    record = json.loads(agentrl("run", engine, "--json", f"./{NAME}.yaml"))
    assert {name: stage["status"] for name, stage in record["stages"].items()} == dict.fromkeys(
        ("tasks", "expert", "kept", "warm", "sampled", "eval", "report"), "ran"
    )
    assert "everything is up to date, 7 stages cached" in agentrl("run", engine, f"./{NAME}.yaml")
    assert list((folder / NAME / "artifacts/report").rglob("*.html"))
    [row] = json.loads(agentrl("buffer", "query", "select count(*) as n from trajectories", "--json"))
    assert row["n"] >= 16
    assert "sound" in agentrl("buffer", "check")
    database = folder / NAME / "prefect/prefect.db"
    assert database.is_file() == (engine == "--prefect")
    if database.is_file():
        monkeypatch.chdir(database.parent)
        count = sqlite3.connect("prefect.db").execute("select count(*) from task_run where state_type = 'COMPLETED'")
        assert count.fetchone() == (7,)
    assert {path.name for path in tmp_path.iterdir()} == {NAME}  # nothing went to a folder of a mangled name
