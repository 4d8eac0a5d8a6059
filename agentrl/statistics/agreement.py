"""Agreement of raters: Cohen's kappa (1960) of two, Krippendorff's alpha (2004) of any number, with missing answers.
Intervals are of bootstrap samples of the units that were rated (Efron 1979)."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000
AT_ONCE = 2**22  # numbers


def kappa(cells: Mapping[tuple[Any, Any], int]) -> float | None:
    """Cohen's kappa (Cohen 1960) of two raters; ``cells`` counts each pair of their answers. None if chance alone makes
    them agree always, or if there is no pair."""
    total = sum(cells.values())
    if not total:
        return None
    answers = {answer for pair in cells for answer in pair}
    agreed = sum(cells.get((answer, answer), 0) for answer in answers) / total
    first = {answer: sum(count for (says, _), count in cells.items() if says == answer) for answer in answers}
    second = {answer: sum(count for (_, says), count in cells.items() if says == answer) for answer in answers}
    chance = sum(first[answer] * second[answer] for answer in answers) / total**2
    return None if chance == 1 else (agreed - chance) / (1 - chance)


def kappa_with_interval(pairs: Sequence[tuple[Hashable, Hashable]], seed: int = 0) -> dict[str, Any]:
    """``value``, ``low`` and ``high`` of :func:`kappa` over the answers of two raters to the same ``units``, and the
    share that ``agreed``."""
    cells = Counter(pairs)
    kinds = list(cells)
    weights = np.array([cells[pair] for pair in kinds]) / max(1, len(pairs))
    draws: Any = np.random.default_rng(seed).multinomial(len(pairs), weights, RESAMPLES) if pairs else []
    values = [kappa({pair: int(n) for pair, n in zip(kinds, drawn, strict=True) if n}) for drawn in draws]
    agreed = sum(count for (a, b), count in cells.items() if a == b) / len(pairs) if pairs else None
    return {"value": kappa(cells), **_bounds(values), "units": len(pairs), "agreed": agreed}


def alpha(units: Sequence[Sequence[Any]], *, numbers: bool = False) -> float | None:
    """Krippendorff's alpha, 1 - observed / expected disagreement; ``units`` has for each unit what its raters say, of
    which units with one rater do not count. Answers differ or not (nominal data), or with ``numbers`` by the square of
    their difference (interval data). None if all say the same everywhere."""
    return _alpha(*_counted(units, numbers))


def _alpha(counts: np.ndarray, distance: np.ndarray) -> float | None:
    [value] = _alphas(counts, distance, np.ones((1, len(counts))))
    return None if np.isnan(value) else float(value)


def alpha_with_interval(units: Sequence[Sequence[Any]], *, numbers: bool = False, seed: int = 0) -> dict[str, Any]:
    """``value``, ``low`` and ``high`` of :func:`alpha`, the number of ``units`` with two raters or more, and the share
    of pairs of raters that ``agreed``, in the mean over units."""
    counts, distance = _counted(units, numbers)
    generator, values, left = np.random.default_rng(seed), list[float](), RESAMPLES if len(counts) else 0
    while left:
        rows = min(left, max(1, AT_ONCE // len(counts)))
        drawn = generator.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), rows)
        values += _alphas(counts, distance, drawn).tolist()
        left -= rows
    raters = counts.sum(1)
    same = (counts * (counts - 1)).sum(1) / (raters * (raters - 1)) if len(counts) else np.zeros(0)
    bounds = _bounds([None if np.isnan(value) else value for value in values])
    agreed = float(same.mean()) if len(same) else None
    return {"value": _alpha(counts, distance), **bounds, "units": len(counts), "agreed": agreed}


def _counted(units: Sequence[Sequence[Any]], numbers: bool) -> tuple[np.ndarray, np.ndarray]:
    """How many raters of each unit gave each answer, [units, answers], and how far answers are apart, [answers,
    answers]."""
    rated = [unit for unit in units if len(unit) > 1]
    answers = sorted({answer for unit in rated for answer in unit})
    places = {answer: number for number, answer in enumerate(answers)}
    counts = np.zeros((len(rated), len(answers)))
    for row, unit in enumerate(rated):
        for answer in unit:
            counts[row, places[answer]] += 1
    if not numbers:
        return counts, 1.0 - np.eye(len(answers))
    values = np.array(answers, dtype=float)
    return counts, (values[:, None] - values[None]) ** 2


def _alphas(counts: np.ndarray, distance: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Alpha of samples of the units, [samples]; ``weights`` say how often each has each unit, [samples, units]. NaN if
    nothing disagrees with anything."""
    if not len(counts):
        return np.full(len(weights), np.nan)
    within = np.einsum("ua,ab,ub->u", counts, distance, counts) / (counts.sum(1) - 1)
    pooled = weights @ counts  # [samples, answers]
    total = pooled.sum(1)
    expected = np.einsum("sa,ab,sb->s", pooled, distance, pooled) / (total - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(expected > 0, 1 - (weights @ within) / expected, np.nan)


def _bounds(values: Sequence[float | None]) -> dict[str, float | None]:
    """The interval that holds 95 % of the values that are known; None if fewer than half of them are."""
    known = [value for value in values if value is not None]
    if not known or len(known) * 2 < len(values):
        return {"low": None, "high": None}
    low, high = np.quantile(known, [0.025, 0.975])
    return {"low": float(low), "high": float(high)}
