"""A type with no other key is the published algorithm."""

import json
import math
from typing import Any

import pytest
import torch
from small_models import random_rows, small_policy

from agentrl.algorithms.base import Objective
from agentrl.algorithms.cispo import CISPO
from agentrl.algorithms.dapo import DAPO
from agentrl.algorithms.dr_grpo import DrGRPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.policy_gradient import KL, Overlong, PolicyGradient
from agentrl.algorithms.reinforce import Reinforce
from agentrl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from agentrl.algorithms.remax import ReMax
from agentrl.algorithms.rloo import RLOO
from agentrl.algorithms.vapo import VAPO
from agentrl.engines.seeds import stream
from agentrl.online.credit import Extras, assign, shaped_rewards
from agentrl.online.learner import Learner
from agentrl.online.recorded import Recorded
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory
from agentrl.training.batch import collate
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer

MASK = [False, True, False, True, True]


def rollout(index: int, reward: float, group: str = "g", **changes: Any) -> Trajectory:
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
        success=reward > 0.5,
        termination=Termination.ANSWERED,
        messages=[Message(role=Role.USER), Message(role=Role.ASSISTANT)],
        **{
            "n_tokens": 5,
            "input_ids": [1, 2, 3, 4, index],
            "action_mask": MASK,
            "logprobs": [-1.0 if m else math.nan for m in MASK],
            **changes,
        },
    )


def test_remax_learns_from_equal_rewards_that_differ_from_the_greedy_one() -> None:
    rows = [rollout(0, 1.0), rollout(1, 1.0)]
    credit = assign(ReMax(), rows, Extras(greedy={"g": 0.0}))
    assert [row.weights[1] for row in credit.rows] == [1.0, 1.0]
    assert assign(ReMax(), rows, Extras(greedy={"g": 1.0})).rows == []


@pytest.mark.parametrize("algorithm", [GRPO, DAPO, Reinforce])
def test_a_penalty_in_the_reward_acts_in_groups_of_equal_rewards(algorithm: type[PolicyGradient]) -> None:
    rows = [rollout(0, 1.0), rollout(1, 1.0)]
    reference = [[-1.0] * 5, [-3.0] * 5]
    config = algorithm(kl=KL(where="reward", estimator="k1", coef=0.1), overlong=None)
    credit = assign(config, rows, Extras(reference=reference))
    assert len(credit.rows) == 2
    assert credit.rows[0].weights[1] > 0 > credit.rows[1].weights[1]


MIXED = [rollout(0, 1.0, "a"), rollout(1, 0.0, "a"), rollout(2, 1.0, "b"), rollout(3, 1.0, "b")]


@pytest.mark.parametrize(
    ("algorithm", "counted"),
    [(GRPO(), 4), (DrGRPO(), 4), (GSPO(), 4), (RLOO(), 4), (Reinforce(), 4), (DAPO(overlong=None), 2)],
    ids=lambda value: getattr(value, "type", value),
)
def test_what_the_loss_is_divided_by(algorithm: PolicyGradient, counted: int) -> None:
    """One group of two teaches nothing. Its mean advantage is zero in any case, so the other's first row stands for
    the whole: with advantages of both signs the sum would be zero too."""
    credit = assign(algorithm, MIXED)
    first = credit.rows[0]
    live = {"sequence": 2, "token": 6, "constant": 2 * algorithm.constant_length}[algorithm.aggregate]
    every = {"sequence": counted, "token": 3 * counted, "constant": counted * algorithm.constant_length}
    assert len(credit.rows) == 2
    unscaled = credit.advantages[0]
    assert first.weights[1] / live == pytest.approx(unscaled / every[algorithm.aggregate])


def test_a_constant_is_constant_whatever_is_dropped() -> None:
    kept, dropped = (assign(DrGRPO(degenerate=name), MIXED).rows[0].weights for name in ("keep", "drop"))
    assert kept == dropped
    alone = assign(DrGRPO(), MIXED[:2]).rows[0].weights
    assert kept[1] == pytest.approx(alone[1] / 2)  # the same sum over twice the rows


def test_overlong_follows_max_tokens_and_counts_the_response() -> None:
    def long(n_response: int, max_tokens: int) -> float:
        n = 100 + n_response
        row = rollout(
            0, 1.0, n_tokens=n, input_ids=[1] * n, action_mask=[False] * 100 + [True] * n_response,
            logprobs=[-1.0] * n, sampling=json.dumps({"max_tokens": max_tokens}),
        )  # fmt: skip
        return float(shaped_rewards(DAPO(), [row])[0])

    assert long(400, 4096) == 1.0
    assert long(800, 1100) == 1.0
    assert long(900, 1100) == 0.5
    assert long(1000, 1100) == 0.0
    with pytest.raises(ValueError, match=r"t-0 has no max_tokens in its sampling: set overlong\.limit"):
        shaped_rewards(DAPO(), [rollout(0, 1.0)])
    assert shaped_rewards(DAPO(overlong=Overlong(limit=4, buffer=2)), [rollout(0, 1.0)])[0] == 0.0  # 4 after the prompt
    with pytest.raises(ValueError, match="buffer 5 is longer than limit 4"):
        Overlong(limit=4, buffer=5)


