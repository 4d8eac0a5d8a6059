"""The control for sharpening: a policy at its best temperature, which is chosen on dev tasks and measured on others.

Training often does no more than to make a policy surer of what it does already, which a lower temperature does too. So
what training gained is what it gained over its predecessor at that predecessor's best temperature.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.engines.seeds import stream
from agentrl.pipelines.parts.budget import TokenLimits, check_room
from agentrl.pipelines.parts.measures import EVERY
from agentrl.pipelines.parts.shards import Shards
from agentrl.pipelines.stage import Context
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import CONTROL
from agentrl.statistics.intervals import wilson

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.rollouts.attempts import Attempt
    from agentrl.rollouts.runner import RolloutRunner

TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
"""Those that are tried on dev tasks, each with one attempt at each task; the first of the best is chosen."""

SHARDS = len(TEMPERATURES) + 2
"""Shards that :func:`choose_temperature` and what is measured at its choice may take."""

DEV = "dev"
"""The decoding of results on dev tasks, and a tag of their rows."""


class Rounds:
    """Rounds of rollouts of one policy, each at its own temperature, with its own tags, and in its own shard of the
    buffer. A round that a killed run has made is not made again. Progress is that of all rounds."""

    def __init__(self, context: Context, limits: TokenLimits, policy: "Policy | None", runner: "RolloutRunner") -> None:
        from agentrl.rollouts.progress import EpisodeReport

        self.context, self.limits, self.policy, self.runner = context, limits, policy, runner
        self.shards = Shards(context)
        self.report = runner.report = EpisodeReport(0, runner.on_progress)

    def expect(self, episodes: int, dev: Sequence[Task] = ()) -> None:
        """So many episodes more will be made, and those of :func:`choose_temperature`, for the progress of all."""
        self.report.total += episodes + len(TEMPERATURES) * len(dev)

    def play(
        self,
        attempts: "Mapping[str, Attempt]",
        temperature: float,
        tags: Sequence[str],
        tasks: Sequence[Task],
        shard: int,
    ) -> None:
        """Make the rows of ``attempts``, by their ids, that the buffer lacks."""
        numbered = {name: replace(attempt, number=number) for number, (name, attempt) in enumerate(attempts.items())}
        ours = self.shards.missing(numbered)
        self.report.total -= len(attempts) - len(ours)
        if not ours:
            return
        runner = self.runner.sampling_as(self.limits.sampling(self.policy, temperature=temperature))
        check_room(self.policy, runner, tasks)
        made = runner.run(list(ours.values()), stream(self.context.seed, "evaluate", shard), list(ours))
        self.shards.append([row.model_copy(update={"tags": [*tags, *row.tags]}) for row in made], shard)


class TriedTemperature(NamedTuple):
    """How often a policy solves the dev tasks at a temperature."""

    temperature: float
    tasks: int
    successes: int

    def result(self) -> dict[str, Any]:
        """As a row of the results of ``evaluate.policy``."""
        low, high = wilson(self.successes, self.tasks)
        measured = {"tasks": self.tasks, "attempts": self.tasks, "successes": self.successes}
        share = {"success": self.successes / self.tasks, "low": low, "high": high}
        return {"decoding": DEV, "temperature": self.temperature, "env": EVERY, "level": -1, **measured, **share}


def refuse_shared(tasks: Sequence[Task], dev: Sequence[Task]) -> None:
    """Raise ValueError if a temperature would be chosen on tasks that it is measured on, or on none."""
    if not dev:
        raise ValueError("dev holds no task to choose a temperature on; generate some, or leave inputs.dev out")
    measured = {(task.env, task.task_id) for task in tasks}
    if shared := [task.task_id for task in dev if (task.env, task.task_id) in measured]:
        raise ValueError(
            f"dev and tasks share {len(shared)} tasks, such as {shared[0]}: a temperature that is chosen on what it is "
            "measured on is too good; wire other tasks to inputs.dev, such as tasks.dev"
        )


def choose_temperature(rounds: Rounds, dev: Sequence[Task], first: int, shard: int) -> list[TriedTemperature]:
    """Attempt each dev task at each of :data:`TEMPERATURES`; rows are numbered from ``first`` on, shards from
    ``shard`` on. See :func:`best`.

    Raises ValueError if no attempt could be scored.
    """
    from agentrl.rollouts.attempts import tickets

    tried = []
    for index, temperature in enumerate(TEMPERATURES):
        attempts = tickets(dev, 1, rounds.context.trajectory_id, first + index * len(dev))
        rounds.play(attempts, temperature, [CONTROL, DEV], dev, shard + index)
        tried.append((temperature, attempts))
    rounds.shards.finish(shard + len(TEMPERATURES))
    trials = []
    for temperature, attempts in tried:
        outcomes = rounds.context.buffer.read(list(attempts), ["success"])["success"].drop_null().to_pylist()
        if not outcomes:
            raise ValueError("no dev episode could be scored; the rows' tags say how their environment failed")
        trials.append(TriedTemperature(temperature, len(outcomes), sum(outcomes)))
    return trials


def best(tried: Sequence[TriedTemperature]) -> float:
    """The temperature with the highest success; of several, the lowest."""
    return max(tried, key=lambda trial: (trial.successes / trial.tasks, -trial.temperature)).temperature
