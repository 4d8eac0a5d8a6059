"""Environments whose tools and methods fail in every way, and an engine that says what a task's prompt tells it to."""

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from agentrl.chat.codec import ChatCodec
from agentrl.engines.base import Sampling, Session, Turn, Weights
from agentrl.environments.base import Score, Step
from agentrl.environments.tools import tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Span, ToolCall


def task(prompt: str, env: str = "shop", number: int = 0) -> Task:
    return Task(task_id=f"{env}-{number}", env=env, split="train", prompt=prompt, ground_truth='"done"')


class Visit:
    def __init__(self, task: Task) -> None:
        self.asked: list[str] = []

    @tool
    def price(self, item: str) -> int:
        """The price of an item."""
        self.asked.append(item)
        return len(item)

    @tool
    def hang(self) -> str:
        """Never returns."""
        while True:
            time.sleep(0.05)

    @tool
    def slow(self) -> str:
        """Takes a while."""
        time.sleep(0.2)
        return "there"

    @tool
    def burst(self) -> str:
        """Raises."""
        raise ValueError("out of stock")

    @tool
    def flood(self) -> str:
        """Returns 50 MB."""
        return "x" * 50_000_000

    def score(self, answer: str | None) -> float:
        return float(answer == "done")

    def state(self) -> dict[str, Any]:
        return {"asked": self.asked}


class Shop:
    name = "shop"
    version = "1"
    replayable = True

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return {}

    def episode(self, task: Task) -> Visit:
        return Visit(task)


class ForgetfulShop(Shop):
    replayable = False


async def hang_in(method: str, task: Task) -> None:
    if task.prompt == f"{method} hangs":
        await asyncio.sleep(3600)


class Broken:
    """Fails where the task's prompt says so."""

    name = "broken"
    version = "1"

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return {}

    async def reset(self, task: Task) -> "BrokenVisit":
        if task.prompt == "reset":
            raise OSError("no such database")
        await hang_in("reset", task)
        return BrokenVisit(task)


class BrokenVisit:
    tools = "[]"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.said = 0

    async def step(self, message: Message) -> Step:
        self.said += 1
        if self.task.prompt == "step":
            raise KeyError("lost row")
        if self.task.prompt == "forever":
            await asyncio.sleep(3600)
        if self.task.prompt == "shout,bye" and self.said == 1:
            return Step([Message(role=Role.USER, content="y" * 150)])
        if self.task.prompt == "talk for ever":
            return Step([Message(role=Role.USER, content="and?")])
        if self.task.prompt == "talk,talk,bye" and self.said < 3:
            return Step([Message(role=Role.USER, content="and?")], reward=0.5)
        return Step(done=True)

    async def score(self) -> Score:
        await hang_in("score", self.task)
        if self.task.prompt == "score":
            raise ZeroDivisionError("no items")
        return Score(True, (RewardComponent(name="fine", value=1.0),))

    async def close(self) -> None:
        await hang_in("close", self.task)
        if self.task.prompt == "close":
            raise OSError("still open")


class Speaker:
    """Says the words of the opening one after the other: the name of a tool calls it, any other word is the answer."""

    exact = reproducible = True
    version = 0

    def __init__(self, codec: ChatCodec, seconds: float = 0.0) -> None:
        self.codec, self.seconds = codec, seconds
        self.open_now = self.open_most = 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        return Session(key=key, root=root, on_end=self._end)

    def _end(self, session: Session) -> None:
        self.open_now -= 1

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], seed: int, **_: Any) -> Turn:
        await asyncio.sleep(self.seconds)
        number = sum(message.role is Role.ASSISTANT for message in session.messages)
        word = (session.messages[0].content.split(",") + ["done"] * 99)[number]
        names = [item["function"]["name"] for item in json.loads(session.tools)]
        name, _, item = word.partition(" ")
        call = ToolCall(id=f"call_{number}", name=name, arguments=json.dumps({"item": item} if item else {}))
        message = Message(role=Role.ASSISTANT, tool_calls=[call]) if name in names else Message(
            role=Role.ASSISTANT, content=word
        )  # fmt: skip
        ids = self.codec.assistant(message)
        return Turn(ids, [-1.0] * len(ids), [Span(version=0, start=0, end=len(ids))], "stop")

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        return [-1.0] * (len(ids) - start)

    async def load(self, weights: Weights) -> None:
        self.version = weights.version

    async def close(self) -> None:
        pass
