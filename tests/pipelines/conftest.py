import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_classes import forget

from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import synthesize


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = before
    forget()


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    """Of the module's own store, ``harness``."""
    return harness.run(generate, {"env": "lookup", "train": 6, "dev": 1, "heldout": 1})["train"]


@pytest.fixture(scope="module")
def warm(harness: Harness, tasks: Tasks) -> Model:
    """It has learnt two ways to act in each task, so that the rollouts of a group differ in reward."""
    shown = [harness.run(synthesize, {"noise": noise}, tasks=tasks)["trajectories"] for noise in (0.0, 1.0)]
    config = {"model": {"init": "tiny"}, "steps": 40, "batch": 6, "optimizer": {"lr": 5e-3, "warmup": 10}}
    return harness.run(sft, config, trajectories=shown)["model"]
