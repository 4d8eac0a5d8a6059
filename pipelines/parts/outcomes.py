"""How the rollouts of a stage ended. If most of them ended badly in the same way, the output of the run says so."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import pyarrow as pa

from agentrl.pipelines.parts.common import count
from agentrl.pipelines.stage import Context
from agentrl.rollouts.outcomes import LIMITS, shares_of_ends
from agentrl.schemas.trajectory import INFRASTRUCTURE, Termination, Trajectory
from agentrl.statistics.excluded import excluded, said_of_excluded

if TYPE_CHECKING:
    from agentrl.rollouts.demonstrations import Demonstrations
    from agentrl.rollouts.runner import RolloutRunner

MOST = 0.5
"""Share of the rollouts from which on a stage warns."""

FEW = 8
"""With fewer rollouts nothing is said."""

ENDS = ("limited", "format_errors")
"""Names of the shares of :func:`shares_of_ends`."""


FAILURES = {
    "retried": "attempts failed by no doing of the policy and were made again, as limits.retry says",
    "env_errors": "the environment raised, which ended the episode without a score",
    "infra_errors": "a server, a sandbox or the network failed, which ended the episode without a score",
    "tool_exceptions": "a tool raised, and the policy read that as an error of the tool",
    "tool_timeouts": "a tool took longer than limits.tool_s",
}
"""What is no doing of the policy, by its name among the counts of a runner."""


@dataclass
class EpisodeCounts:
    """What went wrong in episodes: ``counts``, ``tries`` and ``first`` of
    :class:`agentrl.rollouts.runner.RolloutRunner`, of several of them."""

    counts: Counter[str] = field(default_factory=Counter)
    tries: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, other: "EpisodeCounts") -> None:
        self.counts.update(other.counts)
        self.tries.update(other.tries)
        self.first = {**other.first, **self.first}


def record_failures(context: Context, *runners: Union["RolloutRunner", EpisodeCounts]) -> None:
    """Put what went wrong in episodes into the metrics, and warn of what is no doing of the policy."""
    for runner in runners:
        failed = any(runner.counts[name] for name in ("retried", "env_errors", "infra_errors"))
        count(context, runner.counts + runner.tries if failed else runner.counts)
        for name, what in FAILURES.items():
            if runner.counts[name]:
                warnings.warn(f"{name} {runner.counts[name]}: {what}; the first is {runner.first[name]}", stacklevel=3)


def record_excluded(context: Context, rows: pa.Table, what: str = "rollouts") -> None:
    """Count, and warn of, ``rows`` (columns ``task_id`` and ``termination``) that failed by no doing of the policy: the
    metric ``excluded``, and ``tasks_lost``, tasks of which no row is left."""
    ends, tasks = rows["termination"].to_pylist(), rows["task_id"].to_pylist()
    number = excluded(ends)
    if not number:
        return
    left = {task for task, end in zip(tasks, ends, strict=True) if end not in INFRASTRUCTURE}
    lost = [task for task in dict.fromkeys(tasks) if task not in left]
    count(context, {"excluded": number})
    if lost:
        context.metrics["tasks_lost"] = max(len(lost), int(context.metrics.get("tasks_lost") or 0))
    if doubt := said_of_excluded(number, len(ends)):
        warnings.warn(f"{what}: {doubt}", stacklevel=3)
    if lost:
        named = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        warnings.warn(
            f"{what}: all attempts at {len(lost)} of {len(set(tasks))} tasks failed by no doing of the policy, so "
            f"nothing is known of them: {named}; set limits.retry.attempts higher, or mend the environment",
            stacklevel=3,
        )


def record_excluded_of(context: Context, iterations: Sequence[Mapping[str, float]], episodes: int) -> None:
    """The same from the metrics of online iterations of so many ``episodes``."""
    number = int(sum(row.get("excluded", 0.0) for row in iterations))
    count(context, {"excluded": number} if number else {})
    if doubt := said_of_excluded(number, episodes):
        warnings.warn(f"rollouts: {doubt}", stacklevel=3)


def warn_of_demonstrations(rows: Sequence[Trajectory], successes: int, expert: "Demonstrations") -> None:
    """Warn if no demonstration succeeded, or if environments failed, or tools raised in some."""
    if expert.counts:
        warnings.warn(
            f"environments failed in demonstrations: {expert.counts['retried']} were begun again, and "
            f"{expert.counts['env_errors']} tasks have none; the last: {type(expert.error).__name__}: {expert.error}",
            stacklevel=3,
        )
    raised = [row.trajectory_id for row in rows if any(tag.startswith("tool_exceptions:") for tag in row.tags)]
    if raised:
        warnings.warn(
            f"tools raised in {len(raised)} of {len(rows)} demonstrations, and the expert read that as errors of the "
            f"tools; the first: {raised[0]} (`agentrl buffer show {raised[0]}`)",
            stacklevel=3,
        )
    if rows and not successes:
        warnings.warn(
            f"none of {len(rows)} demonstrations succeeded: check demonstrate() of the environment, and its score on a "
            "known good answer",
            stacklevel=3,
        )


def out_of_context(rows: pa.Table) -> int:
    """How many rollouts ran out of context, or of segments. Losses leave them out."""
    return rows["termination"].to_pylist().count(Termination.MAX_CONTEXT)


def warn_of_ends(rows: pa.Table, what: str = "rollouts") -> None:
    """Warn if most rollouts ended by a limit or in format errors, or if none succeeded. ``rows`` has the columns
    ``termination`` and ``success``."""
    ends = Counter(end for end in rows["termination"].to_pylist() if end not in INFRASTRUCTURE)
    by = ", ".join(f"{end} {ends[end] / ends.total():.0%}" for end in LIMITS if ends[end])
    success = [success for success in rows["success"].to_pylist() if success is not None]
    warn_of_shares(shares_of_ends(ends.elements()), ends.total(), sum(success) if success else None, what, by)


def warn_of_shares(
    shares: Mapping[str, float], number: int, successes: float | None, what: str = "rollouts", by: str = ""
) -> None:
    """The same from the ``shares`` of :func:`shares_of_ends`; without ``successes`` nothing is said of them."""
    if number < FEW:
        return
    if shares["limited"] > MOST:
        warnings.warn(
            f"{shares['limited']:.0%} of {number} {what} ended by a limit{f' ({by})' if by else ''}: raise max_tokens "
            "or max_turn_tokens, or the environment's max_steps, or train the policy to end its turns first",
            stacklevel=3,
        )
    if shares["format_errors"] > MOST:
        warnings.warn(
            f"{shares['format_errors']:.0%} of {number} {what} ended in format errors: the policy does not speak the "
            "dialect of its tools; look at one with `agentrl buffer show ID`, and warm up with demonstrations",
            stacklevel=3,
        )
    if successes == 0:
        warnings.warn(
            f"none of {number} {what} succeeded: check the environment's score on a known good answer, warm up with "
            "demonstrations, or take easier tasks",
            stacklevel=3,
        )
