"""Off-policy corrections against slow loops, and their way into training rows."""

import math
import random

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from agentrl.advantages.vtrace import vtrace
from agentrl.algorithms import PolicyGradientAlgorithm
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.policy_gradient import OffPolicy
from agentrl.algorithms.ppo import PPO
from agentrl.algorithms.vapo import VAPO
from agentrl.online.credit import Extras, assign, shaped_rewards
from agentrl.online.off_policy import (
    band_mask,
    effective_sample_size,
    truncated_prefix_weights,
    truncated_sequence_weights,
    truncated_token_weights,
)
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory
from agentrl.training.batch import TrainingError


def slow_vtrace(r: list[float], v: list[float], log_ratio: list[float], gamma: float, rho: float, c: float) -> list:
    """Equation 1 of Espeholt et al.: a sum over later temporal differences, weighed by products of truncated ratios."""
    n, following = len(r), [*v[1:], 0.0]
    out = []
    for s in range(n):
        total = v[s]
        for t in range(s, n):
            product = math.prod(min(c, math.exp(log_ratio[i])) for i in range(s, t))
            total += (
                gamma ** (t - s) * product * min(rho, math.exp(log_ratio[t])) * (r[t] + gamma * following[t] - v[t])
            )
        out.append(total)
    return out


def test_vtrace_against_a_slow_loop() -> None:
    rng = random.Random(1)
    r, v, log_ratio = ([rng.gauss(0, 1) for _ in range(7)] for _ in range(3))
    targets, advantages = vtrace(r, v, log_ratio, 0.9, 1.2, 0.8)
    expected = slow_vtrace(r, v, log_ratio, 0.9, 1.2, 0.8)
    assert targets == pytest.approx(expected)
    first = min(1.2, math.exp(log_ratio[0])) * (r[0] + 0.9 * expected[1] - v[0])
    assert advantages[0] == pytest.approx(first)
    # On-policy and without truncation it is the return.
    assert vtrace([0.0, 1.0], [0.3, 0.4], [0.0, 0.0])[0] == pytest.approx([1.0, 1.0])


def test_weights_and_bands() -> None:
    log_ratio = torch.tensor([[0.0, math.log(3.0), math.log(0.2)]])
    assert truncated_token_weights(log_ratio, 2.0).tolist()[0] == pytest.approx([1, 2, 0.2])
    mask = torch.tensor([[False, True, True]])
    assert truncated_sequence_weights(log_ratio, mask, 2.0).item() == pytest.approx(0.6)
    assert truncated_sequence_weights(log_ratio, mask, 0.5).item() == pytest.approx(0.5)
    assert band_mask(log_ratio, 0.5, 2.0).tolist() == [[True, False, False]]


def test_the_weight_of_a_token_is_the_product_of_ratios_up_to_it() -> None:
    """Ratios 3, 0.5 and 4 of action tokens, with an observation of ratio 7 between: products 3, 1.5 and 6."""
    log_ratio = torch.tensor([[0.0, 3.0, 0.5, 7.0, 4.0]]).log().masked_fill(torch.tensor([[True] + [False] * 4]), 0.0)
    mask = torch.tensor([[False, True, True, False, True]])
    assert truncated_prefix_weights(log_ratio, mask, 100.0)[0, mask[0]].tolist() == pytest.approx([3, 1.5, 6])
    assert truncated_prefix_weights(log_ratio, mask, 2.0)[0, mask[0]].tolist() == pytest.approx([2, 1.5, 2])
    long = torch.full((1, 4000), 1.0)
    assert truncated_prefix_weights(long, torch.ones(1, 4000, dtype=torch.bool), 2.0).max() == 2
    credit = assign(GRPO(off_policy=OffPolicy(truncate_prefix=2.5)), ROLLOUTS, Extras(proximal=PROXIMAL, version=3))
    first, second = credit.rows
    assert [first.weights[1], first.weights[3]] == pytest.approx([2.5, 2.5], abs=1e-4)
    assert [second.weights[1], second.weights[3]] == pytest.approx([-1, -0.1], abs=1e-4)


