"""A plain synchronous class as an environment. Its episodes run in threads, or in processes if their tools may hang.

The class has ``tasks`` and ``episode(task)``. What ``episode`` returns has ``score(answer)`` and tools: methods under
``@tool``, or one method ``call(call)``. It may have ``opening()`` and ``state()``. With ``replayable = True`` an
episode whose process was killed goes on in another, after the calls before it were made again.
"""

import asyncio
import functools
import inspect
import json
from typing import Any

from agentrl.environments import tools
from agentrl.environments.base import Environment, Episode, Observation, Score, Step, tool_message
from agentrl.environments.hosts import Host, HostedError
from schemas.task import Task
from schemas.trajectory import Message, RewardComponent, Role, ToolCall


def is_plain(environment: object) -> bool:
    """Whether this is a synchronous class, which :class:`Adapted` makes an environment."""
    return not hasattr(environment, "reset") and hasattr(environment, "episode")


def protocol(environment: Any, host: Host, tool_s: float = 60.0, longest: int = 100_000) -> Environment:
    """The environment itself, or what adapts it. A tool call of a plain one ends after ``tool_s`` seconds, and its
    observation after ``longest`` characters."""
    return Adapted(environment, host, tool_s, longest) if is_plain(environment) else environment


class Adapted:
    """See the module's docstring."""

    def __init__(self, plain: Any, host: Host, tool_s: float, longest: int) -> None:
        self.plain, self.host, self.tool_s, self.longest = plain, host, tool_s, longest
        self.name, self.version = plain.name, plain.version
        if hasattr(plain, "max_steps"):
            self.max_steps = plain.max_steps

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return self.plain.tasks(sizes, seed)

    async def reset(self, task: Task) -> Episode:
        make = functools.partial(Plain, self.plain, task, self.longest)
        hosted = await self.host.start(make)
        try:
            opening, offered = await hosted.call("begin")
        except BaseException:
            await hosted.close()
            raise
        return AdaptedEpisode(self, make, hosted, opening, offered)


class AdaptedEpisode:
    """An episode that lives in a thread or a process."""

    def __init__(self, environment: Adapted, make: Any, hosted: Any, opening: list[Message], offered: str) -> None:
        self.environment, self.make, self.hosted = environment, make, hosted
        self.opening, self.tools = opening, offered
        self.made: list[ToolCall] = []
        self.answer: str | None = None

    async def step(self, message: Message) -> Step:
        if not message.tool_calls:
            self.answer = message.content
            return Step(done=True)
        answers, counts = [], {"tool_errors": 0, "tool_timeouts": 0, "tool_exceptions": 0, "observations_cut": 0}
        for call in message.tool_calls:
            observation = await self._call(call, counts)
            counts["tool_errors"] += observation.error
            answers.append(tool_message(call, observation.content))
        return Step(answers, info=counts)

    async def _call(self, call: ToolCall, counts: dict[str, int]) -> Observation:
        limit = self.environment.tool_s
        try:
            async with asyncio.timeout(limit):
                observation, cut = await self.hosted.call("call", call)
        except TimeoutError:
            counts["tool_timeouts"] += 1
            if self.hosted.lost:
                await self._again()
            return Observation(f"{call.name} took longer than {limit:g} s and was stopped", error=True)
        except HostedError as error:
            counts["tool_exceptions"] += 1
            return Observation(f"{call.name} failed: {error.summary}", error=True)
        self.made.append(call)
        counts["observations_cut"] += cut
        return observation

    async def _again(self) -> None:
        """Go on in a new process. Raises RuntimeError if the calls made before cannot be made again."""
        if not getattr(self.environment.plain, "replayable", False):
            raise RuntimeError(
                "a tool hung, and the episode's state went with its process; set replayable = True on the environment "
                "if its calls can be made again"
            )
        await self.hosted.close()
        self.hosted = await self.environment.host.start(self.make)
        await self.hosted.call("begin")
        for call in self.made:
            await self.hosted.call("call", call)

    async def score(self) -> Score:
        return await self.hosted.call("score", self.answer)

    async def close(self) -> None:
        await self.hosted.close()


class Plain:
    """What runs in the thread or the process: one episode of a synchronous class."""

    def __init__(self, environment: Any, task: Task, longest: int) -> None:
        self.episode, self.task, self.longest = environment.episode(task), task, longest

    def begin(self) -> tuple[list[Message], str]:
        """The opening, and JSON of the tools: those of the task, unless it names none."""
        opening = getattr(self.episode, "opening", None)
        messages = opening() if callable(opening) else [Message(role=Role.USER, content=self.task.prompt)]
        return messages, self.task.tools if json.loads(self.task.tools) else tools.schemas(self.episode)

    def call(self, call: ToolCall) -> tuple[Observation, bool]:
        """The observation, and whether it was cut."""
        own = getattr(self.episode, "call", None)
        seen = own(call) if callable(own) and not getattr(own, "is_tool", False) else tools.answer(self.episode, call)
        if len(seen.content) <= self.longest:
            return seen, False
        left = len(seen.content) - self.longest
        return Observation(f"{seen.content[: self.longest]}\n[{left} more characters were cut]", seen.error), True

    def score(self, answer: str | None) -> Score:
        """The score; a number alone is the reward, and a task is solved by a reward above 0."""
        found = self.episode.score(answer)
        if not isinstance(found, Score):
            found = Score(float(found) > 0, (RewardComponent(name="score", value=float(found)),))
        state = getattr(self.episode, "state", None)
        return Score(found.success, found.components, state()) if callable(state) else found

    def close(self) -> None:
        close = getattr(self.episode, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()
