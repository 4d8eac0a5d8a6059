"""Every pipeline file of the library can be planned, and those of task families run from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.environments import load_environment
from agentrl.pipelines.file.document import LIBRARY
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import Status, make_plan
from agentrl.pipelines.stages.tasks import GenerateConfig
from benchmarks.smallest import smallest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in LIBRARY.glob("*.yaml"))
FAMILIES = sorted(set(NAMES) - {"chats", "quickstart"})


def test_every_policy_is_measured_with_the_control_for_sharpening() -> None:
    """A library's file that has dev tasks gives them to each evaluation on held-out tasks of the same stage."""
    files = [*LIBRARY.rglob("*.yaml"), *(ROOT / "pipelines/methods").glob("*/pipeline.yaml")]
    stages = {path: yaml.safe_load(path.read_text()).get("stages") or {} for path in files}
    evaluations = [
        (f"{path.parent.name}/{path.stem} {name}", stage["inputs"])
        for path, of_file in stages.items()
        for name, stage in of_file.items()
        if stage.get("uses") == "evaluate.policy" and stage.get("inputs", {}).get("tasks") == "tasks.heldout"
        if of_file.get("tasks", {}).get("with", {}).get("dev") != 0
    ]
    assert len(evaluations) > 70
    assert [where for where, inputs in evaluations if inputs.get("dev") != "tasks.dev"] == []


@pytest.mark.parametrize("path", sorted((LIBRARY / "real").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_family_has_the_tasks_that_a_file_for_a_real_model_asks_for(path: Path) -> None:
    """With the seeds of `make bench-real`: a model of half a GB is loaded only after that."""
    config = GenerateConfig.model_validate(yaml.safe_load(path.read_text())["stages"]["tasks"]["with"])
    sizes = {"train": config.train, "dev": config.dev, "heldout": config.heldout}
    environment = load_environment(str(config.env))
    for seed in (0, 1, 2, 10):
        tasks = environment.tasks(sizes, seed)
        assert {split: len(rows) for split, rows in tasks.items()} == sizes


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_the_library_is_planned_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats").mkdir()  # what `chats` imports
    (tmp_path / "chats" / "one.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    plan = make_plan(load(name), Catalog(str(tmp_path / "store")), str(tmp_path / "store"))
    assert len(plan.to_run) == len(plan.steps) == len(yaml.safe_load((LIBRARY / f"{name}.yaml").read_text())["stages"])


def test_each_family_has_a_file_with_every_stage() -> None:
    for name in ("rooms", "search_qa", "math", "shop", "code", "service", "office", "research"):
        stages = yaml.safe_load((LIBRARY / f"{name}.yaml").read_text())["stages"]
        used = {stage["uses"] for stage in stages.values()}
        assert stages["tasks"]["with"]["env"]["type"] == name
        assert used >= {"trajectories.synthesize", "train.sft", "trajectories.reject", "train.grpo", "evaluate.policy"}
        evaluated = [stage["inputs"]["tasks"] for stage in stages.values() if stage["uses"] == "evaluate.policy"]
        assert set(evaluated) == {"tasks.heldout"}, "results are reported on held-out tasks alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_of_a_family_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    file, store = tmp_path / "smallest.yaml", str(tmp_path / "store")
    file.write_text(yaml.safe_dump(smallest(name)))
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", str(file), "--no-prefect", "--store", store, "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads(done.stdout)["stages"]
    pipeline = load(str(file))
    assert set(stages) == set(pipeline.nodes)
    for stage, node in pipeline.nodes.items():
        if node.stage.name == "evaluate.policy":
            measured = stages[stage]["metrics"]
            assert 0 <= measured["success_low"] <= measured["success"] <= measured["success_high"] <= 1
            assert measured["split"] == "heldout"
    [rows] = TrajectoryBuffer(store).sql("select count(*) from trajectories where stage = 'grpo'").rows()
    assert rows == (4,), "two rollouts of two tasks"
    plan = make_plan(pipeline, Catalog(store), store)
    assert all(step.status is Status.CACHED for step in plan.steps.values())
