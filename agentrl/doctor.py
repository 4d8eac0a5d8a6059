"""What is wrong with a training run, from its rollouts and metrics: each finding with evidence, threshold and remedy.

Every check is a pure function of a :class:`Case`; a healthy run has no finding. Early and late are the first and last
third of a run's rollouts or steps.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from agentrl.statistics.intervals import wilson

Row = dict[str, Any]

LIGHT = ["trajectory_id", "task_id", "group_id", "split", "reward", "success", "termination", "reward_components"]
LIGHT += ["n_tokens", "n_action_tokens", "n_tool_calls", "n_tool_errors"]
"""Columns of the buffer that every rollout is read with."""

HEAVY = ["trajectory_id", "task_id", "messages", "tools", "input_ids", "action_mask", "logprobs"]
"""Columns that a sample of the rollouts is read with."""

FEW = 16
"""With fewer rollouts nothing is said about shares."""


@dataclass(frozen=True)
class Finding:
    """One sickness. ``evidence`` is what was measured, ``threshold`` from where on it is called sick."""

    name: str
    evidence: str
    threshold: str
    remedy: str


@dataclass(frozen=True)
class Case:
    """One stage of a run: ``rollouts`` in order (:data:`LIGHT`), a ``sample`` of them (:data:`HEAVY`), ``metrics`` by
    step, and (successes, tasks) on the ``heldout`` split. Each may be empty. ``updates`` is the optimiser steps of an
    iteration: with one, rollouts come from the very policy that is updated. ``recomputed`` holds, by id, log-probs of
    some of the sample under the policy that is said to have made it."""

    rollouts: Sequence[Row] = ()
    sample: Sequence[Row] = ()
    metrics: Sequence[Row] = ()
    heldout: tuple[int, int] | None = None
    updates: int = 1
    recomputed: Mapping[str, Sequence[float]] = field(default_factory=dict)


def examine(case: Case) -> list[Finding]:
    """All findings, in the order of :data:`CHECKS`."""
    return [finding for check in CHECKS if (finding := check(case)) is not None]


def _thirds(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    third = max(1, len(values) // 3)
    return values[:third], values[-third:]


def _share(rows: Iterable[bool]) -> float:
    flags = list(rows)
    return sum(flags) / len(flags) if flags else 0.0


def _series(case: Case, name: str) -> list[float]:
    return [row[name] for row in case.metrics if row.get(name) is not None]


def _names(rows: Sequence[str]) -> str:
    return ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


def reward_zero(case: Case) -> Finding | None:
    rows = case.rollouts
    if len(rows) < FEW or any(row["reward"] != 0 for row in rows):
        return None
    return Finding(
        "reward is always zero",
        f"all {len(rows)} rollouts have reward 0",
        "at least one rollout with another reward",
        "check the verifier on a known good answer; warm up with supervised training; use easier tasks or hints",
    )


def truncation(case: Case) -> Finding | None:
    share = _share(row["termination"] == "max_tokens" for row in case.rollouts)
    if len(case.rollouts) < FEW or share <= 0.2:
        return None
    return Finding(
        "rollouts are cut off",
        f"{share:.0%} of {len(case.rollouts)} rollouts ended by max_tokens",
        "20 %",
        "raise max_tokens or max_turn_tokens, or punish length softly (overlong: {limit, buffer})",
    )


def masks(case: Case) -> Finding | None:
    """Action tokens outside assistant spans, or none at all."""
    outside, none = [], []
    for row in case.sample:
        if not row["input_ids"]:
            continue
        spans = [
            (m["token_start"], m["token_end"])
            for m in row["messages"]
            if m["role"] == "assistant" and m["token_start"] is not None
        ]
        inside = [False] * len(row["input_ids"])
        for start, end in spans:
            inside[start:end] = [True] * (end - start)
        if not any(row["action_mask"]):
            none.append(row["trajectory_id"])
        elif any(action and not within for action, within in zip(row["action_mask"], inside, strict=False)):
            outside.append(row["trajectory_id"])
    if not outside and not none:
        return None
    return Finding(
        "wrong action masks",
        f"{len(outside)} rows with action tokens outside assistant messages ({_names(outside) or '-'}), "
        f"{len(none)} without any ({_names(none) or '-'}), of {len(case.sample)} looked at",
        "none",
        "look at one with `agentrl buffer show ID --tokens`; fix the chat template or the import that made the mask",
    )


def logprobs(case: Case) -> Finding | None:
    """Behaviour log-probs that are no log-probs, or not those of the policy that sampled, or that is updated."""
    broken, gaps = [], []
    for row in case.sample:
        known = [value for value, action in zip(row["logprobs"], row["action_mask"], strict=False) if action]
        if not all(math.isfinite(value) and value <= 1e-4 for value in known):
            broken.append(row["trajectory_id"])
        elif known and row["trajectory_id"] in case.recomputed:
            again = case.recomputed[row["trajectory_id"]]
            new = [value for value, action in zip(again, row["action_mask"], strict=True) if action]
            gaps.append(fmean(abs(a - b) for a, b in zip(known, new, strict=True)))
    gap = fmean(gaps) if gaps else 0.0
    drift = max(_series(case, "behaviour_kl"), default=0.0) if case.updates == 1 else 0.0
    if not broken and drift <= 0.01 and gap <= 0.05:
        return None
    return Finding(
        "log-probs do not match the policy",
        f"{len(broken)} rows with log-probs that are not finite or above 0 ({_names(broken) or '-'}); "
        f"computed again under the policy that sampled, those of {len(gaps)} rows differ by {gap:.3g} a token; "
        f"divergence of the updated policy from the one that sampled is up to {drift:.3g} before its update",
        "none; 0.05; and 0.01 where rollouts are of the policy that is updated",
        "sample and train with the same weights, precision and temperature, or set off_policy: {truncate: 2}",
    )


def kl_blow_up(case: Case) -> Finding | None:
    series = _series(case, "reference_kl") or (_series(case, "behaviour_kl") if case.updates > 1 else [])
    if len(series) < 3 or max(series) <= 0.5:
        return None
    return Finding(
        "the policy runs away (KL blow-up)",
        f"divergence went from {series[0]:.3g} to {max(series):.3g} nats per token",
        "0.5",
        "lower lr, raise kl.coef, or take fewer updates per iteration",
    )


def collapse(case: Case) -> Finding | None:
    series = _series(case, "success")
    width = max(2, len(series) // 8)
    if len(series) < 4 * width:
        return None
    windows = [fmean(series[start : start + width]) for start in range(len(series) - width + 1)]
    if max(windows) - windows[-1] <= 0.2:
        return None
    return Finding(
        "success collapsed",
        f"mean success fell from {max(windows):.2f} to {windows[-1]:.2f} (over {width} steps)",
        "a fall of 0.2",
        "go back to the checkpoint before the fall with a lower lr; clip harder; add kl",
    )


def echo_trap(case: Case) -> Finding | None:
    """Entropy and the spread of rewards fall while the reward does not rise (RAGEN: Wang et al. 2025)."""
    entropy = _series(case, "entropy")
    if len(entropy) < 6 or len(case.rollouts) < 6 * FEW:
        return None
    before, after = (fmean(part) for part in _thirds(entropy))
    early, late = ([row["reward"] for row in part] for part in _thirds(case.rollouts))
    spread = _spread(_thirds(case.rollouts)[0]), _spread(_thirds(case.rollouts)[1])
    if spread[0] == 0 or after > 0.5 * before or spread[1] > 0.5 * spread[0] or fmean(late) > fmean(early) + 0.02:
        return None
    return Finding(
        "echo trap",
        f"entropy {before:.3g} -> {after:.3g}, spread of rewards within groups {spread[0]:.3g} -> {spread[1]:.3g}, "
        f"reward {fmean(early):.3g} -> {fmean(late):.3g}",
        "entropy and spread halve while the reward rises by less than 0.02",
        "keep uncertain groups (keep_uncertain: 0.25), clip higher (clip_high: 0.28), add an entropy bonus, vary tasks",
    )


def _groups(rows: Sequence[Row]) -> list[list[float]]:
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[row["group_id"] or row["task_id"], place // 4096].append(row["reward"])
    return [rewards for rewards in groups.values() if len(rewards) > 1]


def _spread(rows: Sequence[Row]) -> float:
    return fmean([pstdev(rewards) for rewards in _groups(rows)] or [0.0])


def zero_std(case: Case) -> Finding | None:
    late = _groups(_thirds(case.rollouts)[1]) if case.rollouts else []
    flat = [rewards for rewards in late if max(rewards) == min(rewards)]
    if len(late) < FEW // 2 or len(flat) <= 0.8 * len(late):
        return None
    solved = sum(rewards[0] > 0 for rewards in flat)
    remedy = "harder tasks" if solved > len(flat) / 2 else "easier tasks, hints, or more samples per task"
    return Finding(
        "groups without a difference",
        f"{len(flat)} of the last {len(late)} groups have equal rewards throughout ({solved} all solved)",
        "80 %",
        f"{remedy}; dynamic sampling (algorithm dapo, or resample: 2)",
    )


def _calls(row: Row) -> list[Row]:
    return [call for message in row["messages"] for call in message.get("tool_calls") or []]


def hallucinated_tools(case: Case) -> Finding | None:
    unknown: Counter[str] = Counter()
    total = 0
    for row in case.sample:
        known = {tool.get("function", tool).get("name") for tool in json.loads(row["tools"] or "[]")}
        for call in _calls(row) if known else []:
            total += 1
            if call["name"] not in known:
                unknown[call["name"]] += 1
    if total < FEW or sum(unknown.values()) <= 0.05 * total:
        return None
    return Finding(
        "hallucinated tools",
        f"{sum(unknown.values())} of {total} calls are of tools that do not exist: {_names(list(unknown))}",
        "5 %",
        "show the tools in the chat template; reject such rows; add negative examples",
    )


def tool_loops(case: Case) -> Finding | None:
    """The same call again and again in one episode, or the same first call whatever the task."""
    used = [row for row in case.sample if _calls(row)]
    if len(used) < FEW:
        return None
    looping = []
    first: Counter[tuple[str, str]] = Counter()
    for row in used:
        calls = [(call["name"], call["arguments"]) for call in _calls(row)]
        first[calls[0]] += 1
        if max(Counter(calls).values()) >= 3:
            looping.append(row["trajectory_id"])
    tasks = len({row["task_id"] for row in used})
    [(call, times)] = first.most_common(1)
    monotone = tasks >= 8 and times > 0.9 * len(used)
    if len(looping) <= 0.1 * len(used) and not monotone:
        return None
    what = f"{times} of {len(used)} rollouts of {tasks} tasks begin with {call[0]} {call[1]}" if monotone else ""
    loops = f"{len(looping)} of {len(used)} rollouts repeat a call three times or more ({_names(looping)})"
    return Finding(
        "monotone tool use",
        what or loops,
        "10 % of rollouts with a loop; 90 % with the same first call",
        "penalise repeated calls in the reward, lower the temperature of the warm-up data, filter loops out (reject)",
    )


def length_explosion(case: Case) -> Finding | None:
    if len(case.rollouts) < 6 * FEW:
        return None
    early, late = (fmean([row["n_tokens"] for row in part]) for part in _thirds(case.rollouts))
    if not early or late <= 2 * early:
        return None
    return Finding(
        "length explosion",
        f"tokens per rollout went from {early:.0f} to {late:.0f}",
        "twice the early length",
        "aggregate: constant (Dr. GRPO) or token (DAPO), and overlong: {limit, buffer}",
    )


def format_gaming(case: Case) -> Finding | None:
    if len(case.rollouts) < 6 * FEW:
        return None
    early, late = _thirds(case.rollouts)

    def formats(rows: Sequence[Row]) -> float:
        values = [c["value"] for row in rows for c in row["reward_components"] or [] if "format" in c["name"]]
        return fmean(values) if values else 0.0

    gain = formats(late) - formats(early)
    outcome = _share(row["success"] for row in late) - _share(row["success"] for row in early)
    if gain < 0.2 or outcome > 0.02:
        return None
    return Finding(
        "format gaming",
        f"the format reward rose by {gain:.2f} while success changed by {outcome:+.2f}",
        "a rise of 0.2 with success up by less than 0.02",
        "lower the weight of the format reward, or give it only where the outcome is right",
    )


def low_ess(case: Case) -> Finding | None:
    series = _series(case, "ess")
    if not series or fmean(series) >= 0.3:
        return None
    return Finding(
        "low effective sample size",
        f"mean {fmean(series):.2f} of the rows, lowest {min(series):.2f}",
        "0.3",
        "use fresher rollouts (max_staleness), fewer updates per iteration, truncated weights, or min_ess",
    )


def generalisation_gap(case: Case) -> Finding | None:
    late = [row for row in (_thirds(case.rollouts)[1] if case.rollouts else []) if row["split"] == "train"]
    if case.heldout is None or len(late) < FEW or case.heldout[1] < FEW:
        return None
    solved = sum(row["success"] for row in late)
    low, high = wilson(solved, len(late))[0], wilson(*case.heldout)[1]
    train, heldout = solved / len(late), case.heldout[0] / case.heldout[1]
    if train - heldout <= 0.15 or low <= high:
        return None
    return Finding(
        "gap between train and held-out",
        f"success {train:.2f} on the last training rollouts, {heldout:.2f} on {case.heldout[1]} held-out tasks",
        "0.15, with intervals apart",
        "more, and more varied, training tasks; fewer steps; check that splits are disjoint in kind, not in wording",
    )


CHECKS: tuple[Callable[[Case], Finding | None], ...] = (
    reward_zero,
    truncation,
    masks,
    logprobs,
    kl_blow_up,
    collapse,
    echo_trap,
    zero_std,
    hallucinated_tools,
    tool_loops,
    length_explosion,
    format_gaming,
    low_ess,
    generalisation_gap,
)
