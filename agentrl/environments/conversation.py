"""A conversation without a score: to try a policy out, or to ask it one thing."""

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
        return Talk(task.prompt, self.ask)


class AskedOnce:
    """One thing is asked, and the first message ends it: a note, a label, or a word of a team. So any engine can be
    asked. The task's prompt is the only user turn, with its tools on offer, which nothing runs; with ``more`` after it,
    without tools."""

    max_steps = 1

    def __init__(self, name: str, version: str = "1", more: str = "") -> None:
        self.name, self.version, self.more = name, version, more

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Raises ValueError: what is asked is about rows or tasks that exist already."""
        raise ValueError(f"env {self.name!r} asks about what exists already; no tasks of it can be drawn")

    async def reset(self, task: Task) -> "Talk":
        if self.more:
            return Talk(f"{task.prompt} {self.more}")
        return Talk(task.prompt, tools=task.tools)


class Talk:
    """One conversation."""

    def __init__(self, prompt: str, ask: Ask | None = None, tools: str = "[]") -> None:
        self.opening = [Message(role=Role.USER, content=prompt)]
        self.ask, self.tools = ask, tools

    async def step(self, message: Message) -> Step:
        reply = await asyncio.to_thread(self.ask, message) if self.ask else None
        return Step(done=True) if reply is None else Step([Message(role=Role.USER, content=reply)])

    async def score(self) -> Score | None:
        return None

    async def close(self) -> None:
        pass
