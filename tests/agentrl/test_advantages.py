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
from agentrl.algorithms.policy_gradient import Experience
from agentrl.algorithms.ppo import PPO
from agentrl.algorithms.rloo import RLOO
from agentrl.online.credit import assign, assign_rows
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

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
    spans = turn_spans([], MASK)
    assert spans == [(1, 3), (5, 6), (7, 9)]
    assert spread([1.0, 2.0, 3.0], spans, len(MASK)) == [0, 1, 1, 0, 0, 2, 0, 3, 3]
    with pytest.raises(ValueError):
        spread([1.0, 2.0], spans, len(MASK))
    messages = [
        Message(role=Role.USER),
        Message(role=Role.ASSISTANT, reward=0.5),
        Message(role=Role.TOOL, reward=0.25),
        Message(role=Role.ASSISTANT),
        Message(role=Role.ASSISTANT),
    ]
    assert turn_rewards(messages, MASK, 1.0) == [0.75, 0.0, 1.0]


def said(start: int, end: int, reward: float | None = None, role: Role = Role.ASSISTANT) -> Message:
    return Message(role=role, token_start=start, token_end=end, reward=reward)


def test_turns_come_from_the_spans_of_messages() -> None:
    """Two turns may follow each other without a token between them, an opening may quote an assistant, and in a row
    that was forked the first turns were not sampled."""
    quoted, beyond = said(1, 1), Message(role=Role.ASSISTANT)
    messages = [said(0, 1, role=Role.USER), quoted, said(1, 3, 0.5), said(3, 4), said(4, 6, role=Role.TOOL), said(6, 8)]
    mask = [False, True, True, True, False, False, True, True]
    assert turn_spans([*messages, beyond], mask) == [(1, 3), (3, 4), (6, 8)]
    forked = [position >= 6 for position in range(8)]
    assert turn_spans(messages, forked) == turn_spans(messages, mask)
    assert turn_rewards(messages, forked, 1.0) == [0.5, 0.0, 1.0]


def test_the_rewards_of_turns_that_a_forked_row_did_not_sample_go_to_these_turns() -> None:
    """PPO's actions are the turns that were sampled; what was earned before the fork is nobody's reward here."""
    messages = [said(0, 1, role=Role.USER), said(1, 2, 5.0), said(2, 3, 0.25, Role.TOOL), said(3, 4, 0.5), said(4, 5)]
    row = Trajectory(
        trajectory_id="r", episode_id="r", task_id="t", source="forked", env="e", split="train", prompt="q",
        reward=1.0, success=True, termination=Termination.ANSWERED, messages=messages,
        input_ids=[1] * 5, action_mask=[False, False, False, True, True],
    )  # fmt: skip
    step = Experience([row], ["g"], np.array([1.0]), [[0.0] * 5], values=[[0.0] * 5])
    advantages = PPO(level="turn", lam=1.0, whiten=False).advantages(step)
    assert list(advantages.tokens[0]) == [0.0, 0.0, 0.0, 1.5, 1.0]
    assert advantages.targets[0].mask == [False, False, False, True, True]


def test_blame_begins_with_the_turn_that_leaves_the_nearest_success() -> None:
    spans, failed = turn_spans([], MASK), [9, 1, 2, 7, 7, 3, 7, 4, 5]
    near, far = [9, 1, 2, 7, 7, 8, 7, 4], [9, 2]
    assert divergence_weights(failed, spans, [far, near]) == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert divergence_weights(failed, spans, []) == [1] * 9


def test_subgoals() -> None:
    spans = turn_spans([], MASK)
    assert subgoal_weights(9, spans, [0, None, None]) == [0, 0, 0, 0, 0, 1, 0, 1, 1]
    assert subgoal_weights(9, spans, [None, None]) == [0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert subgoal_weights(9, spans, [0, 1]) == [1] * 9


def test_alternatives_at_a_fork_are_credited_to_the_turn_that_was_tried() -> None:
    """Counterfactual credit by hand: alternatives with rewards 1, 1, 0, 0 have 2/3 or -2/3 against the others."""
    messages = [said(0, 1, role=Role.USER), said(1, 2), said(2, 4, role=Role.TOOL), said(4, 6), said(7, 8)]
    mask = [False] * 4 + [True, True, False, True]
    rows = [
        Trajectory(
            trajectory_id=f"r{n}", episode_id=f"r{n}", task_id="t", group_id="node-1", source="forked", env="e",
            split="train", prompt="q", reward=reward, success=reward > 0, termination=Termination.ANSWERED,
            messages=messages, input_ids=[1] * 8, action_mask=mask, logprobs=[-1.0] * 8, fork_at=fork_at,
        )
        for n, (reward, fork_at) in enumerate([(1.0, 4), (1.0, 4), (0.0, 4), (0.0, 0)])
    ]  # fmt: skip
    rows = assign(RLOO(credit="fork_turn"), rows).rows
    turn, whole = [0, 0, 0, 0, 1, 1, 0, 0], [1] * 8
    matches = [[round(weight / (2 / 3), 6) for weight in row.weights] for row in rows]
    assert matches == [turn, turn, [-value for value in turn], [-item for item in whole]]


def test_an_agent_that_is_ignored_has_no_marginal_advantage() -> None:
    """A team whose first agent decides alone. Four alternatives of the second one after each frozen choice of the first
    end alike, so each has the advantage 0; with the episode's, it shares the credit of what it did not do."""
    messages = [said(0, 1, role=Role.USER), said(1, 2), said(2, 4, role=Role.TOOL), said(4, 6)]

    def row(name: str, group: str, reward: float, fork_at: int) -> Trajectory:
        return Trajectory(
            trajectory_id=name, episode_id=name, task_id="t", group_id=group, source="forked", env="e", split="train",
            prompt="q", reward=reward, success=reward > 0, termination=Termination.ANSWERED, messages=messages,
            input_ids=[1] * 6, action_mask=[False] * 4 + [True] * 2, logprobs=[-1.0] * 6, fork_at=fork_at,
            agent="second",
        )  # fmt: skip

    choices = {"right": 1.0, "wrong": 0.0}
    alternatives = [row(f"{name}-{n}", name, reward, 4) for name, reward in choices.items() for n in range(4)]
    marginal = assign(RLOO(credit="fork_turn"), alternatives).rows
    assert all(weight == 0 for row in marginal for weight in row.weights)
    joint = assign(RLOO(), [row(f"{name}-{n}", "task", won, 0) for name, won in choices.items() for n in range(2)]).rows
    assert [round(row.weights[-1] / (2 / 3), 6) for row in joint] == [1, 1, -1, -1]


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
