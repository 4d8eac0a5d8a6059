"""Attempts that are in no rate, because they failed by no doing of the policy."""

from collections.abc import Iterable

from agentrl.schemas.trajectory import INFRASTRUCTURE

MOST_EXCLUDED = 0.05
"""Share of attempts that may fail by no doing of the policy. Beyond it, whoever shows a rate of the others says so."""


def excluded(ends: Iterable[str]) -> int:
    """How many rollouts with these ends failed by no doing of the policy, and are in no rate."""
    return sum(end in INFRASTRUCTURE for end in ends)


def said_of_excluded(number: int, attempts: int) -> str:
    """What a rate of the others is worth, if more than :data:`MOST_EXCLUDED` of ``attempts`` are in no rate; else the
    empty text."""
    if number <= MOST_EXCLUDED * attempts:
        return ""
    return (
        f"{number} of {attempts} attempts ({number / attempts:.0%}, more than {MOST_EXCLUDED:.0%}) failed by no doing "
        "of the policy and are in no rate, so the rates are those of the rest, which may be the easier ones"
    )