def test_effective_sample_size() -> None:
    assert effective_sample_size([2.0, 2.0, 2.0]) == pytest.approx(1)
    assert effective_sample_size([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert effective_sample_size([3.0, 1.0]) == pytest.approx(16 / 10 / 2)


def rollout(index: int, reward: float, version: int = 0, group: str = "g") -> Trajectory:
    return Trajectory(
        trajectory_id=f"t-{index}",
        episode_id=f"t-{index}",
        task_id=f"task of {group}",
        group_id=group,
        env="e",
        source="model",
        split="train",
        prompt="",
        reward=reward,
        success=reward > 0,
        termination=Termination.ANSWERED,
        messages=[Message(role=Role.USER), Message(role=Role.ASSISTANT)],
        policy_version=version,
        n_tokens=4,
        input_ids=[1, 2, 3, index],
        action_mask=[False, True, False, True],
        logprobs=[math.nan, -1.0, math.nan, -2.0],
    )


ROLLOUTS = [rollout(0, 1.0, version=3), rollout(1, 0.0, version=1)]
PROXIMAL = [[0.0, -1.0 + math.log(3), 0.0, -2.0], [0.0, -1.0, 0.0, -2.0 + math.log(0.1)]]


def test_decoupled_ratios_are_folded_into_weights_and_anchors() -> None:
    credit = assign(GRPO(off_policy=OffPolicy(truncate=2.0)), ROLLOUTS, Extras(proximal=PROXIMAL, version=3))
    first, second = credit.rows
    assert [first.weights[1], first.weights[3]] == pytest.approx([2, 1], abs=1e-4)
    assert [second.weights[1], second.weights[3]] == pytest.approx([-1, -0.1], abs=1e-4)
    assert first.logprobs == PROXIMAL[0]
    assert credit.metrics["staleness"] == 1.0
    assert credit.metrics["ess"] == pytest.approx(effective_sample_size([3.0, 0.1]))


def test_out_of_band_tokens_and_stale_rows_are_left_out() -> None:
    config = OffPolicy(band=(0.5, 2.0), max_staleness=1)
    credit = assign(GRPO(off_policy=config), ROLLOUTS, Extras(proximal=PROXIMAL, version=3))
    assert credit.trained == [True, False]
    assert credit.rows[0].weights[1] == 0
    assert credit.metrics["masked_share"] == 0.5


@pytest.mark.parametrize(("guard", "scale"), [("scale", None), ("skip", 0.0)])
def test_the_guard_acts_on_a_low_effective_sample_size(guard: str, scale: float | None) -> None:
    config = OffPolicy(min_ess=0.9, guard=guard)  # type: ignore[arg-type]
    credit = assign(GRPO(off_policy=config), ROLLOUTS, Extras(proximal=PROXIMAL, version=3))
    assert credit.lr_scale == pytest.approx(credit.metrics["ess"] / 0.9 if scale is None else scale)
    fresh = [[0.0, -1.0, 0.0, -2.0]] * 2
    assert assign(GRPO(off_policy=config), ROLLOUTS, Extras(proximal=fresh, version=3)).lr_scale == 1.0


def test_first_divergence_spares_the_good_prefix() -> None:
    rows = [rollout(0, 1.0), rollout(1, 0.0)]
    credit = assign(GRPO(credit="first_divergence"), rows)
    assert [bool(weight) for weight in credit.rows[1].weights] == [False, False, False, True]
    assert all(credit.rows[0].weights)


def test_degenerate_groups_are_dropped_or_kept_as_asked() -> None:
    rows = [rollout(0, 1.0), rollout(1, 1.0)]
    assert assign(GRPO(), rows).rows == []  # they have no gradient
    assert len(assign(GRPO(entropy=0.1), rows).rows) == 2
    assert assign(GRPO(entropy=0.1, degenerate="drop"), rows).rows == []


def test_turn_level_gae_gives_every_token_of_a_turn_the_same() -> None:
    rows = [rollout(0, 1.0)]
    values = [[0.0, 0.2, 0.0, 0.6]]
    credit = assign(PPO(level="turn", whiten=False, lam=0.5), rows, Extras(values=values))
    # delta = 0.6 - 0.2 and 1 - 0.6
    assert credit.rows[0].weights == pytest.approx([0, 0.4 + 0.5 * 0.4, 0, 0.4])
    assert credit.targets[0].weights == pytest.approx([0, 0.8, 0, 1.0])
    decoupled = assign(VAPO(whiten=False, adaptive_alpha=1.0), rows, Extras(values=values))
    assert decoupled.rows[0].weights == pytest.approx([0, 0.4 + 0.5 * 0.4, 0, 0.4])  # lambda 1 - 1/2
    assert decoupled.targets[0].weights == pytest.approx([0, 1.0, 0, 1.0])  # the return


def test_rewards_that_are_not_numbers_are_refused_by_name() -> None:
    with pytest.raises(TrainingError, match="reward not finite in t-1"):
        assign(GRPO(), [rollout(0, 1.0), rollout(1, math.nan)])


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "grpo", "kl": {"estimator": "k1"}},
        {"type": "grpo", "off_policy": {"band": [1.5, 2.0]}},
        {"type": "grpo", "off_policy": {"truncate": 2, "truncate_sequence": 2}},
        {"type": "grpo", "off_policy": {"truncate": 2, "truncate_prefix": 2}},
        {"type": "ppo", "off_policy": {"vtrace": [1, 1], "truncate_prefix": 2}},
        {"type": "rloo", "clip_low": 0.1},
        {"type": "grop"},
    ],
    ids=str,
)
def test_degenerate_combinations_are_refused_when_read(bad: dict) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(PolicyGradientAlgorithm).validate_python(bad)


