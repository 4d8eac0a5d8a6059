"""Intervals of proportions."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, variance


def wilson(successes: float, total: float, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of ``successes / total``, 95 % by default (Wilson 1927). If ``total`` is 0, it is (0,
    1)."""
    if total == 0:
        return 0.0, 1.0
    share = successes / total
    centre = share + z * z / (2 * total)
    spread = z * sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low, high = (centre - spread) / (1 + z * z / total), (centre + spread) / (1 + z * z / total)
    # Rounding puts the share of 0 of n and of n of n just outside.
    return max(0.0, min(low, share)), min(1.0, max(high, share))


def wilson_of_tasks(outcomes: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """:func:`wilson` if tasks were attempted several times, ``outcomes`` by task: attempts at one task resemble each
    other, so the interval is that of fewer, as many as have the variance of the mean over tasks (the effective sample
    size: Kish 1965). It is between the number of tasks and that of attempts; if nothing varies, it is the number of
    tasks."""
    return wilson_of_means([fmean(each) for each in outcomes], sum(map(len, outcomes)))


def wilson_of_means(means: Sequence[float], attempts: int) -> tuple[float, float]:
    """The same of a share that is known of each task, from ``attempts`` at all of them."""
    share, tasks = fmean(means), len(means)
    spread = variance(means) / tasks if tasks > 1 else 0.0
    number = share * (1 - share) / spread if spread else tasks
    effective = min(max(number, tasks), attempts)
    return wilson(share * effective, effective)
