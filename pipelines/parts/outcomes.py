"""How the rollouts of a stage ended. If most of them ended badly in the same way, the output of the run says so."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from agentrl.pipelines.parts.common import count
from agentrl.pipelines.stage import Context
from agentrl.rollouts.outcomes import LIMITS, shares_of_ends
from agentrl.schemas.trajectory import Termination, Trajectory

if TYPE_CHECKING:
    from agentrl.rollouts.runner import RolloutRunner

MOST = 0.5
"""Share of the rollouts from which on a stage warns."""

FEW = 8
"""With fewer rollouts nothing is said."""

ENDS = ("limited", "format_errors")
"""Names of the shares of :func:`shares_of_ends`."""


FAILURES = {
    "env_errors": "the environment raised, which ended the episode without a score",
    "infra_errors": "a server, a sandbox or the network failed, which ended the episode without a score",
    "tool_exceptions": "a tool raised, and the policy read that as an error of the tool",
    "tool_timeouts": "a tool took longer than limits.tool_s",
}
"""What is no doing of the policy, by its name among the counts of a runner."""


def record_failures(context: Context, *runners: "RolloutRunner") -> None:
    """Put what went wrong in episodes into the metrics, and warn of what is no doing of the policy."""
    for runner in runners:
        count(context, runner.counts)
        for name, what in FAILURES.items():
            if runner.counts[name]:
                warnings.warn(f"{name} {runner.counts[name]}: {what}; the first is {runner.first[name]}", stacklevel=3)


def warn_of_demonstrations(rows: Sequence[Trajectory], successes: int) -> None:
    """Warn if no demonstration succeeded, or tools raised in some."""
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
    ends = Counter(rows["termination"].to_pylist())
    by = ", ".join(f"{end} {ends[end] / len(rows):.0%}" for end in LIMITS if ends[end])
    success = [success for success in rows["success"].to_pylist() if success is not None]
    warn_of_shares(shares_of_ends(ends.elements()), len(rows), sum(success) if success else None, what, by)


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
