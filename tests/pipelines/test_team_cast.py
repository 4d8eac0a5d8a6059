"""Demonstrations for a team, and a team that is trained from them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.environments.conversation import AskedOnce
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.team.cast import cast
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.rollouts.team import SOURCE

TINY = {"init": "tiny", "size": {"layers": 1, "width": 64, "context": 192}}


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


@pytest.fixture
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": {"type": "rooms", "size": 6}, "train": 8, "dev": 0, "heldout": 0})["train"]


@pytest.fixture
def shown(harness: Harness, tasks: Tasks) -> Trajectories:
    return harness.run(synthesize, {"noise": 0.3}, tasks=tasks)["trajectories"]


def test_the_speaker_says_what_the_row_did_and_the_actor_is_told(harness: Harness, shown: Trajectories) -> None:
    made = harness.run(cast, {}, trajectories=[shown])
    walks, rows = shown.read(), made["trajectories"].read()
    walked = [walk for walk in walks if walk.n_tool_calls]
    assert made.metrics["episodes"] == len(walked) > 0
    assert made.metrics["nothing_to_say"] == len(walks) - len(walked)
    for walk, plan, told in zip(walked, rows[::2], rows[1::2], strict=True):
        doors = [call.arguments for message in walk.messages for call in message.tool_calls]
        word = plan.messages[-1].content
        assert [f'{{"door": "{door}"}}' for door in word.split()] == doors
        opening = asyncio.run(AskedOnce(SOURCE, more="plan?").reset(task_of(walk))).opening
        assert plan.messages[0].content == opening[0].content, "as in rollouts"
        assert told.messages[0].content == f"{walk.messages[0].content} planner: {word}"
        assert [message.content for message in told.messages[1:]] == [message.content for message in walk.messages[1:]]
        assert [(row.agent, row.segment, row.parent_id) for row in (plan, told)] == [
            ("planner", 0, walk.trajectory_id), ("walker", 1, walk.trajectory_id),
        ]  # fmt: skip
        assert plan.episode_id == told.episode_id
        assert not plan.input_ids
    named = {"speaker": {"name": "guide", "ask": "how?"}, "actor": "guest", "say": ["door"]}
    other = harness.run(cast, named, trajectories=[shown])["trajectories"].read()
    assert {row.agent for row in other} == {"guide", "guest"}
    nothing = harness.run(cast, {"say": ["key"]}, trajectories=[shown])
    assert (nothing.metrics["episodes"], nothing.metrics["nothing_to_say"]) == (0, len(walks))
    held = harness.trajectories(row.model_copy(update={"split": "heldout", "trajectory_id": "h"}) for row in walks[:1])
    with pytest.raises(ValueError, match="1 of 1 rows are not of the train split"):
        harness.run(cast, {}, trajectories=[held])


def task_of(row: Any) -> Any:
    from agentrl.schemas.task import Task

    return Task(task_id=row.task_id, env=row.env, split=row.split, prompt=row.prompt)


@pytest.mark.slow
def test_a_model_learns_both_parts_and_is_trained_in_both_or_in_one(
    harness: Harness, tasks: Tasks, shown: Trajectories
) -> None:
    """With the real engine: what is trained on has the log-probs of the policy itself."""
    both = harness.run(cast, {}, trajectories=[shown])["trajectories"]
    warm: Model = harness.run(
        sft, {"model": TINY, "steps": 60, "batch": 8, "optimizer": {"lr": 1e-2}}, trajectories=[both]
    )["model"]
    small: dict[str, Any] = {"iterations": 2, "tasks": 4, "samples": 4, "team": {}, "optimizer": {"lr": 1e-3}}
    checked = 0
    for config, inputs, agents in (
        ({}, {}, {"planner", "walker"}),
        ({"samples": 2, "team": {"acts": 2}}, {}, {"planner", "walker"}),
        ({}, {"actor": warm}, {"planner"}),
        ({"ahead": 1, "max_staleness": 2}, {"speaker": warm}, {"walker"}),
    ):
        made = harness.run(online, {**small, **config}, model=warm, tasks=tasks, **inputs)
        metrics = made["metrics"].table().to_pylist()
        fresh = [
            abs(row["behaviour_kl"])
            for row in metrics
            if row.get("behaviour_kl") is not None and not row["max_staleness"]
        ]
        assert all(kl < 1e-6 for kl in fresh)
        checked += len(fresh)
        named = {step["trajectory_id"] for step in made["steps"].table().to_pylist()}
        assert {row.agent for row in made["trajectories"].read() if row.trajectory_id in named} == agents
    assert checked, "some update had something to learn from"
