"""Intervals of proportions."""

from math import sqrt


def wilson(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
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
