"""How two arms differ in pass@k, on the same tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.statistics.paired import Difference, difference, sign_flips
from agentrl.statistics.passes import doubled, pass_at

if TYPE_CHECKING:
    from agentrl.pipelines.results.arms import Arm
    from agentrl.pipelines.results.measured import Measured, Task


@dataclass(frozen=True)
class PassDifference:
    """The difference of pass@k between two arms: its mean with a 95 % interval (bootstrap over tasks) and ``p`` of the
    paired randomization test over tasks."""

    k: int
    mean: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        points = f"{self.mean * 100:+.1f} points (95 % interval {self.low * 100:+.1f} to {self.high * 100:+.1f})"
        return f"pass@{self.k}: {points}, paired randomization test p = {self.p:.2g}"

    def columns(self) -> dict[str, float]:
        names = {"mean": f"pass@{self.k}", "low": f"low of pass@{self.k}", "high": f"high of pass@{self.k}"}
        return {name: getattr(self, field) for field, name in names.items()} | {f"p of pass@{self.k}": self.p}


def pass_differences(arm: "Arm", than: "Arm") -> list[PassDifference]:
    """How ``arm`` differs in pass@k for k 2, 4, ... up to the attempts that each run has at every task of both; none
    if some task was attempted once."""
    shared = {task for run in arm.runs for task in run.counts} & {task for run in than.runs for task in run.counts}
    attempts = [
        run.counts[task][0] for side in (arm, than) for run in side.runs for task in shared if task in run.counts
    ]
    differences_of_k = []
    for k in doubled(min(attempts, default=0))[1:]:
        before, after = ([_passes(run, shared, k) for run in side.runs] for side in (than, arm))
        each: Difference = difference(before, after, same_seeds=len(before) == len(after) and arm.seeds == than.seeds)
        changes = [_mean(after, task) - _mean(before, task) for task in sorted(shared, key=str)]
        differences_of_k.append(PassDifference(k, each.mean, each.low, each.high, sign_flips(changes)))
    return differences_of_k


def _passes(run: "Measured", tasks: "set[Task]", k: int) -> "dict[Task, float]":
    return {task: pass_at(*count, k) for task, count in run.counts.items() if task in tasks}


def _mean(runs: "Sequence[Mapping[Task, float]]", task: "Task") -> float:
    values = [run[task] for run in runs if task in run]
    return sum(values) / len(values)
