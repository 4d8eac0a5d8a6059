"""kill -9 in every stage of the quickstart, at its smallest sizes: what is resumed equals an undisturbed run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TINY = """
name: tiny
extends: quickstart
stages:
  tasks: {with: {env: {type: words, unknown: 0}, train: 32, dev: 8, heldout: 16, compositional: 8}}
  warm: {with: {steps: 70, batch: 16}}
  sample: {with: {samples: 4}}
  perfect: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {coverage: 1.0, noise: 0.0}}
  star: {inputs: {trajectories: [reject, perfect]}, with: {steps: 4, batch: 8}}
  sampled: {uses: trajectories.sample, inputs: {model: star, tasks: tasks.train}, with: {samples: 4}}
  pairs: {uses: pairs.agentq, inputs: {trajectories: sampled}}
  dpo: {uses: train.dpo, inputs: {pairs: pairs, model: star}, with: {steps: 4, batch: 4, optimizer: {lr: 1.0e-4}}}
  grpo: {inputs: {model: dpo}, with: {iterations: 6, tasks: 4, samples: 4, checkpoint_every: 2}}
"""


def agentrl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.flows.cli", *arguments]


ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def contents(store: str) -> dict[str, dict[str, str]]:
    """Digests of every output of the newest artifact of each stage."""
    from agentrl.datastore.artifacts.catalog import Catalog

    newest: dict[str, dict[str, str]] = {}
    for manifest in Catalog(store).all():
        digests = {name: output.digest for name, output in manifest.outputs.items()}
        newest.setdefault(manifest.ingredients.stage, digests)
    return newest


def rows(store: str) -> list[tuple[Any, ...]]:
    from agentrl.datastore.buffer import TrajectoryBuffer

    query = "select stage, count(*) as n, count(distinct trajectory_id) as ids from trajectories group by stage"
    return sorted(TrajectoryBuffer(store).sql(query).rows())


def test_kill_9_in_each_stage_then_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    plain = agentrl("run", "tiny.yaml", "--no-prefect", "--store", "plain")
    subprocess.run(plain, env=ENV, check=True, stdout=subprocess.DEVNULL, timeout=400)
    stages = list(json.loads(subprocess.check_output(agentrl("validate", "tiny.yaml", "--json"), env=ENV))["stages"])
    killed: list[str] = []
    for number in range(len(stages) + 1):
        process = subprocess.Popen(
            agentrl("run", "tiny.yaml", "--no-prefect", "--store", "killed"), env=ENV, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        for line in process.stdout:
            started = line.strip().endswith(": started")
            if started and (stage := line.split()[-2].rstrip(":")) not in killed:
                time.sleep(0.05 + 0.37 * (number % 5))  # at the start of one, in the midst of another
                process.kill()
                killed.append(stage)
        process.wait()
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert len(killed) >= len(stages) - 2, killed  # a stage may end before it is killed
    assert contents("killed") == contents("plain")
    assert rows("killed") == rows("plain")
    assert all(n == ids for _, n, ids in rows("killed"))


def test_two_fresh_stores_hold_equal_content_and_only_dpo_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    for store in ("one", "two"):
        command = agentrl("run", "tiny.yaml", "--no-prefect", "--store", store)
        subprocess.run(command, env=ENV, check=True, stdout=subprocess.DEVNULL, timeout=400)
    assert contents("one") == contents("two")
    again = agentrl("run", "tiny.yaml", "--no-prefect", "--store", "one", "--only", "dpo", "--json")
    record = json.loads(subprocess.check_output([*again, "--set", "stages.dpo.with.beta=0.3"], env=ENV, timeout=200))
    assert [name for name, stage in record["stages"].items() if stage["status"] == "ran"] == ["dpo"]
    assert record["stages"]["dpo"]["reasons"] == ["config beta: 0.1 -> 0.3"]
