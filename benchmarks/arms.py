"""The arms of an experiment of ``methods.py``: what each solved and spent, with the control for sharpening, and the
word for a method beside its baseline.

Every arm that is a policy is measured at temperature 1, greedily, and at its best temperature, which is chosen on dev
tasks. What a method gains is what it gains over a baseline if both are at their best temperatures. That it gains
nothing is said only if the baseline itself gains over the policy that both start from: otherwise nobody can tell.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Run = dict[str, float]
"""Task -> success."""

SMALL = os.environ.get("SCALE") == "small"
WITHIN = 0.15
"""How far the budgets of two methods may be apart."""


@dataclass
class Spent:
    """What a method used, beside its warm policy."""

    sampled: int = 0
    foreign: int = 0
    calls: int = 0
    trained: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def tokens(self) -> int:
        """Those that the policy sampled, and those that a teacher wrote for it."""
        return self.sampled + self.foreign


@dataclass(frozen=True)
class Solved:
    """What a policy solves at temperature 1, greedily, and at ``temperature``, which was best on dev tasks."""

    sampled: Run
    greedy: Run
    best: Run
    temperature: float


@dataclass
class Arm:
    """A method over all seeds: what it solved, by seed and task, and what it spent. ``runs`` are those at temperature
    1; what is no policy, such as tasks that a search solved, is measured once."""

    name: str
    solved: list[Solved | Run] = field(default_factory=list)
    costs: list[Spent] = field(default_factory=list)

    def add(self, run: Solved | Run, spent: Spent) -> None:
        self.solved.append(run)
        self.costs.append(spent)

    @property
    def runs(self) -> list[Run]:
        return [task.sampled if isinstance(task, Solved) else task for task in self.solved]

    @property
    def greedy(self) -> list[Run]:
        return [task.greedy for task in self.solved if isinstance(task, Solved)]

    @property
    def best(self) -> list[Run]:
        return [task.best if isinstance(task, Solved) else task for task in self.solved]

    @property
    def temperatures(self) -> list[float]:
        return [task.temperature for task in self.solved if isinstance(task, Solved)]

    @property
    def spent(self) -> Spent:
        return sum(self.costs, Spent())

    def kept(self) -> Any:
        """The newest run in JSON's types, for :meth:`restored`."""
        newest = self.solved[-1]
        return [vars(newest) if isinstance(newest, Solved) else newest, vars(self.costs[-1])]

    def restored(self, kept: Any) -> None:
        run, spent = kept
        self.add(Solved(**run) if "temperature" in run else run, Spent(**spent))


def measured(play: Callable[[Any, float], Run], dev: Any, judged: Any) -> Solved:
    """What a policy solves of the ``judged`` tasks. ``play`` attempts each of some tasks once, at a temperature."""
    from agentrl.pipelines.parts.control import TEMPERATURES, TriedTemperature, best

    tried = []
    for temperature in (0.0, 1.0) if SMALL else TEMPERATURES:
        outcomes = play(dev, temperature)
        tried.append(TriedTemperature(temperature, len(outcomes), round(sum(outcomes.values()))))
    chosen = best(tried)
    at = {temperature: play(judged, temperature) for temperature in dict.fromkeys((1.0, 0.0, chosen))}
    return Solved(at[1.0], at[0.0], at[chosen], chosen)


def table(arms: Mapping[str, Arm], start: str = "warm") -> None:
    """Print each arm. The last column but the costs says what it learned over the ``start`` at its best temperature."""
    from agentrl.statistics.intervals import wilson

    print(f"{'method':<24} {'T 1':>6} {'greedy':>6} {'best':>6}  {'95 % interval':<15} {'each seed, at its best':<34} "
          f"{'over ' + start:<12} {'sampled':>10} {'foreign':>8} {'calls':>8} {'trained':>10}")  # fmt: skip
    for arm in arms.values():
        solved, total = sum(sum(run.values()) for run in arm.best), sum(map(len, arm.best))
        low, high = wilson(solved, total)
        shares = [f"{sum(run.values()) / len(run):.3f}" for run in arm.best]
        each = " ".join(
            f"{share} at {at:g}" if at is not None else share
            for share, at in zip(shares, arm.temperatures or [None] * len(shares), strict=True)
        )
        spent = " ".join(
            f"{number:>{width},}" for number, width in zip(vars(arm.spent).values(), (10, 8, 8, 10), strict=True)
        )
        sampled, greedy = (mean(runs) for runs in (arm.runs, arm.greedy))
        print(f"{arm.name:<24} {sampled:>6} {greedy:>6} {solved / total:>6.3f}  {low:.3f} to {high:.3f}  {each:<34} "
              f"{learned(arms, start, arm):<12} {spent}")  # fmt: skip


def mean(runs: Sequence[Run]) -> str:
    outcomes = [outcome for run in runs for outcome in run.values()]
    return f"{sum(outcomes) / len(outcomes):.3f}" if outcomes else "-"


def learned(arms: Mapping[str, Arm], start: str, arm: Arm) -> str:
    """The word for an arm and the policy that it started from; none if one of both is no policy."""
    from agentrl.statistics.sharpening import judged, paired

    before = arms.get(start)
    if before is None or before is arm or not (before.temperatures and arm.temperatures):
        return "-"
    return judged(paired(before.best, arm.best), paired(before.runs, arm.runs)).word.value


def gain(
    name: str, arms: Mapping[str, Arm], before: str, after: str, by: str = "sampled", start: str | Arm = "warm"
) -> bool:
    """Print what one arm gains over another at an equal budget, of tokens that were sampled, ``foreign`` or both
    (``tokens``), or of ``calls``, and the word for it. ``start`` is what both started from: an arm, or its name if it
    is among these. Returns whether the method adds, at that budget."""
    from agentrl.statistics.sharpening import Judgement, Learned, over_baseline, paired

    baseline, method = arms[before], arms[after]
    first = arms.get(start) if isinstance(start, str) else start
    contrast = paired(baseline.best, method.best)
    gained = paired(first.best, baseline.best) if first is not None and first is not baseline else None
    judgement = over_baseline(contrast, gained)
    if judgement.word is Learned.ADDS and first is not None and first is not baseline:
        own = paired(first.best, method.best)
        if not (own.shown and own.mean > 0):
            judgement = Judgement(Learned.CANNOT_TELL, f"{before} is worse than {first.name}, and this no better")
    what = by if by in ("calls", "tokens") else f"{by} tokens"
    ratio = getattr(method.spent, by) / max(1, getattr(baseline.spent, by))
    how = ", each at its best temperature" if baseline.temperatures else ""
    why = f" ({judgement.why})" if judgement.why else ""
    figure = f"{name}: {contrast.mean:+.3f} ({contrast.low:+.3f} to {contrast.high:+.3f}) over {before}{how}: "
    met = [
        line(f"{figure}{judgement.word.value}{why}", judgement.word is Learned.ADDS, "adds"),
        line(f"{name}: {ratio:.2f} of the {what} of {before}", abs(ratio - 1) <= WITHIN, f"within {WITHIN:.0%}"),
    ]
    return all(met)


def line(figure: str, met: bool, target: str) -> bool:
    print(f"{figure} (target {target}): {'met' if met else 'MISSED'}", flush=True)
    return met
