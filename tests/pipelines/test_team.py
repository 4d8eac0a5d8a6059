"""Several agents in one episode, and what each of them is credited with."""

from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from forked import LIMITS, TRAIN, by_id, harness, model, tasks
from pydantic import ValidationError
from tabular import TabularEngine, said, state_of, stumbling

from agentrl.engines.base import Sampling, Session, Turn
from agentrl.engines.configs import EmbeddedConfig
from agentrl.environments.rooms.values import ANSWER
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.fork.fork import fork
from agentrl.pipelines.methods.team.team import team
from agentrl.pipelines.stages.train import offline
from agentrl.pipelines.stages.trajectories import sample
from agentrl.schemas.trajectory import REPLACED, Message, Role, Span, Trajectory

__all__ = ["harness", "model", "tasks"]
pytestmark = pytest.mark.slow


class TeamEngine(TabularEngine):
    """The planner says at random whether to walk. The walker does as it is told: by the shortest way, or not at all.
    So what the walker itself draws does not matter."""

    async def turn(self, session: Session, sampling: Sampling, *, stop: Any, seed: int, **more: Any) -> Turn:
        opening = session.messages[0].content
        if " to " not in opening.split("?")[0] or ("plan?" not in opening and "planner:" not in opening):
            return await super().turn(session, sampling, stop=stop, seed=seed, **more)
        if opening.endswith("plan?"):
            message = Message(role=Role.ASSISTANT, content=Random(seed).choice(["left", "here"]))
        else:
            bare = Message(role=Role.USER, content=opening.split("?")[0] + "?")
            chances = stumbling(0.0)(*state_of([bare, *session.messages[1:]]))
            best = max(chances, key=lambda action: chances[action])
            message = said(ANSWER if opening.endswith("planner: here") else best, len(session.messages))
        ids = self.codec.assistant(message)
        return Turn(ids, [-0.5] * len(ids), [Span(version=self.version, start=0, end=len(ids))], "stop")


@pytest.fixture(autouse=True, scope="module")
def acting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddedConfig, "build", lambda self, policy: TeamEngine(policy.codec, stumbling(0.6)))
        yield


def weights(harness: Harness, model: Model, algorithm: dict[str, Any], *given: Trajectories) -> dict[str, list[float]]:
    """What the tokens of rows weigh; rows that teach nothing are left out."""
    made = harness.run(offline, {**TRAIN, "algorithm": algorithm}, model=model, trajectories=list(given))
    return {row["row_id"]: row["weights"] for row in made["rows"].table().to_pylist()}


def test_agents_of_an_episode_have_a_row_each_and_share_its_outcome(
    harness: Harness, model: Model, tasks: Tasks
) -> None:
    made = harness.run(team, {"samples": 6, **LIMITS}, model=model, tasks=tasks)
    rows = made["trajectories"].read()
    assert len(rows) == 2 * 6 * 4
    assert made.metrics["episodes"] == 6 * 4
    assert made.metrics["sampled_tokens"] == sum(row.n_action_tokens for row in rows)
    for plan, walk in zip(rows[::2], rows[1::2], strict=True):
        assert [(row.agent, row.segment) for row in (plan, walk)] == [("planner", 0), ("walker", 1)]
        assert walk.episode_id == plan.episode_id == plan.trajectory_id == walk.parent_id
        assert (walk.group_id, walk.reward, walk.success) == (plan.group_id, plan.reward, plan.success)
        word = plan.messages[-1].content
        assert walk.messages[0].content == f"{plan.prompt} planner: {word}"
        assert walk.success == (word == "left")
        assert not any(walk.action_mask[: walk.messages[1].token_start])
        assert plan.tools == "[]" != walk.tools
    assert len({row.group_id for row in rows}) == 4
    result = weights(harness, model, {"type": "rloo", "credit": "joint"}, made["trajectories"])
    rewards = defaultdict(list)
    for plan in rows[::2]:
        rewards[plan.group_id].append(plan.reward)
    for plan, walk in zip(rows[::2], rows[1::2], strict=True):
        own = rewards[plan.group_id]
        if len(set(own)) > 1:
            expected = (plan.scored_reward() * 6 - sum(own)) / 5
            two = {round(item, 6) for row in (plan, walk) for item in result[row.trajectory_id]}
            assert len(two) == 1, "both agents have the advantage of their episode"
            assert (two.pop() > 0) == (expected > 0)


