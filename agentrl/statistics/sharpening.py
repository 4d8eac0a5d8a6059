"""Whether training taught a policy something, or made it surer of what it did already.

The *control for sharpening* is the policy that training started from, at the temperature that is best for it. What was
learned is what is gained over that, task by task. That is one of five words: training **adds**; it **sharpens**, if
success at temperature 1 rises and the control is not beaten; it did **none** of both, if a gain that matters is
excluded; it made the policy **worse**; or the data **cannot tell**.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agentrl.statistics.paired import Difference, Run, difference, mcnemar, sign_flips

MARGIN = 0.10
"""A gain that matters, as a share of tasks. If the interval leaves room for more, nothing is said to be none."""


class Learned(StrEnum):
    """What training did to a policy."""

    ADDS = "adds"
    SHARPENS = "sharpens"
    NONE = "none"
    WORSE = "worse"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Judgement:
    """A word, and ``why`` if it does not follow from the difference alone."""

    word: Learned
    why: str = ""


def paired(before: Sequence[Run], after: Sequence[Run]) -> Difference:
    """How ``after`` differs from ``before``, whose runs (seeds) are paired in their order. ``gained``, ``lost`` and
    ``p`` are over all pairs of a run and a task: McNemar's exact test if outcomes are 0 or 1, else the paired
    randomization test. The interval is a bootstrap over runs and tasks.

    Raises ValueError if the runs are not as many, or share no task.
    """
    changes = [b[task] - a[task] for a, b in zip(before, after, strict=True) for task in a if task in b]
    gained, lost = (sum(sign * change > 1e-12 for change in changes) for sign in (1, -1))
    whole = all(min(abs(change), abs(abs(change) - 1)) < 1e-12 for change in changes)
    p = mcnemar(gained, lost) if whole else sign_flips(changes)
    return replace(difference(before, after, same_seeds=True), gained=gained, lost=lost, p=p)


def judged(best: Difference | None, sampled: Difference | None = None) -> Judgement:
    """The word for a policy and its predecessor. ``best`` is the difference between both at their best temperatures,
    None if the control was not run; ``sampled`` that between both at temperature 1."""
    if best is None:
        return Judgement(Learned.CANNOT_TELL, "the control was not run")
    if best.shown:
        return Judgement(Learned.ADDS if best.mean > 0 else Learned.WORSE)
    if sampled is not None and sampled.shown:
        if sampled.mean > 0:
            return Judgement(Learned.SHARPENS)
        return Judgement(Learned.WORSE, "at temperature 1; at the best temperatures no difference is shown")
    return _null(best)


def over_baseline(method: Difference, baseline: Difference | None) -> Judgement:
    """The word for a method beside a baseline, such as rejection sampling, that was given the same. ``baseline`` is
    what the baseline gains over the policy that both start from. If it gains nothing, the bed has nothing to gain or
    its settings are wrong, so that the method gains nothing either says nothing of the method."""
    if method.shown:
        return Judgement(Learned.ADDS if method.mean > 0 else Learned.WORSE)
    if baseline is None or not baseline.shown or baseline.mean <= 0:
        return Judgement(Learned.CANNOT_TELL, "the baseline itself gains nothing")
    return _null(method)


def _null(contrast: Difference) -> Judgement:
    most = max(contrast.high, 1 - 0.05 ** (1 / contrast.tasks) if not contrast.gained + contrast.lost else 0.0)
    if most > MARGIN:
        few = f"{contrast.tasks} tasks are too few: a gain of up to {most * 100:.1f} points is not excluded"
        return Judgement(Learned.CANNOT_TELL, few)
    return Judgement(Learned.NONE)


def said_p(p: float) -> str:
    """``p = 0.013``; never that it is 0."""
    return f"p = {p:.2g}" if p >= 1e-15 else "p < 1e-15"
