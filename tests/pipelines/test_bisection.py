"""What bisection says of the turn that it names, in a simulated environment whose values are known."""

from collections.abc import Iterable, Iterator
from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest

from agentrl.pipelines.methods.slicing.steps import ValueConfig, _lost, _States, _steps
from agentrl.rollouts.continuations import ForkPoint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

TURNS, ROWS = 8, 400


def failed(number: int) -> Trajectory:
    """A failed row of eight turns of one token, each after one token that it hears."""
    messages = []
    for turn in range(TURNS):
        start = 2 * turn
        messages += [
            Message(role=Role.TOOL if turn else Role.USER, content=str(number), token_start=start, token_end=start + 1),
            Message(role=Role.ASSISTANT, content="a", token_start=start + 1, token_end=start + 2),
        ]
    return Trajectory(
        trajectory_id=f"r{number}", episode_id=f"r{number}", task_id=f"t{number}", source="model", env="e",
        split="train", prompt="q", reward=0.0, success=False, termination=Termination.ANSWERED, messages=messages,
        input_ids=[number] * 2 * TURNS, action_mask=[False, True] * TURNS, logprobs=[-1.0] * 2 * TURNS,
    )  # fmt: skip


class Simulated:
    """Continuations succeed with a chance that falls from turn to turn, by no more at one turn than at another."""

    def __init__(self, k: int, seed: int) -> None:
        self.k, self.random = k, Random(seed)
        self.drawn: dict[str, list[Trajectory]] = {}

    def chance(self, boundary: int) -> float:
        return 0.8 - 0.7 * boundary / TURNS

    def of(self, nodes: Iterable[ForkPoint]) -> dict[str, list[Trajectory]]:
        self.drawn.update(self.again(node for node in nodes if node.name not in self.drawn))
        return self.drawn

    def again(self, nodes: Iterable[ForkPoint]) -> dict[str, list[Trajectory]]:
        return {node.name: list(self._draws(len(node.prefix.ids) // 2)) for node in nodes}

    def _draws(self, boundary: int) -> Iterator[Trajectory]:
        for _ in range(self.k):
            won = self.random.random() < self.chance(boundary)
            yield Trajectory.model_construct(reward=float(won), n_steps=1)


@pytest.mark.parametrize("k", [4, 8])
def test_progress_at_the_turn_that_bisection_names_is_not_biased_by_the_search(k: int) -> None:
    """The turn is chosen for a high value before it and a low one after it. Of the draws that chose it, both would be
    too extreme: progress was off by -.24 (k: 8) and -.34 (k: 4)."""
    simulated: Any = Simulated(k, seed=k)
    rows = [(row, Task(task_id=row.task_id, env="e", split="train", prompt="q")) for row in map(failed, range(ROWS))]
    states = _States(simulated, ValueConfig(k=k, where="bisect"))
    errors = []
    for row, turns in _lost(rows, states):
        for step in _steps(row, turns, states, "prover"):
            after = 0.0 if step.turn == TURNS - 1 else simulated.chance(step.turn + 1)  # the end of a row is known
            errors.append(step.progress - (after - simulated.chance(step.turn)))
    assert len(errors) > 0.9 * ROWS
    assert abs(fmean(errors)) < 4 * stdev(errors) / len(errors) ** 0.5 < 0.08
