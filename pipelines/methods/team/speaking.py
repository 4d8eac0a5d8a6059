"""Teams: agents that act in one episode one after another. All but the last one say one thing each, which those after
them read; the last one acts in the environment. Each agent's turns are a row of their own: what the engine read and
sampled for it.
"""

from collections.abc import Sequence
from statistics import fmean

from agentrl.environments.base import Episode, Score, Step
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

SOURCE = "team"


class Speaking:
    """What an agent acts in that says one thing about a task, after ``ask``. Nothing answers it."""

    name = "team"
    max_steps = 1

    def __init__(self, ask: str, version: str) -> None:
        self.ask, self.version = ask, version

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Raises ValueError: tasks are those of the environment that the team acts in."""
        raise ValueError("a team has no tasks of its own")

    async def reset(self, task: Task) -> Episode:
        return _Word([Message(role=Role.USER, content=f"{task.prompt} {self.ask}")])


class _Word:
    tools = "[]"

    def __init__(self, opening: list[Message]) -> None:
        self.opening = opening

    async def step(self, message: Message) -> Step:
        return Step(done=True)

    async def score(self) -> Score | None:
        return None

    async def close(self) -> None:
        pass


def word_of(row: Trajectory) -> str:
    """What an agent said; nothing if it came to no end."""
    return next((message.content.strip() for message in row.messages if message.role is Role.ASSISTANT), "")


def shown(agent: str, word: str) -> str:
    """What later agents read of it, after the task."""
    return f"{agent}: {word}"


def one_episode(spoken: Sequence[Trajectory], agents: Sequence[str], acted: Sequence[Trajectory]) -> list[Trajectory]:
    """The rows of a team, those of ``spoken`` first. If one acted, all rows are of one episode, and of the group of the
    task. If several acted after the same words, these are their group, each is an episode of its own, and those who
    spoke have the mean of their rewards."""
    rows = [*spoken, *acted]
    rewards = [row.reward for row in acted if row.reward is not None]
    reward = fmean(rewards) if rewards else None
    alone = len(acted) == 1
    success = acted[0].success if alone else None
    rows_of_episode = []
    for index, row in enumerate(rows):
        speaks = index < len(spoken)
        update: dict[str, object] = {"agent": agents[min(index, len(spoken))]}
        if alone or speaks:
            update |= {"episode_id": rows[0].trajectory_id, "segment": index}
        if speaks:
            update |= {"reward": reward, "success": success}
        else:
            update |= {"parent_id": spoken[-1].trajectory_id}
        rows_of_episode.append(row.model_copy(update=update))
    return rows_of_episode