def test_vtrace_takes_the_place_of_gae_and_of_other_weights() -> None:
    rows, values = [rollout(0, 1.0)], [[0.0, 0.2, 0.0, 0.6]]
    proximal = [[0.0, -1.0 + math.log(3), 0.0, -2.0 + math.log(0.5)]]
    config = PPO(level="turn", whiten=False, off_policy=OffPolicy(vtrace=(1.5, 1.0)))
    credit = assign(config, rows, Extras(values=values, proximal=proximal))
    targets, advantages = vtrace([0.0, 1.0], [0.2, 0.6], [math.log(3), math.log(0.5)], 1.0, 1.5, 1.0)
    assert [credit.rows[0].weights[i] for i in (1, 3)] == pytest.approx(advantages)
    assert [credit.targets[0].weights[i] for i in (1, 3)] == pytest.approx(targets)
    # Whitening takes the mean off advantages before they are weighed: what is nearly impossible weighs nearly nothing.
    rare = [[0.0, -1.0, 0.0, -2.0 + math.log(1e-6)]]
    whitened = assign(config.model_copy(update={"whiten": True}), rows, Extras(values=values, proximal=rare))
    assert abs(whitened.rows[0].weights[3]) < 1e-5 < abs(whitened.rows[0].weights[1])
    with pytest.raises(ValidationError, match="needs the values of a critic"):
        GRPO(off_policy=OffPolicy(vtrace=(1.0, 1.0)))
    with pytest.raises(ValidationError, match="would correct twice"):
        OffPolicy(vtrace=(1.0, 1.0), truncate=2.0)


def test_a_failed_row_is_blamed_for_its_first_failed_subgoal() -> None:
    call = ToolCall(id="c", name="find", arguments="{}")
    message = Message(role=Role.ASSISTANT, tool_calls=[call])
    failed = rollout(1, 0.0).model_copy(
        update={
            "input_ids": [1, 2, 3, 4, 5, 6],
            "action_mask": [False, True, False, True, False, True],
            "logprobs": [math.nan, -1.0] * 3,
            "n_tokens": 6,
            "messages": [Message(role=Role.USER), message, message, Message(role=Role.ASSISTANT)],
            "final_state": '{"subgoals": [0, null]}',
        }
    )
    solved = rollout(0, 1.0).model_copy(update={"final_state": '{"subgoals": [0, 1]}'})
    credit = assign(GRPO(credit="subgoal"), [solved, failed])
    assert all(credit.rows[0].weights)
    assert [bool(weight) for weight in credit.rows[1].weights] == [False, False, False, True, False, True]
    with pytest.raises(TrainingError, match="final_state of t-1 names no subgoals"):
        assign(GRPO(credit="subgoal"), [rollout(1, 0.0)])


def test_rewards_per_level_are_brought_to_one_scale() -> None:
    rows = [rollout(i, reward, group=f"g{i // 2}") for i, reward in enumerate([1.0, 0.0, 10.0, 0.0])]
    rows = [row.model_copy(update={"level": number // 2}) for number, row in enumerate(rows)]
    assert shaped_rewards(GRPO(per_level=True), rows).tolist() == pytest.approx([1, -1, 1, -1], abs=1e-5)
