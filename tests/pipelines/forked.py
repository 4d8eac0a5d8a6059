"""What tests of stages that continue stored rows share: a tabular policy of ``rooms``, whose values are known exactly,
in the place of the embedded engine, and its rollouts."""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from tabular import TabularEngine, stumbling

from agentrl.engines.configs import EmbeddedConfig
from agentrl.environments.rooms.environment import Rooms
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stage import Context
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import sample
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.in_flight import Flow
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


class Killed(BaseException):
    pass


class Resumed(NamedTuple):
    """What a run that was killed had ``under_way``, all rows that were there ``before`` it went on, what it ``sampled``
    then, and its ``result``."""

    under_way: set[str]
    before: set[str]
    sampled: list[str]
    result: Any


def killed_and_resumed(
    context: Context, config: Any, engine: type[Any], calls: int, patch: pytest.MonkeyPatch, **inputs: Any
) -> Resumed:
    """Online training that is killed when its ``engine`` is asked for a turn once more than ``calls`` times, and goes
    on."""
    turns, turn = itertools.count(), engine.turn

    async def dying(self: Any, *given: Any, **named: Any) -> Any:
        if next(turns) == calls:
            raise Killed
        return await turn(self, *given, **named)

    patch.setattr(engine, "turn", dying)
    with pytest.raises(Killed):
        online(context, config, **inputs)
    patch.setattr(engine, "turn", turn)
    under_way = {path.stem for path in (context.scratch / "under_way").glob("*.arrow")}
    before, sampled, add = {*context.row_ids(), *under_way}, list[str](), Flow.add

    async def counted(self: Any, jobs: Any, made: Any = {}) -> None:  # noqa: B006
        sampled.extend(job.name for job in jobs if job.name not in made)
        await add(self, jobs, made)

    patch.setattr(Flow, "add", counted)
    return Resumed(under_way, before, sampled, online(context, config, **inputs))
