"""The example of one's own stage works as docs/how-to/own-stage.md shows it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toy_project import Project

from agentrl.pipelines.harness import Harness

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_stage"


@pytest.mark.slow
@pytest.mark.ci
def test_the_example_runs_and_its_own_tests_pass(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "example")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    pytest_run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_stages.py"]
    done = subprocess.run(pytest_run, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    env["PYTHONPATH"] = str(ROOT)  # the pipeline file's folder is found without help
    run = [sys.executable, "-m", "agentrl.flows.cli", "run", "pipeline.yaml", "--no-prefect", "--json"]
    done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stage = json.loads(done.stdout)["stages"]["score"]
    assert stage["rows"]["kept"] == stage["metrics"]["kept"] > 0
    assert stage["rows"]["scores"] == 64


def test_what_the_docs_show_is_what_is_there() -> None:
    text = (ROOT / "docs/how-to/own-stage.md").read_text()
    for file in ("my_project/stages.py", "pipeline.yaml", "test_stages.py"):
        assert (EXAMPLE / file).read_text().strip() in text, f"docs/how-to/own-stage.md shows another {file}"


def test_the_harness_checks_inputs(project: Project, tmp_path: Path) -> None:
    project.load('name: p\nstages: {a: {uses: "toy:numbers"}}')
    stages = sys.modules[f"{project.package}.stages"]
    harness = Harness(tmp_path / "harness")
    with pytest.raises(TypeError, match="needs input 'table'"):
        harness.run(stages.trouble)
    with pytest.raises(TypeError, match="takes table, not tasks"):
        harness.run(stages.trouble, table=harness.tasks([]))
    result = harness.run(stages.trouble, table=harness.run(stages.numbers, {"n": 2})["table"])
    assert result["table"].table()["x"].to_pylist() == [0.0, 1.0]
