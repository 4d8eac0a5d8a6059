"""Online training on trees of rollouts: what they are, what a killed run goes on from, and what is refused."""

from typing import Any

import pytest
from forked import by_id, harness, killed_and_resumed, model, tabular, task_of, tasks
from pydantic import ValidationError
from tabular import TabularEngine

from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.tasks import generate
from agentrl.rollouts.continuations import check_continuation, node
from agentrl.schemas.trajectory import Role

__all__ = ["harness", "model", "tabular", "tasks"]
FORK = {"trees": 2, "nodes": 2, "rounds": 2}
SMALL: dict[str, Any] = {
    "iterations": 3, "tasks": 2, "fork": FORK, "optimizer": {"lr": 1e-4}, "checkpoint_every": 2, "max_tokens": 240,
}  # fmt: skip


@pytest.mark.slow
def test_rollouts_of_a_ticket_go_on_from_turns_of_others(harness: Harness, model: Model, tasks: Tasks) -> None:
    made = harness.run(online, SMALL, model=model, tasks=tasks)
    rows = made["trajectories"].read()
    parents = by_id(made["trajectories"])
    assert len(rows) == 3 * 2 * 10
    assert [row.sample_index for row in rows] == list(range(10)) * 6
    for row in rows:
        index = row.sample_index
        assert (row.fork_at > 0) == (row.parent_id is not None) == (index >= 2)
        if row.parent_id is None:
            continue
        parent = parents[row.parent_id]
        assert (parent.group_id, parent.task_id) == (row.group_id, row.task_id)
        assert parent.sample_index < (2 if index < 6 else 6)
        root = parent if parent.parent_id is None else parents[parent.parent_id]
        assert root.sample_index == (index - 2) // 2 % 2, "a continuation is of its own tree"
        turn = sum(message.role is Role.ASSISTANT for message in row.messages) - row.n_steps
        check_continuation(row, node(parent, turn, task_of(parent)).prefix)
    assert any(parents[row.parent_id or ""].fork_at for row in rows if row.fork_at), "of the second round"
    metrics = made["metrics"].table().to_pylist()
    replayed = sum(metric["replayed_calls"] for metric in metrics)
    assert replayed == sum(len(row.messages) // 2 - row.n_steps for row in rows if row.fork_at)
    trained = made["batches"].table().to_pylist()
    for batch in trained:
        assert not any(batch["mask"][: parents[batch["row_id"]].fork_at])
    assert [item["rows"] for item in made["coverage"].table().to_pylist()] == [10] * 6


@pytest.mark.slow
@pytest.mark.parametrize("in_step", [True, False], ids=["in step", "as they come"])
def test_a_killed_run_goes_on_with_the_trees_that_it_has(
    harness: Harness, model: Model, tasks: Tasks, in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after its first iteration and, as they come, in the middle of a round of continuations."""
    monkeypatch.setattr(TabularEngine, "reproducible", in_step)
    more = {} if in_step else {"ahead": 1, "max_staleness": 2, "limits": {"in_flight": 3}}
    config = online.config.model_validate({**SMALL, **more})
    undisturbed = harness.run(online, config.model_dump(), model=model, tasks=tasks)
    context = harness._context("killed")
    kept, before, sampled, result = killed_and_resumed(
        context, config, TabularEngine, 100, monkeypatch, model=model, tasks=tasks
    )
    assert bool(kept) == (not in_step)
    assert sampled
    assert len(set(sampled)) == len(sampled)
    assert not set(sampled) & before, "no row is made twice"
    assert {*sampled, *before} == set(context.row_ids())
    rows = result["trajectories"].read()
    assert len(rows) == 60
    if in_step:
        expected, again = (
            [(row.sample_index, row.fork_at, row.input_ids) for row in made["trajectories"].read()]
            for made in (undisturbed, result)
        )
        assert again == expected


@pytest.mark.slow
def test_trees_without_continuations_are_plain_groups(harness: Harness, model: Model, tasks: Tasks) -> None:
    plain = {**{name: value for name, value in SMALL.items() if name != "fork"}, "samples": 4}
    forest = {**SMALL, "fork": {"trees": 4, "rounds": 0}}
    two = [harness.run(online, config, model=model, tasks=tasks) for config in (plain, forest)]
    for name in ("batches", "metrics"):
        expected, result = (made[name].table().to_pydict() for made in two)
        for column in expected.keys() - {"row_id"}:
            assert repr(result[column]) == repr(expected[column]), column


def test_what_cannot_be_a_tree_is_refused_with_the_remedy(harness: Harness, model: Model) -> None:
    for config, what in (
        ({"fork": {}, "algorithm": {"type": "ppo"}}, "fork needs an algorithm that compares the rewards of a group"),
        ({"fork": {}, "algorithm": {"type": "remax"}}, "and algorithm: remax does not; take grpo, dr_grpo"),
        ({"fork": {}, "samples": 8}, r"samples: 8 with fork: fork makes 6 rollouts of each task"),
        ({"fork": {"rounds": 0, "trees": 1}}, "one rollout of each task"),
    ):
        with pytest.raises(ValidationError, match=what):
            online.config.model_validate(config)
    slippery = {"type": "rooms", "slip": 0.2}
    tasks = harness.run(generate, {"env": slippery, "train": 2, "dev": 0, "heldout": 0})["train"]
    with pytest.raises(ValueError, match=r"cannot be continued: it may answer .* as slip of rooms"):
        harness.run(online, SMALL, model=model, tasks=tasks)
