"""The doctor finds each sickness that is planted, and nothing in a healthy run."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from agentrl.doctor import CHECKS, examine
from agentrl.doctor.bands import bands
from agentrl.doctor.case import SHOWN, Case, Row

TOOLS = json.dumps([{"type": "function", "function": {"name": "find"}}])
ROLLOUTS, GROUP = 240, 8


def rollout(index: int, **changes: Any) -> Row:
    """Rewards rise over the run, and differ within every group."""
    reward = float((index % GROUP) < 2 + 5 * index // ROLLOUTS)
    row = {
        "trajectory_id": f"t-{index}",
        "task_id": f"task-{index // GROUP}",
        "group_id": f"task-{index // GROUP}",
        "split": "train",
        "reward": reward,
        "success": reward > 0,
        "termination": "answered",
        "reward_components": [{"name": "exact_match", "value": reward}, {"name": "format", "value": 0.9}],
        "n_tokens": 70 + index % 7,
        "n_action_tokens": 20,
        "n_tool_calls": 1,
        "n_tool_errors": 0,
    }
    return row | changes


def sampled(index: int, **changes: Any) -> Row:
    call = {"name": "find", "arguments": json.dumps({"who": f"person {index}"})}
    row = {
        "trajectory_id": f"t-{index}",
        "task_id": f"task-{index}",
        "tools": TOOLS,
        "messages": [
            {"role": "user", "token_start": 0, "token_end": 2, "tool_calls": []},
            {"role": "assistant", "token_start": 2, "token_end": 4, "tool_calls": [call]},
            {"role": "tool", "token_start": 4, "token_end": 6, "tool_calls": []},
        ],
        "input_ids": [1, 2, 3, 4, 5, 6],
        "action_mask": [False, False, True, True, False, False],
        "logprobs": [math.nan, math.nan, -1.0, -0.5, math.nan, math.nan],
    }
    return row | changes


def steps(**series: Any) -> list[Row]:
    """24 steps; every series is a function from 0..1 to its value."""
    base = {
        "success": lambda x: 0.3 + 0.6 * x,
        "entropy": lambda x: 1.0 - 0.8 * x,
        "behaviour_kl": lambda x: 1e-6,
        "reference_kl": lambda x: 0.1 * x,
        "ess": lambda x: 0.9,
        "clip_share": lambda x: 0.02,
        "lr": lambda x: 1.5e-3,
        "grad_norm": lambda x: 0.2,
    }
    return [{"step": float(i)} | {name: f(i / 23) for name, f in (base | series).items()} for i in range(24)]


HEALTHY = Case(
    rollouts=[rollout(i) for i in range(ROLLOUTS)],
    sample=[sampled(i) for i in range(40)],
    metrics=steps(),
    heldout=(70, 100),
)


def with_rollouts(**changes: Any) -> Case:
    """Changes are values, or functions of a rollout's number."""
    rows = []
    for i in range(ROLLOUTS):
        rows.append(rollout(i, **{name: v(i) if callable(v) else v for name, v in changes.items()}))
    return replace(HEALTHY, rollouts=rows)


def with_samples(**changes: Any) -> Case:
    rows = [sampled(i, **{name: v(i) if callable(v) else v for name, v in changes.items()}) for i in range(40)]
    return replace(HEALTHY, sample=rows)


def calling(call: Any, times: int = 1) -> Any:
    return lambda i: [
        {"role": "assistant", "token_start": 2, "token_end": 4, "tool_calls": [call(i)] * times},
    ]


def late(i: int) -> bool:
    return i >= ROLLOUTS // 3


