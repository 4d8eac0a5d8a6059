"""Lookup whose tools are slow, for benchmarks/online.py."""

import asyncio
import math
import os
import random

from agentrl.environments import load_environment
from agentrl.environments.base import Episode, Score, Step
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message

MEDIAN_S = float(os.environ.get("TOOL_MEDIAN_S", "1.0"))
SIGMA = math.log(7) / 2.326  # the slowest hundredth takes seven times as long as the median


class SlowLookup:
    """Lookup, whose first tool call takes as long as a log-normal number that is a function of the task: the rollouts
    of a group take equally long, and some groups much longer than others."""

    name, version, max_steps = "online_tools:SlowLookup", "1", 5

    def __init__(self) -> None:
        self.inner = load_environment("lookup")

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return self.inner.tasks(sizes, seed)

    async def reset(self, task: Task) -> "SlowVisit":
        seconds = MEDIAN_S * random.Random(f"slow-{task.task_id}").lognormvariate(0, SIGMA)
        return SlowVisit(await self.inner.reset(task), seconds)


class SlowVisit:
    def __init__(self, inner: Episode, seconds: float) -> None:
        self.inner, self.seconds = inner, seconds
        self.opening, self.tools = inner.opening, inner.tools

    async def step(self, message: Message) -> Step:
        if message.tool_calls:
            seconds, self.seconds = self.seconds, 0.0
            await asyncio.sleep(seconds)
        return await self.inner.step(message)

    async def score(self) -> Score:
        return await self.inner.score()

    async def close(self) -> None:
        await self.inner.close()
