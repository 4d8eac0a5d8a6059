"""Whether a row solves a task: its turns are made again in a new episode of it, which must answer as the row's did."""

import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

from agentrl.environments.adapted import protocol
from agentrl.environments.base import Environment, Score
from agentrl.environments.forks import DivergedError, rebuild
from agentrl.environments.hosts import Threads
from agentrl.rollouts.reopen import opening_of
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Trajectory

_TRACEBACK_CHARS = 2000


@dataclass(frozen=True)
class Solved:
    """A task that a row solves by its verifier's word, what its episode begins with, and the reward that this episode
    gives each turn of the row: None if it gives none, and no rewards at all if there was no episode. After
    :meth:`ReplayVerifier.replayed` the score may also be that of a failure."""

    row: Trajectory
    task: Task
    opening: list[Message]
    tools: str
    score: Score
    rewards: list[float | None] = field(default_factory=list)


class ReplayVerifier:
    """Verifies rows in the ``environments`` of their names. ``drops`` counts what was not solved, by reason, ``calls``
    the tool calls that were made, and ``error`` is the traceback of the first environment that failed."""

    def __init__(self, environments: Mapping[str, Any]) -> None:
        self._given, self._host = environments, Threads(1)
        self.environments: dict[str, Environment] = {
            name: protocol(environment, self._host) for name, environment in environments.items()
        }
        self.drops: Counter[str] = Counter()
        self.calls = 0
        self.error = ""

    async def solved(self, row: Trajectory, task: Task) -> Solved | None:
        """What the episode says, or None if it fails, answers otherwise than the row's did, or is no success."""
        result = await self.replayed(row, task)
        if result is None or result.score.success:
            return result
        self.drops["not_solved"] += 1
        return None

    async def replayed(self, row: Trajectory, task: Task) -> Solved | None:
        """The same, of a row that may be a failure. None if it has no score."""
        self.calls += sum(len(message.tool_calls) for message in row.messages)
        try:
            result = await replayed(self.environments[row.env], row, task)
        except DivergedError:
            self.drops["diverged"] += 1
            return None
        except Exception as error:  # of the environment: it ends this episode alone
            self.note(error)
            return None
        self.drops["not_solved"] += result is None
        return result

    def note(self, error: Exception) -> None:
        """Count what an environment raised, and keep the first."""
        self.drops["env_error"] += 1
        self.error = self.error or "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]

    async def close(self) -> None:
        await self._host.close()
        for environment in self._given.values():
            if iscoroutinefunction(close := getattr(environment, "close", None)):
                await close()


async def replayed(environment: Environment, row: Trajectory, task: Task) -> Solved | None:
    """The score of a row's turns in an episode of ``task``, maybe another than the row's; None if it is unscored.

    Raises DivergedError if the episode answers a turn otherwise than the row's did.
    """
    first = await environment.reset(task)
    opening, tools = list(first.opening), first.tools
    await first.close()
    rewards: list[float | None] = []
    episode = await rebuild(
        environment,
        task,
        [*opening, *row.messages[len(opening_of(row)) :]],
        after=lambda step: rewards.append(step.reward if step else None),
    )
    try:
        score = await episode.score()
    finally:
        await episode.close()
    return Solved(row, task, opening, tools, score, rewards) if score is not None else None
