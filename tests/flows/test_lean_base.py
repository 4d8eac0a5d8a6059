"""What works without the extras: prefect, fastapi, sqlalchemy and matplotlib cannot be imported here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_project import Project

from agentrl.schemas import installation
from agentrl.schemas.installation import install_hint

ROOT = Path(__file__).parents[2]

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"prefect", "fastapi", "sqlalchemy", "matplotlib", "uvicorn"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""

IMPORT_ALL = """
import importlib, pkgutil
ELSEWHERE = {f"agentrl.environments.adapters.{name}_holder" for name in ("openenv", "verifiers")}  # other interpreters
ELSEWHERE |= {"agentrl.recorder.connections"}  # of servers: the extra serve
ELSEWHERE |= {"agentrl.datastore.shards.prefect_flow"}  # of workers of a pool: the extra prefect
import agentrl
for info in pkgutil.walk_packages(agentrl.__path__, "agentrl."):
    if info.name not in ELSEWHERE and not info.name.startswith("agentrl.flows"):
        importlib.import_module(info.name)
        print(info.name)
"""

PIPELINE = """
    name: lean
    stages:
      tasks: {uses: tasks.generate, with: {env: lookup, train: 8, dev: 2, heldout: 2}}
      expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
"""


@pytest.fixture
def env(project: Project) -> dict[str, str]:
    (project.folder / "block").mkdir()
    (project.folder / "block" / "sitecustomize.py").write_text(BLOCK)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return {**plain, "PYTHONPATH": os.pathsep.join([str(project.folder / "block"), str(ROOT)])}


def agentrl(env: dict[str, str], *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "agentrl.flows.cli", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_a_pipeline_and_the_buffer_work(project: Project, env: dict[str, str]) -> None:
    project.write(PIPELINE)
    code, output = agentrl(env, "run", "pipeline.yaml")
    assert code == 0, output
    assert "2 stages ran" in output
    code, output = agentrl(env, "buffer", "query", "select count(*) as n from trajectories", "--json")
    assert code == 0, output
    assert json.loads(output)[0]["n"] > 0
    assert agentrl(env, "buffer", "stats")[0] == 0


def test_what_needs_an_extra_says_which_before_anything_runs(project: Project, env: dict[str, str]) -> None:
    project.write(PIPELINE)
    hint = f"pip install -c {ROOT}/constraints.txt -e '{ROOT}[prefect]'"
    code, output = agentrl(env, "run", "pipeline.yaml", "--prefect")
    assert code == 2
    assert f"prefect is not installed: {hint} (or run with --no-prefect" in output
    code, output = agentrl({**env, "PREFECT_API_URL": "http://127.0.0.1:9/api"}, "schedule", "list")
    assert code == 2
    assert hint in output
    code, output = agentrl(env, "run", "quickstart")
    assert code == 2
    assert "stage report: matplotlib is not installed: pip install" in output
    assert "[report]" in output
    assert not (project.folder / "store").exists()


@pytest.mark.slow
@pytest.mark.ci
def test_every_module_of_learning_and_data_is_imported(env: dict[str, str]) -> None:
    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "agentrl.training" in done.stdout


def test_hints_name_the_distribution_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert install_hint("report") == "pip install -c constraints.txt -e '.[report]'"
    monkeypatch.setattr(installation, "PACKAGE_ROOT", tmp_path)
    assert install_hint("report") == "pip install 'agentrl-engine[report]'"
