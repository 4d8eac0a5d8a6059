"""Arms of an experiment: artifacts that differ by their seeds alone, and what varies between the arms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentrl.pipelines.results.measured import KeyPath, Measured, Task
from agentrl.statistics.intervals import wilson
from agentrl.statistics.paired import Difference, Estimate, difference, pooled


@dataclass(frozen=True)
class Arm:
    """Artifacts that differ by their seeds alone. ``varied`` holds the settings in which other arms differ from it."""

    runs: tuple[Measured, ...]
    seeds: tuple[str, ...]
    varied: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tells this arm from the others, in one line."""
        settings = ", ".join(f"{key} {value}" for key, value in self.varied.items())
        policies = list(dict.fromkeys(run.policy for run in self.runs))
        return settings or " to ".join(dict.fromkeys([policies[0], policies[-1]]))

    @property
    def estimate(self) -> Estimate:
        """Success over seeds and tasks, with its interval. One run with one attempt at each task has Wilson's interval,
        as in an evaluation."""
        [first, *more] = self.runs
        outcomes = list(first.outcomes.values())
        if not more and all(outcome in (0.0, 1.0) for outcome in outcomes):
            return Estimate(sum(outcomes) / len(outcomes), *wilson(int(sum(outcomes)), len(outcomes)))
        return pooled([run.outcomes for run in self.runs])

    def minus(self, other: "Arm") -> Difference:
        """How this arm differs from another one. Raises ValueError if they share no task."""
        before, after = ([run.outcomes for run in arm.runs] for arm in (other, self))
        return difference(before, after, same_seeds=len(before) == len(after) and self.seeds == other.seeds)

    def beside(self, other: "Arm") -> dict[Task, tuple[float, float]]:
        """Success of the other arm and of this one on each task that both attempted, as means over runs."""
        before, after = (_by_task(arm.runs) for arm in (other, self))
        return {task: (before[task], after[task]) for task in before if task in after}


def _by_task(runs: Sequence[Measured]) -> dict[Task, float]:
    outcomes: dict[Task, list[float]] = {}
    for run in runs:
        for task, outcome in run.outcomes.items():
            outcomes.setdefault(task, []).append(outcome)
    return {task: fmean(each) for task, each in outcomes.items()}


def arms_of(measured: Sequence[Measured]) -> tuple[list[Arm], list[str]]:
    """The arms of artifacts that are made in the same way, and the settings that vary between them."""
    varied = _varied(measured)
    keys = [key for key in varied if not is_seed(key)]
    seeds = [key for key in varied if is_seed(key)]
    groups: dict[str, list[int]] = {}
    for number in range(len(measured)):
        groups.setdefault("\0".join(str(varied[key][number]) for key in keys), []).append(number)
    arms = []
    for numbers in groups.values():
        ordered = sorted(numbers, key=lambda number: [str(varied[key][number]) for key in seeds])
        of_seeds = tuple(", ".join(dict.fromkeys(str(varied[key][n]) for key in seeds)) for n in ordered)
        settings = {key: varied[key][numbers[0]] for key in keys}
        arms.append(Arm(tuple(measured[n] for n in ordered), of_seeds if seeds else (), settings))
    return arms, keys


def _alike(measured: Sequence[Measured]) -> bool:
    """Whether all are made by the same stages in the same places, so that their settings can be compared."""
    return len({shape_of(run) for run in measured}) == 1


def shape_of(measured: Measured) -> frozenset[tuple[KeyPath, Any]]:
    """Which stages it is made by."""
    return frozenset((key_path, value) for key_path, value in measured.settings.items() if key_path[-1] == "uses")


def is_seed(key: str) -> bool:
    return key.rpartition(".")[2].rpartition(" ")[2] == "seed"


def _varied(measured: Sequence[Measured]) -> dict[str, list[Any]]:
    """Key -> the value of each artifact, for what is not the same in all; nothing if they are made in different
    ways. A key is as short as it can be: ``beta``, or ``model.beta`` if another stage varies its ``beta`` too."""
    if not _alike(measured):
        return {}
    places = dict.fromkeys(key_path for run in measured for key_path in run.settings)
    values_by_path = {key_path: [run.settings.get(key_path) for run in measured] for key_path in places}
    values_by_path = {
        key_path: values for key_path, values in values_by_path.items() if len(set(map(repr, values))) > 1
    }
    return {_short(key_path, values_by_path): values for key_path, values in values_by_path.items()}


def _short(key_path: KeyPath, among: Iterable[KeyPath]) -> str:
    others = [other for other in among if other != key_path]
    *path, key = key_path
    for name in (key.rpartition(".")[2], key):
        if not any(other[-1] == key or other[-1].rpartition(".")[2] == name for other in others):
            return name
    return " ".join([*path, key])
