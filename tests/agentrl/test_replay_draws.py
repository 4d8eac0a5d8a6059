"""What is drawn of stored groups, what it weighs in a step, and which settings of replay go together: by hand."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentrl.algorithms.cispo import CISPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.policy_gradient import KL, OffPolicy
from agentrl.algorithms.reinforce import Reinforce
from agentrl.algorithms.rloo import RLOO
from agentrl.online.credit import Credit, Extras, assign
from agentrl.online.replay import (
    Replay,
    ReplayConfig,
    StoredGroup,
    corrected,
    drawn,
    groups_of,
    mixed,
    priority_weights,
    reweighted,
)
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.schemas.trajectory import Termination, Trajectory


def row(name: str, group: str, reward: float, logprob: float = -1.0, tokens: int = 1, **more: Any) -> Trajectory:
    """A rollout with so many action tokens after its prompt of one."""
    about = {"task_id": group, "group_id": f"{group}-g", "reward": reward, "success": reward > 0.5, **more}
    return Trajectory.model_construct(
        trajectory_id=name,
        episode_id=name,
        fingerprint="f",
        policy="p",
        env="e",
        termination=Termination.ANSWERED,
        input_ids=[1] * (1 + tokens),
        action_mask=[False] + [True] * tokens,
        logprobs=[math.nan] + [logprob] * tokens,
        **about,
    )


def test_the_weights_of_prioritised_draws_are_those_of_the_paper_over_their_mean() -> None:
    """Four groups of priorities 1, 1, 2, 4 have chances 1/8, 1/8, 2/8, 4/8 (equation 1, alpha 1), so ``N P`` is 0.5,
    0.5, 1 and 2."""
    groups = [StoredGroup((str(n),), priority, True) for n, priority in enumerate([1.0, 1.0, 2.0, 4.0])]
    chances = np.array([1, 1, 2, 4]) / 8
    # the first once, the last three times: (1 x 2 + 3 x 0.5) / 4 draws is a mean of 0.875
    weights = priority_weights(chances, np.array([0, 3]), np.array([1, 3]), beta=1.0)
    assert weights.tolist() == pytest.approx([2 / 0.875, 3 * 0.5 / 0.875])
    assert weights.sum() == pytest.approx(4), "together they weigh what four draws weigh"
    assert priority_weights(chances, np.array([0, 3]), np.array([1, 3]), beta=0.0).tolist() == [1, 3]
    config = ReplayConfig(draw="priority", alpha=1.0, beta=1.0)
    counts: Counter[int] = Counter()
    estimates = []
    for seed in range(4000):
        numbers, own = drawn(groups, 4, config, np.random.default_rng(seed))
        assert sum(own) == pytest.approx(4)
        counts.update(numbers)
        estimates.append(sum(weight * groups[n].priority for n, weight in zip(numbers, own, strict=True)) / 4)
    assert counts[3] / 4000 == pytest.approx(1 - 0.5**4, abs=0.02), "a group is there once, however often it was drawn"
    # with beta 1 a mean over draws estimates the plain mean, which is 2; over their mean, with a bias of order 1 / n
    assert np.mean(estimates) == pytest.approx(2.0, abs=0.35)


def test_groups_of_equal_rewards_are_never_drawn_and_shrink_nothing() -> None:
    rows = [
        row(f"{group}{n}", group, reward)
        for group, rewards in {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0.5, 0]}.items()
        for n, reward in enumerate(rewards)
    ]
    groups = groups_of(rows, "whole", own=True)
    assert [group.ids for group in groups] == [("a0", "a1", "a2", "a3"), ("c0", "c1")]
    # of rewards 1, 0, 0, 0 the mean distance from 1/4 is (3/4 + 3 x 1/4) / 4
    assert [group.priority for group in groups] == pytest.approx([0.375, 0.25])
    assert [group.success for group in groups] == [True, False]
    for seed in range(20):
        _, weights = drawn(groups, 3, ReplayConfig(draw="priority"), np.random.default_rng(seed))
        assert sum(weights) == pytest.approx(3), "a maximum over a draw with b in it would have made them 1e-2"


def test_successes_come_first_and_others_fill_the_draw() -> None:
    groups = [StoredGroup((str(n),), 1.0, n in (2, 4)) for n in range(6)]
    for seed in range(10):
        random = np.random.default_rng(seed)
        assert drawn(groups, 2, ReplayConfig(draw="success_first"), random) == ([2, 4], [1.0, 1.0])
        numbers, weights = drawn(groups, 4, ReplayConfig(draw="success_first"), random)
        assert {2, 4} < set(numbers)
        assert weights == [1.0] * 4


def test_own_groups_leave_by_age_and_draws_follow_from_the_seed() -> None:
    read: list[str] = []

    def reading(ids: Any) -> list[Trajectory]:
        read.extend(ids)
        return [row(name, "a", 1.0) for name in ids]

    def replay(**config: Any) -> Replay:
        made = Replay(ReplayConfig(**config), GRPO(), 6, 5, [StoredGroup(("s0", "s1"), 1.0, True)], reading)
        for version in range(3):
            made.add([row(f"v{version}-{n}", f"t{version}", float(n), policy_version=version) for n in range(2)])
        return made

    assert replay(share=0.25).number == 2
    assert replay(share=0.5).number == 6
    made = replay(share=0.5, max_age=1).draw(3, version=3)
    assert made is not None
    assert set(read) == {"s0", "s1", "v2-0", "v2-1"}
    assert made.age == 1
    read.clear()
    first, again = (replay(share=0.25).draw(3, 3) for _ in range(2))
    assert first is not None
    assert again is not None
    assert [row.trajectory_id for row in first.rows] == [row.trajectory_id for row in again.rows]
    only_stored = replay(share=0.5, own=False).draw(3, 3)
    assert only_stored is not None
    assert [row.trajectory_id for row in only_stored.rows] == ["s0", "s1"]


def credits(algorithm: Any, config: ReplayConfig, stored: list[Trajectory], proximal: list[float]) -> Credit:
    """The credit of rows of one action token, of which the policy as it is gives these log-probs."""
    return assign(corrected(algorithm, config), stored, Extras(proximal=[[0.0, own] for own in proximal], version=1))


def test_importance_and_effective_sample_size_of_a_replayed_group() -> None:
    """Two rows of rewards 1 and 0, sampled with log-probs -1; now the first is three times, the second a third as
    likely. With a bound of 2 their weights are 2 and 1/3."""
    stored = [row("a0", "a", 1.0), row("a1", "a", 0.0)]
    config = ReplayConfig(correction=OffPolicy(truncate=2.0, min_ess=0.9))
    credit = credits(RLOO(), config, stored, [-1 + math.log(3), -1 - math.log(3)])
    assert [entry.weights[1] for entry in credit.rows] == pytest.approx([1 * 2.0, -1 / 3])
    assert [entry.logprobs[1] for entry in credit.rows] == pytest.approx([-1 + math.log(3), -1 - math.log(3)])
    # Kish: (3 + 1/3)^2 / (9 + 1/9) of 2 rows, from whole ratios without a bound
    ess = (3 + 1 / 3) ** 2 / (9 + 1 / 9) / 2
    assert credit.metrics["ess"] == pytest.approx(ess)
    assert credit.lr_scale == pytest.approx(ess / 0.9)
    skipping = ReplayConfig(correction=OffPolicy(truncate=2.0, min_ess=0.9, guard="skip"))
    assert credits(RLOO(), skipping, stored, [-1 + math.log(3), -1 - math.log(3)]).lr_scale == 0


def test_fresh_and_replayed_rows_count_alike_in_a_step() -> None:
    """Two fresh groups, one of equal rewards, and one replayed group of weight 2: the loss of the step is the sum of
    all advantages over the six episodes that count. The trainer divides by the four rows that it is given."""
    fresh = assign(GRPO(), [row("a0", "a", 1.0), row("a1", "a", 0.0), row("b0", "b", 0.0), row("b1", "b", 0.0)])
    assert [entry.weights[1] for entry in fresh.rows] == pytest.approx([0.5, -0.5], rel=1e-4), "of four episodes"
    stored = assign(GRPO(), [row("c0", "c", 1.0), row("c1", "c", 0.0)])
    rows = mixed(GRPO(), fresh, reweighted(stored, [2.0, 2.0]))
    assert [entry.row_id for entry in rows] == ["a0", "a1", "c0", "c1"]
    assert len({entry.unit for entry in rows}) == 4
    loss = [entry.weights[1] / 4 for entry in rows]
    assert loss == pytest.approx([1 / 6, -1 / 6, 2 / 6, -2 / 6], rel=1e-4)


def test_the_guard_scales_the_replayed_part_alone() -> None:
    fresh = assign(GRPO(), [row("a0", "a", 1.0), row("a1", "a", 0.0)])
    stored = assign(GRPO(), [row("c0", "c", 1.0), row("c1", "c", 0.0)])
    half = Credit(**{**vars(stored), "lr_scale": 0.5})
    loss = [entry.weights[1] / 4 for entry in mixed(GRPO(), fresh, half)]
    # two episodes and half of two
    assert loss == pytest.approx([1 / 3, -1 / 3, 0.5 / 3, -0.5 / 3], rel=1e-4)
    dropped = Credit(**{**vars(stored), "lr_scale": 0.0})
    assert mixed(GRPO(), fresh, dropped) == fresh.rows


def test_tokens_are_counted_where_the_loss_divides_by_tokens() -> None:
    algorithm = CISPO()
    assert algorithm.aggregate == "token"
    fresh = assign(algorithm, [row("a0", "a", 1.0, tokens=3), row("a1", "a", 0.0, tokens=1)])
    stored = assign(algorithm, [row("c0", "c", 1.0, tokens=2), row("c1", "c", 0.0, tokens=2)])
    rows = mixed(algorithm, fresh, stored)
    assert [entry.weights[1] / 8 for entry in rows] == pytest.approx([1 / 8, -1 / 8, 1 / 8, -1 / 8], rel=1e-4)


def test_what_needs_the_log_probs_of_the_sampler() -> None:
    uncorrected = ReplayConfig(correction=None)
    assert ReplayConfig().needs_logprobs(Reinforce())
    assert uncorrected.needs_logprobs(GRPO())
    assert not uncorrected.needs_logprobs(Reinforce())
    assert uncorrected.needs_logprobs(Reinforce(kl=KL(where="reward")))


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"alpha": 0.5}, "alpha does nothing with draw: uniform; it is for draw: priority"),
        ({"own": False, "max_age": 3}, "max_age: 3 does nothing with own: false"),
        ({"correction": {"max_staleness": 2}}, "no max_staleness; use max_age"),
        ({"correction": {"vtrace": [1.0, 1.0]}}, "correction takes no vtrace, which needs a critic"),
        ({"share": 1.0}, "less than 1"),
    ],
)
def test_settings_of_replay_that_do_nothing_are_refused(replay: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ReplayConfig.model_validate(replay)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"algorithm": {"type": "ppo"}}, "algorithm.type: ppo fits a critic"),
        ({"algorithm": {"type": "remax"}}, "algorithm.type: remax compares with greedy rollouts"),
        ({"fork": {}}, "fork credits rollouts by trees, which stored ones are not"),
        (
            {"optimizer": {"lr": 1e-5, "precision": "bfloat16"}, "replay": {"correction": None}},
            "replay.correction: null those to the policy that sampled would be lost",
        ),
        (
            {
                "explore": {"resample": {"eta": 0.003}},
                "algorithm": {"type": "grpo", "off_policy": {"truncate": 2.0}},
                "replay": {"correction": None},
            },
            "takes turns that are no draws of the policy",
        ),
    ],
)
def test_what_replay_does_not_go_with_is_refused_at_load(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnlineConfig.model_validate({"replay": {}, **config})