def test_an_agent_that_does_not_matter_has_a_joint_advantage_and_no_marginal_one(
    harness: Harness, model: Model, tasks: Tasks
) -> None:
    joint = harness.run(team, {"samples": 6, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    credited = weights(harness, model, {"type": "rloo", "credit": "joint"}, joint)
    assert {by_id(joint)[name].agent for name in credited} == {"planner", "walker"}
    frozen = harness.run(team, {"samples": 3, "acts": 4, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    rows = frozen.read()
    assert len(rows) == 4 * 3 * 5
    assert len({row.group_id for row in rows}) == 4 + 4 * 3
    plans = {row.trajectory_id: row for row in rows if row.agent == "planner"}
    for walk in (row for row in rows if row.agent == "walker"):
        plan = plans[walk.parent_id or ""]
        assert walk.group_id not in {plan.group_id, *plans}
        assert walk.reward == plan.reward, "the planner has the mean of the walks after its words"
        assert walk.episode_id != plan.episode_id
    marginal = weights(harness, model, {"type": "rloo", "credit": "fork_turn"}, frozen)
    assert {by_id(frozen)[name].agent for name in marginal} == {"planner"}


def test_rows_of_an_episode_in_several_groups_are_refused_joint_credit(
    harness: Harness, model: Model, tasks: Tasks
) -> None:
    made = harness.run(team, {"samples": 2, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    rows = made.read()
    update = [{"trajectory_id": f"t-{n}", "group_id": f"g-{n % 2}"} for n in range(len(rows))]
    torn = harness.trajectories([row.model_copy(update=new) for row, new in zip(rows, update, strict=True)])
    with pytest.raises(ValueError, match=r"credit: joint, and rows of the episode .* are of several groups"):
        weights(harness, model, {"type": "rloo", "credit": "joint"}, torn)
    with pytest.raises(ValueError, match=r"is of the agent planner of a team, .* trajectories.team with acts"):
        harness.run(fork, LIMITS, model=model, trajectories=[made])
    with pytest.raises(ValidationError, match="two agents are called 'walker'"):
        team.config.model_validate({"speakers": [{"name": "walker", "ask": "?"}]})
    two = [{"name": "planner", "ask": "plan?"}, {"name": "critic", "ask": "good?"}]
    team.config.model_validate({"speakers": two})
    with pytest.raises(ValidationError, match=r"acts 2 with 2 speakers: .* no marginal advantage; name one speaker"):
        team.config.model_validate({"speakers": two, "acts": 2})


def test_two_models_may_share_an_episode(harness: Harness, model: Model, tasks: Tasks) -> None:
    other = harness.model(lambda to: __import__("shutil").copytree(model.path, to, dirs_exist_ok=True))
    rows = harness.run(team, {"samples": 1, **LIMITS}, model=model, speaker=other, tasks=tasks)["trajectories"].read()
    assert {(row.agent, row.policy) for row in rows} == {("planner", other.name), ("walker", model.name)}


def first_turn(row: Trajectory) -> slice:
    turn = next(
        message
        for message in row.messages
        if message.role is Role.ASSISTANT and (message.token_start or 0) >= row.fork_at
    )
    return slice(turn.token_start, turn.token_end)


@pytest.mark.parametrize("by", ["none", "default"])
def test_turns_are_compared_with_a_default_or_with_nothing(
    harness: Harness, model: Model, tasks: Tasks, by: str
) -> None:
    rollouts = harness.run(sample, {"samples": 1, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    config = {"at": "all", "k": 4, **LIMITS}
    again = harness.run(fork, config, model=model, trajectories=[rollouts])["trajectories"]
    default = {"default": model} if by == "default" else {}
    made = harness.run(fork, {**config, "k": 2, "replace": by}, model=model, trajectories=[rollouts], **default)
    rows = made["trajectories"].read()
    assert {row.group_id for row in rows} == {row.group_id for row in again.read()}
    for row in rows:
        assert REPLACED in row.tags
        assert not any(row.action_mask[: first_turn(row).stop])
        assert row.n_action_tokens == sum(row.action_mask)
        if by == "none":
            message = next(
                message
                for message in row.messages
                if message.token_start == row.fork_at and message.role is Role.ASSISTANT
            )
            assert (message.content, message.tool_calls) == ("", [])
    if by == "default":
        spans = [first_turn(row) for row in rows]
        assert made.metrics["foreign_tokens"] == sum(span.stop - span.start for span in spans) > 0
    rewards, both = defaultdict(list), [*again.read(), *rows]
    for row in both:
        rewards[row.group_id].append(row.scored_reward())
    result = weights(harness, model, {"type": "rloo", "credit": "fork_turn"}, again, made["trajectories"])
    assert result
    assert not set(result) & {row.trajectory_id for row in rows}, "what was not sampled is not trained on"
    scales = set()
    for row in again.read():
        own = rewards[row.group_id]
        advantage = row.scored_reward() - (sum(own) - row.scored_reward()) / (len(own) - 1)
        assert (row.trajectory_id in result) == (abs(advantage) > 1e-9)
        if row.trajectory_id in result:
            weighed = result[row.trajectory_id]
            scales.add(round(weighed[row.fork_at] / advantage, 5))
            assert not any(weighed[first_turn(row).stop :])
    assert len(scales) == 1, (
        "each has its reward less the mean of all other alternatives, those that were not sampled too"
    )


def test_a_default_policy_is_named_if_its_turn_is_wanted(harness: Harness, model: Model, tasks: Tasks) -> None:
    rollouts = harness.run(sample, {"samples": 1, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    with pytest.raises(ValueError, match=r"replace: default needs inputs.default"):
        harness.run(fork, {"replace": "default", **LIMITS}, model=model, trajectories=[rollouts])
    with pytest.raises(ValueError, match=r"inputs.default is wired; set replace: default"):
        harness.run(fork, LIMITS, model=model, trajectories=[rollouts], default=model)
