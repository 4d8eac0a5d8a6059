"""How rollouts ended, and what went wrong in them."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.engines.base import Usage
from agentrl.rollouts.exploring import ENDED_THINKING, RESAMPLED
from agentrl.schemas.trajectory import INFRASTRUCTURE, Termination

LIMITS = (Termination.MAX_TOKENS, Termination.MAX_STEPS, Termination.MAX_CONTEXT, Termination.TIME_LIMIT)
"""Ends that a limit brought about, not the policy."""


def shares_of_ends(ends: Iterable[str]) -> dict[str, float]:
    """Shares of rollouts that were ``limited`` and of those with ``format_errors``; 0 without rollouts. Those that
    failed by no doing of the policy are left out."""
    counts = Counter(end for end in ends if end not in INFRASTRUCTURE)
    total = max(1, counts.total())
    return {
        "limited": sum(counts[end] for end in LIMITS) / total,
        "format_errors": counts[Termination.FORMAT_ERROR] / total,
    }


REPLAY_DIFFERS = "replay_differs"
"""Answers of a replay that are others than those of the row that is continued."""

COUNTED = (
    *("tool_timeouts", "tool_exceptions", "observations_cut", "faults", "format_errors", "empty_summaries"),
    *(RESAMPLED, "resampled_tokens", "random_calls", ENDED_THINKING, REPLAY_DIFFERS),
)
"""What an episode's tags and a stage's metrics count, of the numbers that steps give."""


def tags_of(info: Mapping[str, int]) -> list[str]:
    """What an episode's tags say of the numbers that its steps gave."""
    return [f"{name}:{info[name]}" for name in COUNTED if info.get(name)]


_LATENCY = "latency_s"


def spent(usage: Usage | None) -> dict[str, Any]:
    """The columns of a row that say what its turns took at an endpoint."""
    if usage is None:
        return {}
    counted = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    return {**counted, "cost_usd": usage.cost}


def latency_tags(usage: Usage | None) -> list[str]:
    """The tag that says how many seconds an endpoint took for the turns of a row."""
    return [] if usage is None else [f"{_LATENCY}:{usage.seconds:.2f}"]


def latency_of(tags: Iterable[str]) -> float | None:
    """Seconds that an endpoint took for a row with these tags; None if they do not say."""
    seconds = (tag.removeprefix(f"{_LATENCY}:") for tag in tags if tag.startswith(f"{_LATENCY}:"))
    return next(map(float, seconds), None)
