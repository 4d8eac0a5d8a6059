"""Rows of episodes whose environment failed, or that ended, before the policy said anything: stages that make rows and
pairs of rows leave them out and count them."""

from typing import Any

import pytest
from forked import LIMITS, by_id, harness, model, rollouts, tabular, tasks

from agentrl.environments.base import Episode
from agentrl.environments.rooms.environment import Rooms
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.methods.compress.segment import segment
from agentrl.pipelines.methods.dagger.correct import correct
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.methods.slicing.steps import value
from agentrl.pipelines.stages.trajectories import sample
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Termination

__all__ = ["harness", "model", "rollouts", "tabular", "tasks"]


@pytest.fixture
def failed_at_reset(harness: Harness, model: Model, tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> Trajectories:
    reset, calls = Rooms.reset, []

    async def failing(self: Rooms, task: Task) -> Episode:
        calls.append(task)
        if len(calls) == 10:  # after the openings, which are looked at first
            raise RuntimeError("the house is closed")
        return await reset(self, task)

    monkeypatch.setattr(Rooms, "reset", failing)
    config = {"samples": 4, **LIMITS, "limits": {"retry": {"attempts": 1}}}  # the failure is to stay
    made = harness.run(sample, config, model=model, tasks=tasks)
    monkeypatch.undo()
    assert made.metrics["env_errors"] == 1
    return made["trajectories"]


def test_a_row_whose_environment_failed_at_once_ends_no_stage(
    harness: Harness,
    model: Model,
    failed_at_reset: Trajectories,
) -> None:
    stages: list[tuple[Any, dict[str, Any]]] = [
        (correct, {"mode": "label"}),
        (fork, {"k": 1, **LIMITS}),
        (value, {"k": 1, "where": "all", **LIMITS}),
        (outcome, {}),
        (agentq, {}),
        (segment, {"limit": 64}),
    ]
    for stage, config in stages:
        made = harness.run(stage, config, trajectories=[failed_at_reset], model=model)
        assert made.metrics["no_turns"] == 1, stage.name
    assert harness.run(agentq, trajectories=[failed_at_reset]).metrics["no_turns"] == 1, "without a model too"


def test_a_row_that_ended_before_its_first_turn_gets_no_label(
    harness: Harness,
    model: Model,
    rollouts: Trajectories,
) -> None:
    first, *others = (row.model_copy(update={"trajectory_id": f"again-{row.trajectory_id}"}) for row in rollouts.read())
    opening = [message for message in first.messages if message.role is not Role.ASSISTANT][:1]
    end = opening[0].token_end
    cut = {"input_ids": first.input_ids[:end], "action_mask": [False] * (end or 0), "logprobs": first.logprobs[:end]}
    update = {**cut, "messages": opening, "n_tokens": end, "n_action_tokens": 0, "n_steps": 0, "n_tool_calls": 0}
    ended = {"trajectory_id": "ended", "spans": [], "termination": Termination.TIME_LIMIT, "reward": None}
    given = harness.trajectories([first.model_copy(update={**update, **ended}), *others])
    made = harness.run(correct, {"mode": "label"}, trajectories=[given], model=model)
    assert made.metrics["no_turns"] == 1
    assert {row.parent_id for row in made["trajectories"].read()} == {row.trajectory_id for row in others}


def test_an_environment_that_fails_while_it_is_asked_ends_one_row_alone(
    harness: Harness,
    model: Model,
    rollouts: Trajectories,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reset, calls = Rooms.reset, []

    async def failing(self: Rooms, task: Task) -> Episode:
        calls.append(task)
        if len(calls) == 2:
            raise RuntimeError("the house is closed")
        return await reset(self, task)

    monkeypatch.setattr(Rooms, "reset", failing)
    with pytest.warns(UserWarning, match="the house is closed"):
        made = harness.run(correct, {"mode": "switch"}, trajectories=[rollouts], model=model)
    assert made.metrics["env_error"] == 1
    assert len(made["trajectories"].ids()) == len(by_id(rollouts)) - 1
