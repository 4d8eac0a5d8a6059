"""The input of the doctor's checks, and their findings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]

LIGHT = ["trajectory_id", "task_id", "group_id", "split", "reward", "success", "termination", "reward_components"]
LIGHT += ["n_tokens", "n_action_tokens", "n_tool_calls", "n_tool_errors"]
"""Columns of the buffer that every rollout is read with."""

HEAVY = ["trajectory_id", "task_id", "messages", "tools", "input_ids", "action_mask", "logprobs"]
"""Columns that a sample of the rollouts is read with."""

SHOWN = 50
"""Rows that a finding names."""

FEW = 16
"""With fewer rollouts, checks of shares find nothing."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``evidence`` is what was measured, ``threshold`` is the bound beyond which it counts as
    sick. ``rows`` are ids of rollouts that show it, at most :data:`SHOWN`, ``tokens`` the place in each of them, if
    tokens show it, and ``step`` is the step of training that shows it best."""

    name: str
    evidence: str
    threshold: str
    remedy: str
    rows: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    step: int | None = None


@dataclass(frozen=True)
class Case:
    """One stage of a run: ``rollouts`` in order (:data:`LIGHT`), a ``sample`` of them (:data:`HEAVY`), ``metrics`` by
    step, and (successes, tasks) on the ``heldout`` split. Each may be empty. ``updates`` is the optimiser steps of an
    iteration: with one, rollouts come from the same policy that is updated. ``algorithm`` is the type of the algorithm
    that trained, which decides some thresholds. ``recomputed`` holds, by id, log-probs of some of the sample under the
    policy that is said to have made it. ``control`` is false if an evaluation of a trained policy lacks the control
    for sharpening. ``failed`` are the rollouts that failed by no doing of the policy, which are not in ``rollouts``."""

    rollouts: Sequence[Row] = ()
    sample: Sequence[Row] = ()
    metrics: Sequence[Row] = ()
    heldout: tuple[int, int] | None = None
    updates: int = 1
    algorithm: str = ""
    recomputed: Mapping[str, Sequence[float]] = field(default_factory=dict)
    control: bool = True
    failed: Sequence[Row] = ()


def thirds(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    third = max(1, len(values) // 3)
    return values[:third], values[-third:]


def share_of(rows: Iterable[bool]) -> float:
    flags = list(rows)
    return sum(flags) / len(flags) if flags else 0.0


def curve(case: Case, name: str) -> list[float]:
    return [row[name] for row in case.metrics if row.get(name) is not None]


def step_of(case: Case, name: str, best: Callable[..., Row]) -> int:
    """The step at which a metric is highest (``best`` is ``max``) or lowest (``min``)."""
    known = [row for row in case.metrics if row.get(name) is not None]
    return int(best(known, key=lambda row: row[name])["step"])


def names(rows: Sequence[str]) -> str:
    return ", ".join(rows[:3]) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
