"""The pipeline files of methods: each is planned whole, and runs from end to end at the smallest size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.document import METHODS
from agentrl.pipelines.file.library import resolve
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import Status, make_plan
from agentrl.pipelines.stage import Stage
from benchmarks.smallest import smallest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in METHODS.glob("*/pipeline.yaml"))
SMALLEST = {"train": 24, "dev": 4, "heldout": 4, "steps": 2, "batch": 4, "iterations": 1, "tasks": 2, "samples": 2}

OF_DIFFERENCES = {
    *("agentq", "fork", "ipr", "slicing", "guidance", "splice", "reward_model", "webrl", "copilot", "researcher"),
}
"""Methods that learn from differences of successes and failures; a policy that solves nothing has none."""


@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_method_is_planned_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load(f"methods/{name}"), Catalog(str(tmp_path / "store")), str(tmp_path / "store"))
    assert plan.to_run
    assert len(plan.to_run) == len(plan.steps)


def smallest_method(name: str) -> dict[str, Any]:
    """The file of a method at its smallest."""
    result = smallest(f"methods/{name}", SMALLEST)
    if name in OF_DIFFERENCES:
        for changes in result["stages"].values():
            changes["with"].pop("samples", None)
        result["stages"]["warm"]["with"] |= {"steps": 150, "batch": 16}
    return result


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_a_method_has_its_parts_and_examples_that_are_valid(name: str) -> None:
    page = (METHODS / name / "README.md").read_text()
    assert f"agentrl run methods/{name}" in page
    assert "## Measured effect" in page
    for example in re.findall(r"```yaml\n(.*?)```", page, re.S):
        for stage, entry in yaml.safe_load(example).items():
            if stage == "with":  # of train.online
                resolve("train.online").config.model_validate({"iterations": 1, "tasks": 1, **entry})
                continue
            used = resolve(entry["uses"])
            assert set(entry.get("inputs", {})) <= set(used.inputs), (stage, used.inputs)
            given = {key: {"init": "tiny"} if key == "model" else 1 for key in ("model", "steps") if needs(used, key)}
            used.config.model_validate({**given, **entry.get("with", {})})


def needs(used: Stage, key: str) -> bool:
    return key in used.config.model_fields and used.config.model_fields[key].is_required()


def test_each_method_is_in_the_table() -> None:
    table = (ROOT / "docs/explanations/methods.md").read_text()
    assert [name for name in NAMES if f"pipelines/methods/{name}/README.md" not in table] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_file_of_a_method_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    if name == "self_rewarding":
        pytest.skip(
            "a policy as small as this gives no verdict that can be read; METHODS=self_rewarding runs its stages"
        )
    file, store = tmp_path / "smallest.yaml", str(tmp_path / "store")
    file.write_text(yaml.safe_dump(smallest_method(name)))
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", str(file), "--no-prefect", "--store", store, "--json"]
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
