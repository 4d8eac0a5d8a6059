"""Search over the turns of a tabular policy of ``rooms``."""

from typing import Any

import pytest
from forked import LIMITS, harness, model, tabular, tasks

from agentrl.advantages.turns import turn_spans
from agentrl.engines.blocking import blocking
from agentrl.environments.base import Score
from agentrl.environments.forks import rebuild
from agentrl.environments.rooms.environment import Rooms
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.methods.lats.search import tree
from agentrl.schemas.trajectory import Role, Trajectory

__all__ = ["harness", "model", "tabular", "tasks"]

JUDGE = {"engines": [{"type": "openai", "model": "judge", "base_url": "http://judge:8000/v1"}]}
SMALL: dict[str, Any] = {"branch": 3, "rounds": 4, **LIMITS}


def test_a_tree_is_rows_and_a_small_table(harness: Harness, model: Model, tasks: Tasks) -> None:
    done = harness.run(tree, SMALL, tasks=tasks, model=model)
    rows: dict[str, Trajectory] = {row.trajectory_id: row for row in done["trajectories"].read()}
    nodes = {node["node_id"]: node for node in done["nodes"].table().to_pylist()}
    roots = [node for node in nodes.values() if node["parent_node"] is None]
    assert len(roots) == len(tasks.read())
    assert done.metrics["sampled_tokens"] == sum(row.n_action_tokens for row in rows.values())
    assert sum(root["visits"] for root in roots) == len(rows) == sum(node["own"] for node in nodes.values())
    assert sum(root["total"] for root in roots) == sum(row.scored_reward() for row in rows.values())
    for name, node in nodes.items():
        children = [other for other in nodes.values() if other["parent_node"] == name]
        assert node["visits"] == node["own"] + sum(child["visits"] for child in children)
        if node["parent_node"]:
            row = rows[node["trajectory_id"]]
            assert (node["token_start"], node["token_end"]) in turn_spans(row.messages, row.action_mask)
            assert node["depth"] == nodes[node["parent_node"]]["depth"] + 1
    assert {row.source for row in rows.values()} == {"search"}
    steps = done["steps"].read()
    assert len(steps) == len(nodes) - len(roots)
    pairs = harness.run(agentq, trajectories=[done["trajectories"]], values=[done["steps"]])
    assert all(pair.chosen_reward > pair.rejected_reward for pair in pairs["pairs"].read())
    again = harness.run(tree, SMALL, tasks=tasks, model=model)
    assert [row.input_ids for row in again["trajectories"].read()] == [row.input_ids for row in rows.values()]
    rowless = [
        done["nodes"].table().drop_columns("trajectory_id"),
        again["nodes"].table().drop_columns("trajectory_id"),
    ]
    assert rowless[0].equals(rowless[1]), "the same seed, the same tree"


def test_every_leaf_is_scored_again_the_same(harness: Harness, model: Model, tasks: Tasks) -> None:
    done = harness.run(tree, SMALL, tasks=tasks, model=model)
    rooms, by_name = Rooms(), {task.task_id: task for task in tasks.read()}

    async def score(row: Trajectory) -> Score:
        last = max(number for number, message in enumerate(row.messages) if message.role is Role.ASSISTANT)
        episode = await rebuild(rooms, by_name[row.task_id], row.messages[:last])
        await episode.step(row.messages[last])
        return await episode.score()

    rows = done["trajectories"].read()
    for row in rows:
        result = blocking(score(row))
        assert (result.reward, result.success) == (row.reward, row.success)
    assert {row.success for row in rows} == {True, False}


def test_an_oracle_ends_a_search_with_its_first_success(harness: Harness, model: Model, tasks: Tasks) -> None:
    done = harness.run(tree, {**SMALL, "oracle": True, "value": "rest"}, tasks=tasks, model=model)
    blind = harness.run(tree, SMALL, tasks=tasks, model=model)
    solved = {row.task_id for row in done["trajectories"].read() if row.success}
    assert done.metrics["solved_tasks"] == len(solved)
    assert done.metrics["sampled_tokens"] < blind.metrics["sampled_tokens"]
    assert all(0 <= step.q <= 1 for step in done["steps"].read())


@pytest.mark.parametrize(
    "published",
    [
        {"select": "uct", "c": 2**0.5, "branch": 5, "rounds": 30, "depth": 7, "judge": JUDGE, "simulate": 4},
        {"select": "agentq", "c": 1, "rounds": 10, "depth": 5, "alpha": 0.5, "judge": JUDGE},
        {"select": "uct", "c": 0.7, "branch": 3, "alpha": 0.5, "value": "rest", "judge": JUDGE},
    ],
    ids=["LATS", "Agent Q", "ReST-MCTS*"],
)
def test_the_settings_of_papers_can_be_given(published: dict[str, Any]) -> None:
    config = tree.config.model_validate(published)
    assert published.keys() <= config.model_fields_set
    defaults = tree.config()
    assert (defaults.c, defaults.branch, defaults.rounds, defaults.depth) == (2**0.5, 5, 30, 7), "LATS's"


def test_a_search_that_looks_at_rewards_refuses_tasks_that_are_measured_on(
    harness: Harness, model: Model, tasks: Tasks
) -> None:
    unseen = harness.tasks([task.model_copy(update={"split": "heldout"}) for task in tasks.read()])
    with pytest.raises(ValueError, match=r"oracle: true lets the search look at rewards, and .* is of split heldout"):
        harness.run(tree, {**SMALL, "oracle": True}, tasks=unseen, model=model)


def test_a_budget_of_tokens_ends_a_search(harness: Harness, model: Model, tasks: Tasks) -> None:
    spent = harness.run(tree, {**SMALL, "budget_tokens": 1}, tasks=tasks, model=model)["trajectories"]
    assert len(spent.ids()) == 3 * len(tasks.read())


def test_a_search_in_an_environment_that_forgets_is_refused(harness: Harness, model: Model) -> None:
    from agentrl.pipelines.stages.tasks import generate

    slippery = harness.run(generate, {"env": {"type": "rooms", "slip": 0.5}, "train": 1, "dev": 0, "heldout": 0})
    with pytest.raises(ValueError, match="cannot be continued"):
        harness.run(tree, SMALL, tasks=slippery["train"], model=model)
