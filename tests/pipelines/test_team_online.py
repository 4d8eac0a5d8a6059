"""Online training of several agents in one episode."""

import shutil
from typing import Any

import pytest
from forked import harness, killed_and_resumed, model, tasks
from pydantic import ValidationError
from test_team import TeamEngine, acting

from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online

__all__ = ["acting", "harness", "model", "tasks"]
SMALL: dict[str, Any] = {
    "iterations": 2, "tasks": 4, "samples": 4, "optimizer": {"lr": 1e-4}, "max_tokens": 240, "checkpoint_every": 1,
}  # fmt: skip
JOINT = {**SMALL, "team": {}, "algorithm": {"type": "rloo", "credit": "joint"}}
MARGINAL = {**SMALL, "samples": 3, "team": {"acts": 4}, "algorithm": {"type": "rloo", "credit": "fork_turn"}}


def credited(made: Any) -> dict[str, float]:
    return {step["trajectory_id"]: step["advantage"] for step in made["steps"].table().to_pylist()}


@pytest.mark.slow
def test_an_episode_counts_once_in_its_group_and_its_agents_share_its_advantage(
    harness: Harness, model: Model, tasks: Tasks
) -> None:
    made = harness.run(online, JOINT, model=model, tasks=tasks)
    rows, advantage = made["trajectories"].read(), credited(made)
    assert len(rows) == 2 * 2 * 4 * 4
    groups: dict[str, list[float]] = {}
    for plan, walk in zip(rows[::2], rows[1::2], strict=True):
        assert [(row.agent, row.segment, row.source) for row in (plan, walk)] == [
            ("planner", 0, "team"), ("walker", 1, "team"),
        ]  # fmt: skip
        assert walk.messages[0].content == f"{plan.prompt} planner: {plan.messages[-1].content}"
        groups.setdefault(plan.group_id or "", []).append(plan.scored_reward())
    assert {len(rewards) for rewards in groups.values()} == {4}
    for plan, walk in zip(rows[::2], rows[1::2], strict=True):
        own = groups[plan.group_id or ""]
        expected = (plan.scored_reward() * 4 - sum(own)) / 3
        assert advantage[plan.trajectory_id] == pytest.approx(expected)
        assert advantage[walk.trajectory_id] == pytest.approx(expected)
    for metrics in made["metrics"].table().to_pylist():
        assert metrics["segments"] == 2
        assert metrics["credit_planner"] + metrics["credit_walker"] == pytest.approx(1)
    trained = made["batches"].table().to_pylist()
    by_id = {row.trajectory_id: row for row in rows}
    for batch in trained:
        row = by_id[batch["row_id"]]
        assert (batch["input_ids"], batch["mask"]) == (row.input_ids, row.action_mask)


@pytest.mark.slow
def test_who_does_not_matter_has_no_marginal_advantage(harness: Harness, model: Model, tasks: Tasks) -> None:
    """The walker does as it is told."""
    made = harness.run(online, MARGINAL, model=model, tasks=tasks)
    rows, advantage = made["trajectories"].read(), credited(made)
    assert len(rows) == 2 * 4 * 3 * (1 + 4)
    assert len({row.group_id for row in rows}) == 2 * 4 * (1 + 3)
    plans = {row.trajectory_id: row for row in rows if row.agent == "planner"}
    for walk in (row for row in rows if row.agent == "walker"):
        assert walk.reward == plans[walk.parent_id or ""].reward
        assert advantage[walk.trajectory_id] == 0
    assert any(advantage[name] for name in plans)
    for metrics in made["metrics"].table().to_pylist():
        assert (metrics["credit_planner"], metrics["credit_walker"]) == (1, 0)
        assert metrics["success"] == pytest.approx(metrics["reward"])
    assert [ticket["rows"] for ticket in made["coverage"].table().to_pylist()] == [15] * 8


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["speaker", "actor"])
def test_an_agent_that_is_an_input_is_not_trained(harness: Harness, model: Model, tasks: Tasks, frozen: str) -> None:
    other = harness.model(lambda to: shutil.copytree(model.path, to, dirs_exist_ok=True))
    made = harness.run(online, JOINT, model=model, tasks=tasks, dev=tasks, **{frozen: other})
    rows, trained = made["trajectories"].read(), set(credited(made))
    fixed = "planner" if frozen == "speaker" else "walker"
    for row in rows:
        assert (row.policy == other.name) == (row.agent == fixed) == ("not-trained" in row.tags) == bool(row.segment)
        assert (row.reward is None) == (row.agent == fixed)
        assert (row.trajectory_id in trained) == (row.agent != fixed)
    metrics = made["metrics"].table().to_pylist()
    assert [row["unscored"] for row in metrics] == [0, 0]
    assert {row["max_staleness"] for row in metrics} == {0}
    assert metrics[-1]["dev_success"] is not None
    assert max(ticket["staleness"] for ticket in made["coverage"].table().to_pylist()) == 0


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_words_that_it_has(
    harness: Harness, model: Model, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TeamEngine, "reproducible", False)
    more = {"ahead": 1, "max_staleness": 2, "limits": {"in_flight": 3}, "iterations": 3, "tasks": 2}
    config = online.config.model_validate({**MARGINAL, **more})
    context = harness._context("killed")
    kept, before, sampled, result = killed_and_resumed(
        context, config, TeamEngine, 120, monkeypatch, model=model, tasks=tasks
    )
    assert kept
    assert sampled
    assert not set(sampled) & before, "no row is made twice"
    rows = result["trajectories"].read()
    assert len(rows) == 3 * 2 * 15
    assert {row.agent for row in rows} == {"planner", "walker"}


def test_what_a_team_cannot_be_credited_with_is_refused(harness: Harness) -> None:
    team = {"team": {}}
    for config, what in (
        ({"fork": {}}, "fork makes trees of one agent's turns"),
        ({"starts": {}}, "starts are states of one agent"),
        ({"replay": {}}, "replay draws stored rows, which are not those of whole teams"),
        ({"compress": {"limit": 100}}, "compress makes several rows of an agent"),
        ({"algorithm": {"type": "ppo"}}, "algorithm.type: ppo values the turns of one agent"),
        ({"algorithm": {"type": "distill"}}, "asks a teacher about the turns of one agent"),
        ({"algorithm": {"type": "remax"}, "team": {"acts": 2}}, "compares with a greedy rollout, and with team.acts"),
        ({"algorithm": {"type": "grpo", "credit": "joint"}, "team": {"acts": 2}}, "which goes with whole or fork_turn"),
        ({"algorithm": {"type": "grpo", "credit": "agent"}}, "credit: agent with team.acts: 1, .* whole or joint"),
        ({"algorithm": {"type": "grpo", "off_policy": {"truncate": 2.0}}, "explore": {"tool": 0.1}}, "no tools"),
    ):
        with pytest.raises(ValidationError, match=what):
            online.config.model_validate({**team, **config})


def test_inputs_that_are_no_agents_are_refused(harness: Harness) -> None:
    folder = harness.model(lambda to: (to / "config.json").write_text("{}"))
    given: dict[str, Any] = {"model": folder, "tasks": harness.tasks([])}
    for config, inputs, what in (
        ({}, {"speaker": folder}, "inputs.speaker is wired, and team is not set"),
        ({"team": {}}, {"speaker": folder, "actor": folder}, "so no agent would be trained"),
        ({"team": {"acts": 2}}, {"actor": folder}, "set acts: 1, or unwire it"),
    ):
        with pytest.raises(ValueError, match=what):
            harness.run(online, config, **given, **inputs)
