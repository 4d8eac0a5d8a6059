"""Means of runs over tasks, and paired differences between them, with bootstrap intervals (Efron 1979).

A *run* maps each task to its outcome. What is resampled are tasks, and if there are several runs (seeds), the runs too:
so an interval says what other tasks, and other seeds, might have given.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

Run = Mapping[Any, float]

RESAMPLES, AT_ONCE = 4000, 200
ALPHA = 0.05
EXACT, FLIPS = 14, 20_000


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The mean of the second less that of the first, with its 95 % interval, over the ``tasks`` that both have.
    ``gained`` tasks went better in the second, ``lost`` ones worse; ``unshared`` tasks only one of both has. ``p`` is
    that of :func:`mcnemar`, if both are one run whose outcomes are 0 or 1."""

    mean: float
    low: float
    high: float
    tasks: int
    gained: int
    lost: int
    unshared: int = 0
    p: float | None = None

    @property
    def shown(self) -> bool:
        """Whether the interval leaves out 0, and McNemar's test, where it can be made, rejects that there is no
        difference at 5 %: if few tasks changed, a bootstrap's interval is too narrow."""
        return (self.low > 0 or self.high < 0) and (self.p is None or self.p < ALPHA)


def pooled(runs: Sequence[Run], seed: int = 0) -> Estimate:
    """The mean over all runs and tasks. Raises ValueError if there is no outcome."""
    outcomes, there = _matrix(runs, _tasks(runs))
    draws = [_mean(outcomes, there, *drawn) for drawn in _drawn(outcomes, seed)]
    return Estimate(float(outcomes.sum() / there.sum()), *_interval(draws))


def difference(before: Sequence[Run], after: Sequence[Run], *, same_seeds: bool = False, seed: int = 0) -> Difference:
    """How ``after`` differs from ``before`` on the tasks of both. With ``same_seeds`` the runs of both are paired too,
    in their order.

    Raises ValueError if they share no task.
    """
    first, second = set(_tasks(before)), set(_tasks(after))
    shared = sorted(first & second, key=str)
    if not shared:
        raise ValueError("the two sides share no task, so they cannot be compared")
    a, b = _matrix(before, shared), _matrix(after, shared)
    draws, random = [], np.random.default_rng(seed + 1)
    for of_runs, of_tasks in _drawn(a[0], seed):
        runs_of_b = of_runs if same_seeds else _resampled(len(b[0]), random)
        draws.append(_mean(*b, runs_of_b, of_tasks) - _mean(*a, of_runs, of_tasks))
    each = _by_task(*b) - _by_task(*a)
    gained, lost = int((each > 1e-12).sum()), int((each < -1e-12).sum())
    once = len(before) == len(after) == 1 and bool(np.isin(a[0], (0.0, 1.0)).all() and np.isin(b[0], (0.0, 1.0)).all())
    mean = float(b[0].sum() / b[1].sum() - a[0].sum() / a[1].sum())
    p = mcnemar(gained, lost) if once else None
    return Difference(mean, *_interval(draws), len(shared), gained, lost, len(first ^ second), p)


def mcnemar(gained: int, lost: int) -> float:
    """The probability, if there is no difference, of tasks gained and lost that are as uneven as these or more:
    McNemar's test (1947) in its exact form, two-sided."""
    changed = gained + lost
    tail = sum(comb(changed, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**changed)


def sign_flips(differences: Sequence[float], seed: int = 0) -> float:
    """The probability, if there is no difference, of a mean of ``differences``, one for each task, that is as far from
    0 as theirs or further: the paired randomization test, two-sided (Fisher 1935). If at most :data:`EXACT` tasks
    changed, all their signs are counted, else :data:`FLIPS` are drawn at random. If each difference is -1, 0 or 1, it
    is :func:`mcnemar`."""
    changed = np.array([value for value in differences if abs(value) > 1e-12])
    if len(changed) <= EXACT:
        signs = 1 - 2 * (np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed)) & 1)
        return float((abs(signs @ changed) >= abs(changed.sum()) - 1e-9).mean())
    random = np.random.default_rng(seed)
    as_far = 0
    for _ in range(FLIPS // AT_ONCE):
        signs = 1 - 2 * random.integers(0, 2, (AT_ONCE, len(changed)))
        as_far += int((abs(signs @ changed) >= abs(changed.sum()) - 1e-9).sum())
    return (as_far + 1) / (FLIPS + 1)  # the one that was observed is one of them


def _tasks(runs: Sequence[Run]) -> list[Any]:
    return list(dict.fromkeys(task for run in runs for task in run))


def _matrix(runs: Sequence[Run], tasks: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes, 0 where a run has none, and where it has one, both [runs, tasks]."""
    there = np.array([[task in run for task in tasks] for run in runs], dtype=float)
    if not there.sum():
        raise ValueError("no run has an outcome, so there is nothing to compare")
    return np.array([[run.get(task, 0.0) for task in tasks] for run in runs], dtype=float), there


def _drawn(outcomes: np.ndarray, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """How often each run and each task is drawn, [resamples, runs] and [resamples, tasks]."""
    (runs, tasks), random = outcomes.shape, np.random.default_rng(seed)
    for _ in range(RESAMPLES // AT_ONCE):
        of_tasks = _resampled(tasks, random)
        yield _resampled(runs, random), of_tasks


def _resampled(number: int, random: np.random.Generator) -> np.ndarray:
    """How often each of ``number`` is drawn, [resamples, number]. Counting draws takes a fifth of the time of a
    multinomial distribution."""
    drawn = random.integers(0, number, (AT_ONCE, number)) + number * np.arange(AT_ONCE)[:, None]
    return np.bincount(drawn.ravel(), minlength=AT_ONCE * number).reshape(AT_ONCE, number)


def _mean(outcomes: np.ndarray, there: np.ndarray, of_runs: np.ndarray, of_tasks: np.ndarray) -> np.ndarray:
    """The mean of each resample, [resamples]; NaN if nothing was drawn that has an outcome."""
    count = (of_runs @ there * of_tasks).sum(1)
    return np.divide((of_runs @ outcomes * of_tasks).sum(1), count, out=np.full(len(count), np.nan), where=count > 0)


def _by_task(outcomes: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The mean of each task, [tasks]."""
    return outcomes.sum(0) / np.maximum(there.sum(0), 1)


def _interval(draws: Sequence[np.ndarray]) -> tuple[float, float]:
    low, high = np.nanpercentile(np.concatenate(draws), [2.5, 97.5])
    return float(low), float(high)
