"""How well scores in [0, 1] rank outcomes, and how well they hold as probabilities. Outcomes are 0 or 1, or
probabilities themselves where the measure says so."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class CalibrationBin(NamedTuple):
    """The scores in ``[low, high)``; the last bin has its end too. ``score`` and ``outcome`` are means of the
    ``rows`` in it."""

    low: float
    high: float
    rows: int
    score: float
    outcome: float


def auc(scores: Sequence[float], outcomes: Sequence[bool]) -> float | None:
    """The share of pairs of a success and a failure in which the success has the higher score; equal scores count
    half (the statistic of Mann and Whitney 1947). None without a success or without a failure."""
    truth = np.asarray(outcomes, bool)
    successes, failures = int(truth.sum()), int((~truth).sum())
    if not successes or not failures:
        return None
    _, level, counts = np.unique(np.asarray(scores, float), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[level]  # equal scores share the mean of their ranks
    return float((ranks[truth].sum() - successes * (successes + 1) / 2) / (successes * failures))


def auc_within(scores: Sequence[float], outcomes: Sequence[bool], groups: Sequence[object]) -> list[float]:
    """:func:`auc` of each group, such as a task, that has both outcomes. Scores that only tell easy tasks from hard
    ones are at 0.5 in each."""
    rows: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    measured = (auc([scores[row] for row in each], [outcomes[row] for row in each]) for each in rows.values())
    return [value for value in measured if value is not None]


def brier(scores: Sequence[float], outcomes: Sequence[float]) -> float:
    """The mean squared distance of scores to outcomes (Brier 1950). The best constant, the mean outcome, has the
    variance of the outcomes; outcomes may be probabilities."""
    return float(np.mean((np.asarray(scores, float) - np.asarray(outcomes, float)) ** 2))


def calibration(scores: Sequence[float], outcomes: Sequence[float], bins: int = 10) -> list[CalibrationBin]:
    """The scores in ``bins`` intervals of equal width; those without a score are left out. Outcomes may be
    probabilities."""
    given, truth = np.asarray(scores, float), np.asarray(outcomes, float)
    number = np.clip((given * bins).astype(int), 0, bins - 1)
    return [
        CalibrationBin(
            index / bins,
            (index + 1) / bins,
            int(inside.sum()),
            float(given[inside].mean()),
            float(truth[inside].mean()),
        )
        for index in range(bins)
        if (inside := number == index).any()
    ]


def ece(bins: Sequence[CalibrationBin]) -> float:
    """Expected calibration error: how far the mean score of a bin is from its mean outcome, on average over scores
    (Guo et al. 2017, equation 3)."""
    total = sum(each.rows for each in bins)
    return sum(abs(each.score - each.outcome) * each.rows for each in bins) / total
