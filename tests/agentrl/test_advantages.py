"""Advantages against hand-computed numbers and slow loops."""

import random
import statistics

import numpy as np
import pytest

from agentrl.advantages.gae import adaptive_lambda, gae
from agentrl.advantages.group import (
    batch_advantages,
    centred_advantages,
    group_advantages,
    leave_one_out_advantages,
    most_uncertain,
    normalise_by_domain,
    remax_advantages,
)
from agentrl.advantages.turns import (
    divergence_weights,
    spread,
    subgoal_weights,
    turn_rewards,
    turn_spans,
)
from agentrl.algorithms.grpo import GRPO
from agentrl.online.credit import assign_rows
from schemas.trajectory import Message, Role

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 2.0, -1.0]
GROUPS = ["a", "b", "a", "a", "c", "c", "b", "b"]


def members(group: str) -> list[float]:
    return [reward for reward, name in zip(REWARDS, GROUPS, strict=True) if name == group]


def test_group_relative_uses_the_population_std_and_reports_degenerate_groups() -> None:
    advantages, degenerate = group_advantages(REWARDS, GROUPS, epsilon=1e-4)
    for reward, name, advantage in zip(REWARDS, GROUPS, advantages, strict=True):
        values = members(name)
        assert advantage == pytest.approx((reward - statistics.mean(values)) / (statistics.pstdev(values) + 1e-4))
    assert degenerate.tolist() == [name == "c" for name in GROUPS]


def test_without_std_leave_one_out_and_greedy_baseline() -> None:
    centred, loo = centred_advantages(REWARDS, GROUPS), leave_one_out_advantages(REWARDS, GROUPS)
    greedy = {"a": 1.0, "b": 0.0, "c": 0.25}
    remax = remax_advantages(REWARDS, GROUPS, greedy)
    for index, (reward, name) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        values = members(name)
        assert centred[index] == pytest.approx(reward - statistics.mean(values))
        assert loo[index] == pytest.approx(reward - (sum(values) - reward) / (len(values) - 1))
        assert remax[index] == pytest.approx(reward - greedy[name])
    assert leave_one_out_advantages([3.0], ["alone"]).tolist() == [0.0]


def test_batch_and_domain_normalisation() -> None:
    values = batch_advantages(REWARDS, GROUPS)
    assert values.mean() == pytest.approx(0)
    assert values.std() == pytest.approx(1, abs=1e-4)
    scaled = normalise_by_domain([0.0, 1.0, 0.0, 100.0], ["x", "x", "y", "y"])
    assert scaled == pytest.approx([-1, 1, -1, 1], abs=1e-4)


def test_the_most_uncertain_groups_are_kept() -> None:
    assert most_uncertain(REWARDS, GROUPS, 0.34).tolist() == [name == "b" for name in GROUPS]
    assert most_uncertain(REWARDS, GROUPS, 0.01).sum() == 3


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16: the sum of all later temporal differences, each weighed by (gamma lam)^l."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - start) * deltas[later] for later in range(start, len(deltas)))
        for start in range(len(deltas))
    ]


def test_gae_against_a_slow_loop() -> None:
    rng = random.Random(0)
    for length in (1, 2, 9):
        rewards, values = ([rng.gauss(0, 1) for _ in range(length)] for _ in range(2))
        advantages, targets = gae(rewards, values, 0.9, 0.8)
        assert advantages == pytest.approx(slow_gae(rewards, values, 0.9, 0.8))
        assert targets == pytest.approx(advantages + np.array(values))
    # Without a trace: the temporal difference. With a full one: the return less the value.
    assert gae([0.0, 1.0], [0.2, 0.4], 1.0, 0.0)[0] == pytest.approx([0.2, 0.6])
    assert gae([0.0, 1.0], [0.2, 0.4], 1.0, 1.0)[0] == pytest.approx([0.8, 0.6])


def test_adaptive_lambda() -> None:
    assert adaptive_lambda(100, 0.05) == pytest.approx(0.8)
    assert adaptive_lambda(2, 0.05) == 0.0


MASK = [False, True, True, False, False, True, False, True, True]


def test_turns() -> None:
    assert turn_spans(MASK) == [(1, 3), (5, 6), (7, 9)]
    assert spread([1.0, 2.0, 3.0], turn_spans(MASK), len(MASK)) == [0, 1, 1, 0, 0, 2, 0, 3, 3]
    with pytest.raises(ValueError):
        spread([1.0, 2.0], turn_spans(MASK), len(MASK))
    messages = [
        Message(role=Role.USER),
        Message(role=Role.ASSISTANT, reward=0.5),
        Message(role=Role.TOOL, reward=0.25),
        Message(role=Role.ASSISTANT),
        Message(role=Role.ASSISTANT),
    ]
    assert turn_rewards(messages, MASK, 1.0) == [0.75, 0.0, 1.0]


def test_blame_begins_with_the_turn_that_leaves_the_nearest_success() -> None:
    failed = [9, 1, 2, 7, 7, 3, 7, 4, 5]
    near, far = [9, 1, 2, 7, 7, 8, 7, 4], [9, 2]
    assert divergence_weights(failed, MASK, [far, near]) == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert divergence_weights(failed, MASK, []) == [1] * 9


def test_subgoals() -> None:
    assert subgoal_weights(MASK, [0, None, None]) == [0, 0, 0, 0, 0, 1, 0, 1, 1]
    assert subgoal_weights(MASK, [None, None]) == [0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert subgoal_weights(MASK, [0, 1]) == [1] * 9


def test_rows_of_one_episode_count_once_in_their_group_and_share_its_advantage() -> None:
    """An agent with helpers has several rows; its group would otherwise be compared with itself."""
    rewards, actions = np.array([1.0, 0.0, 1.0, 1.0]), np.full(4, 5)
    episodes = np.array([0, 1, 0, 0])
    together = assign_rows(GRPO(), rewards, rewards, ["g"] * 4, actions, episodes).weights
    alone = assign_rows(GRPO(), rewards[:2], rewards[:2], ["g"] * 2, actions[:2]).weights
    np.testing.assert_allclose(together, alone[episodes])
    apart = assign_rows(GRPO(), rewards, rewards, ["g"] * 4, actions).weights
    np.testing.assert_array_equal(
        apart, assign_rows(GRPO(), rewards, rewards, ["g"] * 4, actions, np.arange(4)).weights
    )
    assert abs(apart[1]) > abs(together[1])
