"""What tests of stages that continue stored rows share: a tabular policy of ``rooms``, whose values are known exactly,
in the place of the embedded engine, and its rollouts."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tabular import TabularEngine, stumbling

from agentrl.engines.configs import EmbeddedConfig
from agentrl.environments.rooms.environment import Rooms
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import sample
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

ERROR = 0.6
LIMITS: dict[str, Any] = {"sampling": {"max_tokens": 240}}
TRAIN: dict[str, Any] = {"steps": 1, "batch": 4}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("forks"))


@pytest.fixture(autouse=True, scope="module")
def tabular() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedConfig, "build", lambda self, policy: TabularEngine(policy.codec, stumbling(ERROR)))
        yield


@cache
def spoken_to() -> Policy:
    """A policy with a tokenizer that knows the rooms' words; its weights are never asked."""
    tasks = Rooms().tasks({"train": 24}, 0)["train"]
    spoken = [demonstrate(Rooms(), task, 0.3, 0, "t").messages for task in tasks]
    return tiny_policy(spoken, 0, TinySize(context=256))


@pytest.fixture(scope="module")
def model(harness: Harness) -> Model:
    return harness.model(spoken_to().save)


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "rooms", "train": 4, "dev": 0, "heldout": 0})["train"]


@pytest.fixture(scope="module")
def rollouts(harness: Harness, model: Model, tasks: Tasks) -> Trajectories:
    return harness.run(sample, {"samples": 4, **LIMITS}, model=model, tasks=tasks)["trajectories"]


def by_id(*selections: Trajectories) -> dict[str, Trajectory]:
    return {row.trajectory_id: row for selection in selections for row in selection.read()}


def task_of(row: Trajectory) -> Task:
    """As much of a row's task as the name of a state depends on."""
    return Task(task_id=row.task_id, env=row.env, split=row.split, prompt=row.prompt)
