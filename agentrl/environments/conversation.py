"""A conversation without tools and without a score, to try a policy out."""

import asyncio
from collections.abc import Callable

from agentrl.environments.base import Score, Step
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role

Ask = Callable[[Message], str | None]
"""Shows what the policy said, and returns what the user says next; None ends the conversation."""


class Conversation:
    """The task's prompt is the first user turn; ``ask`` gives the others, and without it there are none."""

    name = "conversation"
    version = "1"
    max_steps = 10_000

    def __init__(self, ask: Ask | None = None) -> None:
        self.ask = ask

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Raises ValueError: the user brings the prompts."""
        raise ValueError("a conversation has no tasks of its own")

    async def reset(self, task: Task) -> "Talk":
        return Talk(task, self.ask)


class Talk:
    """One conversation."""

    tools = "[]"

    def __init__(self, task: Task, ask: Ask | None) -> None:
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.ask = ask

    async def step(self, message: Message) -> Step:
        reply = await asyncio.to_thread(self.ask, message) if self.ask else None
        return Step(done=True) if reply is None else Step([Message(role=Role.USER, content=reply)])

    async def score(self) -> Score | None:
        return None

    async def close(self) -> None:
        pass