SICK: dict[str, Case] = {
    "reward is always zero": with_rollouts(reward=0.0, success=False),
    "the reward never varies": with_rollouts(reward=0.5),
    "the control for sharpening was not run": replace(HEALTHY, control=False),
    "the policy does not move": replace(HEALTHY, metrics=steps(reference_kl=lambda x: 2e-6 * x)),
    "the policy collapsed onto one answer": replace(
        HEALTHY, metrics=steps(success=lambda x: 0.3, entropy=lambda x: max(0.01, 1.0 - 4 * x))
    ),
    "rollouts are cut off": with_rollouts(termination=lambda i: "max_tokens" if i % 3 == 0 else "answered"),
    "wrong action masks": with_samples(action_mask=[False, False, True, True, True, False], logprobs=[-1.0] * 6),
    "log-probs do not match the policy": replace(HEALTHY, metrics=steps(behaviour_kl=lambda x: 0.2)),
    "routes of experts are not replayed": replace(
        HEALTHY, metrics=steps(own_routes_dlogp=lambda x: 0.03 * x, own_routes_max_dlogp=lambda x: 0.8)
    ),
    "the policy runs away (KL blow-up)": replace(HEALTHY, metrics=steps(reference_kl=lambda x: 3 * x * x)),
    "success collapsed": replace(HEALTHY, metrics=steps(success=lambda x: 0.8 - max(0.0, x - 0.5))),
    "success fell in one iteration": replace(HEALTHY, metrics=steps(success=lambda x: 0.1 if 0.1 < x < 0.15 else 0.8)),
    "most updates are clipped": replace(HEALTHY, metrics=steps(clip_share=lambda x: 0.1 + 0.5 * x)),
    "format errors": with_rollouts(termination=lambda i: "format_error" if i % 3 == 0 else "answered"),
    "echo trap": with_rollouts(reward=lambda i: 0.4 if late(i) and i % GROUP else float(i % GROUP < 4)),
    "groups without a difference": with_rollouts(reward=lambda i: 1.0 if late(i) else float(i % 2)),
    "hallucinated tools": with_samples(
        messages=calling(lambda i: {"name": "serch" if i % 4 == 0 else "find", "arguments": f"{i}"})
    ),
    "monotone tool use": with_samples(messages=calling(lambda i: {"name": "find", "arguments": "{}"})),
    "length explosion": with_rollouts(n_tokens=lambda i: 70 + i),
    "format gaming": with_rollouts(
        reward_components=lambda i: [{"name": "format", "value": i / ROLLOUTS}], success=lambda i: i % 3 == 0
    ),
    "the policy became surer, and no better": with_rollouts(
        reward_components=lambda i: [{"name": "confidence", "value": 0.8 + 0.15 * i / ROLLOUTS}],
        success=lambda i: i % 3 == 0,
    ),
    "low effective sample size": replace(HEALTHY, metrics=steps(ess=lambda x: 0.5 - 0.5 * x)),
    "gap between train and held-out": replace(HEALTHY, heldout=(30, 100)),
    "many attempts failed by no doing of the policy": replace(
        HEALTHY, failed=[{"trajectory_id": f"t-{n}", "termination": "env_error"} for n in range(ROLLOUTS // 10)]
    ),
}


def test_what_did_not_move_and_what_collapsed_name_the_learning_rate() -> None:
    for name in ("the policy does not move", "the policy collapsed onto one answer", "success collapsed"):
        [finding] = [finding for finding in examine(SICK[name]) if finding.name == name]
        assert "optimizer.lr" in finding.remedy
        assert "0.0015" in finding.evidence, "the rate that was taken"
    risen = replace(HEALTHY, metrics=steps(entropy=lambda x: max(0.01, 1.0 - 4 * x)))
    assert examine(risen) == [], "sure of what is right is no collapse"
    imitated = steps(entropy=lambda x: max(0.01, 1.0 - 4 * x), success=lambda x: None)
    assert examine(replace(HEALTHY, metrics=imitated)) == [], "to be sure is the aim of a supervised stage"
    still = steps(reference_kl=lambda x: None, behaviour_kl=lambda x: 1e-7)
    assert examine(replace(HEALTHY, metrics=still)) == [], "one update: rollouts are the policy's own"
    [finding] = examine(replace(HEALTHY, metrics=still, updates=2))
    assert finding.evidence.startswith("behaviour_kl is at most 1e-07 nats per token over 24 steps")
    evaluated = replace(with_rollouts(reward=0.5), metrics=[])
    assert "the reward never varies" not in {finding.name for finding in examine(evaluated)}


def test_a_healthy_run_has_no_finding() -> None:
    assert examine(HEALTHY) == []
    assert examine(Case()) == []


@pytest.mark.parametrize("name", SICK)
def test_a_planted_sickness_is_found(name: str) -> None:
    result = {finding.name: finding for finding in examine(SICK[name])}
    assert name in result
    # No check cries wolf beside the planted one, but for groups that are flat because all rewards are equal.
    assert set(result) <= {name, "groups without a difference"}
    finding = result[name]
    assert finding.evidence
    assert finding.threshold
    assert finding.remedy


def test_every_check_has_a_planted_sickness() -> None:
    assert len(SICK) == len(CHECKS)


@pytest.mark.parametrize(
    "changes",
    [
        {"action_mask": [False] * 6},
        {"logprobs": [math.nan] * 6},
        {"logprobs": [math.nan, math.nan, 0.3, -1.0, math.nan, math.nan]},
        {"messages": calling(lambda i: {"name": "find", "arguments": f"{i}"}, times=3)},
    ],
    ids=["no action", "nan", "positive", "loop"],
)
def test_other_forms_of_a_sickness(changes: dict[str, Any]) -> None:
    assert len(examine(with_samples(**changes))) == 1


def test_more_updates_than_one_may_leave_the_sampling_policy() -> None:
    case = replace(HEALTHY, metrics=steps(behaviour_kl=lambda x: 0.2), updates=4)
    assert examine(case) == []


def test_a_fall_names_the_learning_rate_and_the_gradient_norm_before_it() -> None:
    """As a quickstart did: from .80 to .18 after one update with a gradient norm of 3.8, and back in the next."""
    metrics = steps(success=lambda x: 0.18 if 0.1 < x < 0.15 else 0.8)
    metrics[2] |= {"grad_norm": 3.8}
    [finding] = examine(replace(HEALTHY, metrics=metrics))
    assert finding.evidence == "by 0.62 to 0.18 at iteration 3; lr 0.0015 and gradient norm 3.8 before it, usually 0.2"
    assert finding.remedy.startswith("lower optimizer.lr")
    [finding] = examine(SICK["success collapsed"])
    assert "lr 0.0015" in finding.evidence
    assert finding.remedy.startswith("lower optimizer.lr")


@pytest.mark.parametrize(
    ("case", "algorithm", "name"),
    [
        (replace(HEALTHY, metrics=steps(clip_share=lambda x: 0.5)), "gspo", "most updates are clipped"),
        (SICK["groups without a difference"], "remax", "groups without a difference"),
        (SICK["groups without a difference"], "ppo", "groups without a difference"),
    ],
)
def test_what_is_sick_for_one_algorithm_is_healthy_for_another(case: Case, algorithm: str, name: str) -> None:
    assert name in {finding.name for finding in examine(replace(case, algorithm="grpo"))}
    assert name not in {finding.name for finding in examine(replace(case, algorithm=algorithm))}


def test_gspo_leaves_the_sampling_policy_less() -> None:
    case = replace(HEALTHY, metrics=[{**row, "reference_kl": None, "behaviour_kl": 0.2} for row in steps()], updates=4)
    assert examine(case) == []
    [finding] = examine(replace(case, algorithm="gspo"))
    assert finding.name == "the policy runs away (KL blow-up)"
    assert "lr 0.0015" in finding.remedy


def test_drift_of_the_sampler_is_its_own_metric_if_updates_are_anchored_elsewhere() -> None:
    """In bfloat16 ratios are to log-probs of the training pass, so ``behaviour_kl`` is 0 whatever the sampler did."""
    case = replace(HEALTHY, metrics=steps(behaviour_kl=lambda x: 0.0, sampler_kl=lambda x: 0.04), updates=4)
    assert [finding.name for finding in examine(case)] == ["log-probs do not match the policy"]
    assert examine(replace(case, metrics=steps(sampler_kl=lambda x: 0.002))) == []


def test_distances_of_own_routes_are_no_finding_if_they_are_replayed_or_rollouts_are_old() -> None:
    own = {"own_routes_dlogp": lambda x: 0.03, "own_routes_max_dlogp": lambda x: 0.8}
    for more in ({"replayed_routes_dlogp": lambda x: 0.005}, {"max_staleness": lambda x: 1.0}):
        assert examine(replace(HEALTHY, metrics=steps(**own, **more))) == []
    assert examine(replace(HEALTHY, metrics=steps(own_routes_dlogp=lambda x: 0.008))) == []


def test_log_probs_computed_again_must_agree() -> None:
    [row, *_] = HEALTHY.sample
    same = dict.fromkeys([row["trajectory_id"]], row["logprobs"])
    assert examine(replace(HEALTHY, recomputed=same)) == []
    other = {row["trajectory_id"]: [value - 0.2 for value in row["logprobs"]]}
    [finding] = examine(replace(HEALTHY, recomputed=other))
    assert finding.name == "log-probs do not match the policy"
    assert "those of 1 rows differ by 0.2 a token" in finding.evidence


ROWS = {"reward is always zero", "rollouts are cut off", "format errors", "groups without a difference"}
ROWS |= {"hallucinated tools", "length explosion"}
STEPS = {"the policy runs away (KL blow-up)": 23, "success collapsed": 23, "success fell in one iteration": 3}
STEPS |= {"most updates are clipped": 23, "low effective sample size": 23, "routes of experts are not replayed": 23}


@pytest.mark.parametrize("name", sorted(ROWS | set(STEPS)))
def test_a_finding_names_the_rows_or_the_step_that_show_it(name: str) -> None:
    case = SICK[name]
    [finding] = [finding for finding in examine(case) if finding.name == name]
    assert finding.step == STEPS.get(name)
    assert bool(finding.rows) == (name in ROWS)
    assert len(finding.rows) <= SHOWN
    assert set(finding.rows) <= {row["trajectory_id"] for row in [*case.rollouts, *case.sample]}


def test_a_finding_about_tokens_names_the_first_one_in_each_row() -> None:
    [mask] = examine(SICK["wrong action masks"])
    assert (mask.rows[:2], mask.tokens[:2]) == (("t-0", "t-1"), (4, 4))
    [broken] = examine(with_samples(logprobs=[math.nan, math.nan, -1.0, 0.3, math.nan, math.nan]))
    assert (broken.rows[0], broken.tokens[0]) == ("t-0", 3)


def test_bands_are_the_bounds_of_the_checks() -> None:
    """A curve that stays on the healthy side of its band has no finding, and one beyond it has."""
    result = {band.metric: band for band in bands(HEALTHY)}
    assert set(result) == {"reference_kl", "clip_share", "success", "behaviour_kl", "ess"}
    for metric, band in result.items():
        if metric == "success":
            continue
        within, beyond = (band.bound * factor for factor in ((0.99, 1.01) if band.above else (1.01, 0.99)))
        assert examine(replace(HEALTHY, metrics=steps(**{metric: lambda x, value=within: value}))) == []
        assert len(examine(replace(HEALTHY, metrics=steps(**{metric: lambda x, value=beyond: value})))) == 1
    best = bands(replace(HEALTHY, metrics=steps(success=lambda x: 0.8)))
    assert [band.bound for band in best if band.metric == "success"] == [pytest.approx(0.6)]
    assert [band.bound for band in bands(replace(HEALTHY, algorithm="gspo")) if band.metric == "clip_share"] == [0.6]
    assert bands(Case(metrics=[{"step": 0.0, "loss": 1.0}])) == []
