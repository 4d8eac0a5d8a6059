"""How rollouts ended."""

from collections import Counter
from collections.abc import Iterable

from schemas.trajectory import Termination

LIMITS = (Termination.MAX_TOKENS, Termination.MAX_STEPS, Termination.MAX_CONTEXT, Termination.TIME_LIMIT)
"""Ends that a limit brought about, not the policy."""


def shares_of_ends(ends: Iterable[str]) -> dict[str, float]:
    """Shares of rollouts that were ``limited`` and of those with ``format_errors``; 0 without rollouts."""
    found = Counter(ends)
    total = max(1, found.total())
    return {
        "limited": sum(found[end] for end in LIMITS) / total,
        "format_errors": found[Termination.FORMAT_ERROR] / total,
    }