def test_vapo_adds_the_likelihood_of_successes() -> None:
    rows = [row.model_copy(update={"label": 1 if index < 3 else -1}) for index, row in enumerate(random_rows(8))]
    matches = []
    for micro_tokens in (100_000, 1):
        values = []
        for mu in (0.0, 0.1):
            trainer = Trainer(small_policy(), VAPO(positive_nll=mu), OptimizerConfig(micro_tokens=micro_tokens), 1)
            values.append(trainer.gradients(TrainingRows.of(rows))["loss"])
        matches.append(values[1] - values[0])
    policy = small_policy()
    expected, tokens = 0.0, 0
    for row in rows[:3]:
        logp = policy.model(torch.tensor([row.input_ids])).logits[0].log_softmax(-1)
        for position, inside in enumerate(row.mask):
            if inside and position:
                expected -= logp[position - 1, row.input_ids[position]].item()
                tokens += 1
    assert VAPO().positive_nll == 0.1
    assert matches == pytest.approx([0.1 * expected / tokens] * 2, rel=1e-4)
    credit = assign(VAPO(), [rollout(0, 1.0), rollout(1, 0.0)], Extras(values=[[0.0] * 5] * 2))
    assert [row.label for row in credit.rows] == [1, -1]


def test_reinforce_plus_plus_has_its_divergence() -> None:
    published = ReinforcePlusPlus().kl
    assert published is not None
    assert (published.estimator, published.where) == ("k2", "loss")


def test_kto_normalises_its_baseline_too() -> None:
    rows = random_rows(6)
    batch = collate(TrainingRows.of(rows))
    policy = small_policy()
    trainer = Trainer(policy, KTO(length_normalized=True), OptimizerConfig(), 1)
    with torch.no_grad():
        logprobs, _ = trainer.forward(batch)
    ratios = ((logprobs - batch.ref_logprobs) * batch.mask).sum(-1) / batch.mask.sum(-1)
    assert trainer._baseline([batch], []) == pytest.approx(ratios.sum().item(), rel=1e-4)
    assert KTO().logratio(logprobs, batch) == pytest.approx((ratios * batch.mask.sum(-1)).numpy(), rel=1e-4)


@pytest.mark.parametrize("algorithm", [GRPO(), DAPO(), DrGRPO(), CISPO(), GSPO(clip_low=0.01)], ids=lambda a: a.type)
@pytest.mark.parametrize("micro_tokens", [100_000, 1])
def test_metrics_are_means_over_action_tokens(algorithm: Objective, micro_tokens: int) -> None:
    rows = random_rows(8)
    metrics = Trainer(small_policy(), algorithm, OptimizerConfig(micro_tokens=micro_tokens), 1).gradients(
        TrainingRows.of(rows)
    )
    batch = collate(TrainingRows.of(rows))
    policy = small_policy()
    logprobs, _ = Trainer(policy, algorithm, OptimizerConfig(), 1).forward(batch)
    log_ratio = (logprobs - batch.logprobs).detach()
    kl = ((log_ratio.exp() - 1 - log_ratio) * batch.mask).sum() / batch.mask.sum()
    assert metrics["behaviour_kl"] == pytest.approx(kl.item(), rel=1e-4)
    assert 0 < metrics["clip_share"] <= 1


@pytest.mark.parametrize("idle", [set(), {2}, {0, 4}])
def test_a_schedule_ends_at_its_last_step_whatever_was_skipped(idle: set[int]) -> None:
    policy = small_policy()
    optimizer = OptimizerConfig(lr=1.0e-3, schedule="linear")
    learner = Learner(policy, GRPO(), optimizer, iterations=6, samples=2, seed=0, updates=2)
    rates = {}
    for iteration in range(6):
        rows = [] if iteration in idle else random_rows(4)
        parts = list(enumerate(learner._parts(iteration, rows, 1.0, {})))
        rates[iteration] = learner.update(Recorded(iteration, parts, None, 1.0, {}, [])).get("lr")
    last = (optimizer.lr_at(10, 12) + optimizer.lr_at(11, 12)) / 2
    assert rates[5] == pytest.approx(last)


def test_random_streams_are_disjoint() -> None:
    purposes = ("online", "evaluate", "sample", "hinted")
    seeds = [stream(seed, purpose, position) for seed in range(50) for purpose in purposes for position in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert stream(0, "online", 1, 0) != stream(0, "online", 0, 1)
