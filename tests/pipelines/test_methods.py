"""The pipeline files of methods: each is planned whole, and runs from end to end at the smallest size."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from datastore.catalog import Catalog
from pipelines.document import LIBRARY
from pipelines.load import load
from pipelines.plan import Status, make_plan

ROOT = Path(__file__).parents[2]
METHODS = sorted(path.stem for path in (LIBRARY / "methods").glob("*.yaml"))
SMALLEST = {"train": 24, "dev": 4, "heldout": 4, "steps": 2, "batch": 4, "iterations": 1, "tasks": 2, "samples": 2}

OF_DIFFERENCES = {"agentq", "ipr", "slicing"}
"""Methods that learn from differences in value, of which a policy that solves nothing has none."""


@pytest.mark.parametrize("name", METHODS)
def test_the_file_of_a_method_is_planned_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load(f"methods/{name}"), Catalog(str(tmp_path / "store")), str(tmp_path / "store"))
    assert plan.to_run
    assert len(plan.to_run) == len(plan.steps)


def smallest(name: str) -> dict[str, Any]:
    """A file that extends that of a method, and makes it as small as it can be. After two steps of training nothing is
    solved, so what trains on own successes is given the expert's demonstrations too."""
    stages: dict[str, Any] = {}
    for stage, spec in yaml.safe_load((LIBRARY / "methods" / f"{name}.yaml").read_text())["stages"].items():
        given, inputs = spec.get("with", {}), spec.get("inputs", {})
        small = {key: min(value, given[key]) for key, value in SMALLEST.items() if isinstance(given.get(key), int)}
        if name in OF_DIFFERENCES:
            small.pop("samples", None)
            small |= {"steps": 150, "batch": 16} if stage == "warm" else {}
        changes: dict[str, Any] = {"with": small} if small else {}
        if spec.get("uses") == "train.sft" and "model" in inputs:
            own = inputs["trajectories"]
            both = dict.fromkeys([*([own] if isinstance(own, str) else own), "expert"])
            changes["inputs"] = {"trajectories": list(both)}
        if changes:
            stages[stage] = changes
    return {"name": f"smallest-{name}", "extends": f"methods/{name}", "stages": stages}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_file_of_a_method_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    file, store = tmp_path / "smallest.yaml", str(tmp_path / "store")
    file.write_text(yaml.safe_dump(smallest(name)))
    command = [sys.executable, "-m", "flows.cli", "run", str(file), "--no-prefect", "--store", store, "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    pipeline = load(str(file))
    stages = json.loads(done.stdout)["stages"]
    assert set(stages) == set(pipeline.nodes)
    for stage, node in pipeline.nodes.items():
        if node.stage.name == "evaluate.policy":
            assert stages[stage]["metrics"]["split"] == "heldout"
    plan = make_plan(pipeline, Catalog(store), store)
    assert all(step.status is Status.CACHED for step in plan.steps.values())
