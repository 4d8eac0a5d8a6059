"""Trees of rollouts: what goes on from where, and what their tokens are worth."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algorithms.dr_grpo import DrGRPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from agentrl.algorithms.rloo import RLOO
from agentrl.online.credit import assign
from agentrl.online.forest import ForestConfig, replayed_calls, shared_means
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

TASK = Task(task_id="t", env="rooms", split="train", prompt="attic to vault?")
TURN = 3
"""Tokens of a turn. An opening has 2, and an observation 1."""


def row(index: int, turns: int, reward: float, parent: Trajectory | None = None, turn: int = 0) -> Trajectory:
    """A rollout with so many turns, of which those before ``turn`` are those of ``parent``."""
    messages = [Message(role=Role.USER, content="attic to vault?", token_start=0, token_end=2)]
    mask = [False] * 2
    for number in range(turns):
        call = ToolCall(id=f"c{number}", name="go", arguments='{"door": "left"}')
        messages.append(Message(role=Role.ASSISTANT, tool_calls=[call], token_start=len(mask), token_end=len(mask) + 3))
        messages.append(Message(role=Role.TOOL, content="cave", token_start=len(mask) + 3, token_end=len(mask) + 4))
        mask += [parent is None or number >= turn] * TURN + [False]
    fork_at = 2 + turn * (TURN + 1) if parent else 0
    ids = [*(parent.input_ids[:fork_at] if parent else [index]), *range(100, 100 + len(mask))][: len(mask)]
    return Trajectory(
        trajectory_id=f"r{index}", episode_id=f"r{index}", task_id="t", group_id="g", sample_index=index,
        parent_id=parent.trajectory_id if parent else None, fork_at=fork_at, source="model", env="rooms",
        split="train", prompt="attic to vault?", reward=reward, success=reward > 0, termination=Termination.ANSWERED,
        n_action_tokens=sum(mask), n_tokens=len(mask), messages=messages, input_ids=ids, action_mask=mask,
        logprobs=[-1.0 if acts else float("nan") for acts in mask],
    )  # fmt: skip


def trees() -> list[Trajectory]:
    """Two trees. Of the first, with three turns, one rollout goes on from the second turn, and one from the third."""
    first, second = row(0, 3, 1.0), row(1, 2, 0.0)
    return [
        first, second, row(2, 2, 0.0, first, 1), row(3, 3, 1.0, first, 2), row(4, 2, 0.0, second, 0),
        row(5, 2, 0.0, second, 1),
    ]  # fmt: skip


def test_a_tree_is_a_whole_rollout_and_those_of_its_places_in_each_round() -> None:
    config = ForestConfig(trees=2, nodes=2, rounds=2)
    assert config.rows == 10
    assert [config.tree(index) for index in range(10)] == [0, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert ForestConfig() == ForestConfig(trees=2, nodes=2, rounds=1), "the settings of the authors' code"
    with pytest.raises(ValidationError, match="trees: 1 with rounds: 0 is one rollout of each task"):
        ForestConfig(trees=1, rounds=0)


def test_advantages_are_those_in_the_group_and_in_the_tree_and_shared_tokens_have_their_mean() -> None:
    """By hand, without division: of rewards 1, 0, 1 | 0, 0, 0 the group's mean is 1/3, those of the trees 2/3 and 0.
    So the rollouts have 1, -1, 1 | -1/3, -1/3, -1/3. All three of the first tree share its first turn (1/3 = (1 - 1 +
    1) / 3), two its second turn."""
    rows = trees()
    credit = assign(DrGRPO(), rows, fork=ForestConfig())
    assert credit.trained == [True] * 6
    weights = {row.row_id: np.array(row.weights) for row in credit.rows}
    turn = [slice(2 + number * (TURN + 1), 2 + number * (TURN + 1) + TURN) for number in range(3)]
    assert weights["r0"][turn[0]] == pytest.approx([1 / 3] * TURN)
    assert weights["r0"][turn[1]] == pytest.approx([1.0] * TURN)
    assert weights["r0"][turn[2]] == pytest.approx([1.0] * TURN)
    assert weights["r2"][turn[1]] == pytest.approx([-1.0] * TURN)
    assert weights["r3"][turn[2]] == pytest.approx([1.0] * TURN)
    for name in ("r1", "r4", "r5"):
        assert weights[name][-2:] == pytest.approx([-1 / 3] * 2)
    trained = np.concatenate([np.array(row.input_ids)[row.mask] for row in credit.rows])
    assert len(trained) == sum(row.n_action_tokens for row in rows), "each sampled token is trained on once"


def test_leave_one_out_compares_with_the_others_of_the_group_and_of_the_tree() -> None:
    """Rewards 1, 0, 1 | 0, 0, 0: in the group 1 - 1/5, in the tree 1 - 1/2."""
    credit = assign(RLOO(), trees(), fork=ForestConfig())
    weights = {row.row_id: row.weights for row in credit.rows}
    assert weights["r3"][-2] == pytest.approx(0.8 + 0.5)
    assert weights["r2"][-2] == pytest.approx(-0.4 - 1.0)
    assert weights["r4"][-2] == pytest.approx(-0.4)


@settings(max_examples=12)
@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=6, max_size=6))
@pytest.mark.parametrize("algorithm", [GRPO(), DrGRPO(), RLOO(), ReinforcePlusPlus(kl=None)])
def test_without_rounds_it_is_the_algorithm_to_the_bit(algorithm: Any, rewards: list[float]) -> None:
    rows = [row(index, 2, reward) for index, reward in enumerate(rewards)]
    plain, forest = assign(algorithm, rows), assign(algorithm, rows, fork=ForestConfig(trees=6, rounds=0))
    assert [row.model_dump_json() for row in forest.rows] == [row.model_dump_json() for row in plain.rows]
    assert (forest.advantages, forest.trained, forest.metrics) == (plain.advantages, plain.trained, plain.metrics)


def test_a_second_round_counts_for_the_tokens_before_the_first() -> None:
    first = row(0, 3, 0.0)
    child = row(1, 3, 0.0, first, 1)
    grandchild = row(2, 3, 0.0, child, 2)
    means = shared_means([first, child, grandchild], np.array([3.0, 0.0, 6.0]))
    assert means[0][2:5].tolist() == [3.0] * 3, "(3 + 0 + 6) / 3"
    assert means[0][child.fork_at :].tolist() == [3.0] * 8
    assert means[1][6:9].tolist() == [3.0] * 3, "(0 + 6) / 2"
    assert means[1][10:13].tolist() == [0.0] * 3
    assert means[2][10:13].tolist() == [6.0] * 3


def test_turns_of_a_tree_are_drawn_alike_and_the_same_again() -> None:
    rows, drawn = [row(0, 4, 1.0), row(1, 1, 0.0)], []
    config = ForestConfig(trees=2, nodes=2, rounds=2)
    for seed in range(400):
        result = config.prefixes(rows, TASK, seed)
        assert result == config.prefixes(rows, TASK, seed)
        assert [node.parent for node in result if node] == ["r0", "r0", "r1", "r1"]
        drawn += [len(item.ids) for item in result[:2] if item]
        assert {len(item.ids) for item in result[2:] if item} == {2}
    counts = [drawn.count(2 + turn * (TURN + 1)) for turn in range(4)]
    assert sum(counts) == 800
    assert min(counts) > 150
    grown = [*rows, *(row(index, 4, 0.0, rows[0], 3) for index in (2, 3)), *(row(n, 1, 0.0) for n in (4, 5))]
    again = [prefix for seed in range(200) for prefix in config.prefixes(grown, TASK, seed) if prefix]
    assert {(node.parent, len(node.ids)) for node in again if node.parent in ("r0", "r2", "r3")} == {
        ("r0", 2 + turn * (TURN + 1)) for turn in range(4)
    }, "the first turn of a continuation is a state of its parent"
    assert config.prefixes([], TASK, 0) == [None, None]
    assert config.prefixes([*grown, *grown[:4]], TASK, 0) == []


def test_a_tree_without_turns_begins_again() -> None:
    empty = row(0, 0, 0.0).model_copy(update={"termination": Termination.ENV_ERROR})
    result = ForestConfig(trees=2, nodes=1).prefixes([empty, row(1, 1, 0.0)], TASK, 0)
    assert result[0] is None
    assert result[1] is not None


def test_calls_that_are_made_again_are_counted_and_a_broken_continuation_is_named() -> None:
    rows = trees()
    assert [replayed_calls(row) for row in rows] == [0, 0, 1, 2, 0, 1]
    ForestConfig().check(rows)
    broken = rows[2].model_copy(update={"action_mask": [True] * len(rows[2].action_mask)})
    with pytest.raises(ValueError, match="r2 is trained on tokens of its parent"):
        ForestConfig().check([*rows[:2], broken])
