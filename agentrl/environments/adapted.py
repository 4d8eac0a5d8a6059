"""A plain synchronous class as an environment. Its episodes run in threads, or in processes if their tools may hang.

The class has ``tasks`` and ``episode(task)``. What ``episode`` returns has ``score(answer)`` and tools: methods under
``@tool``, or one method ``call(call)``. It may have ``opening()``, ``state()``, ``user(said)`` for what a user says to
a message without calls, and ``snapshot()`` and ``restore(state)``. An episode whose process was killed goes on in
another, from its last snapshot, or with ``replayable = True`` after the calls before it were made again.
"""

import asyncio
import functools
import inspect
import json
import pickle
from collections import Counter
from dataclasses import dataclass
from typing import Any

from agentrl.environments import tools
from agentrl.environments.base import Environment, Episode, Observation, Score, Step, answered, cut, timed
from agentrl.environments.forks import DivergedError
from agentrl.environments.hosts import Host, HostedError
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall


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
        self.replayable: bool = getattr(plain, "replayable", False)
        for name in ("max_steps", "format_retries"):
            if hasattr(plain, name):
                setattr(self, name, getattr(plain, name))

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return self.plain.tasks(sizes, seed)

    async def reset(self, task: Task) -> Episode:
        make = functools.partial(Plain, self.plain, task, self.longest)
        hosted = await self.host.start(make)
        try:
            start = await hosted.call("begin")
        except BaseException:
            await hosted.close()
            raise
        kind = RestorableEpisode if start.restorable else AdaptedEpisode
        return kind(self, task, make, hosted, start)


@dataclass(frozen=True)
class Opening:
    """What the policy sees first, JSON of the tools, and which of the optional methods the episode has."""

    opening: list[Message]
    tools: str
    user: bool
    restorable: bool


class AdaptedEpisode:
    """An episode that lives in a thread or a process."""

    def __init__(self, environment: Adapted, task: Task, make: Any, hosted: Any, start: Opening) -> None:
        self.environment, self.task, self.make, self.hosted, self.start = environment, task, make, hosted, start
        self.opening, self.tools = start.opening, start.tools
        self.answer: str | None = None
        self._past: list[tuple[str, Any, Any]] = []
        """Each call of a method: its name, its argument, and what it returned or the text of what it raised."""

    async def step(self, message: Message) -> Step:
        if not message.tool_calls:
            self.answer = message.content
            reply = await self._made("user", message.content) if self.start.user else None
            if reply is None:
                return Step(done=True)
            return Step([Message(role=Role.USER, content=reply.content)], reply.reward, reply.done)
        observations: list[Observation] = []
        info = Counter(tool_timeouts=0, tool_exceptions=0, observations_cut=0)
        for call in message.tool_calls:
            observations.append(await timed(self._call(call, info)))
            if observations[-1].done:
                break
        return answered(message, observations, **info)

    async def _call(self, call: ToolCall, info: "Counter[str]") -> Observation:
        limit = self.environment.tool_s
        try:
            async with asyncio.timeout(limit):
                observation, was_cut = await self._made("call", call)
        except TimeoutError:
            info["tool_timeouts"] += 1
            if self.hosted.lost:
                await self._again()
            return Observation(f"{call.name} took longer than {limit:g} s and was stopped", error=True)
        except HostedError as error:
            if error.infrastructure:
                raise
            info["tool_exceptions"] += 1
            return Observation(f"{call.name} failed: {error}", error=True)
        info["observations_cut"] += was_cut
        return observation

    async def _made(self, method: str, argument: Any) -> Any:
        """What a method returns; the call is kept."""
        try:
            outcome = await self.hosted.call(method, argument)
        except HostedError as error:
            self._past.append((method, argument, str(error)))
            await self._keep()
            raise
        self._past.append((method, argument, outcome))
        await self._keep()
        return outcome

    async def _keep(self) -> None:
        """Keep what :meth:`_again` goes on from."""

    async def _again(self) -> None:
        """Go on in a new process. Raises RuntimeError if the calls made before cannot be made again."""
        if not self.environment.replayable:
            raise RuntimeError(
                "a tool hung, and the episode's state went with its process; give the episode snapshot() and "
                "restore(), or set replayable = True on the environment if its calls can be made again"
            )
        await self._anew()
        for method, argument, then in self._past:
            try:
                now = await self.hosted.call(method, argument)
            except HostedError as error:
                now = str(error)
            if now != then:
                what = f"{method} {getattr(argument, 'name', argument)}"
                raise DivergedError(self.environment.name, self.task.task_id, what, then, now)

    async def _anew(self) -> None:
        """Begin again in a new process."""
        await self.hosted.close()
        self.hosted = await self.environment.host.start(self.make)
        await self.hosted.call("begin")

    async def score(self) -> Score | None:
        return await self.hosted.call("score", self.answer)

    async def close(self) -> None:
        await self.hosted.close()


class RestorableEpisode(AdaptedEpisode):
    """An episode whose class has ``snapshot`` and ``restore``. Snapshots are pickled where it lives, so they share
    nothing with it."""

    _kept: bytes | None = None

    async def snapshot(self) -> Any:
        return await self.hosted.call("snapshot"), self.answer, list(self._past)

    async def restore(self, state: Any) -> None:
        self._kept, self.answer, past = state
        self._past = list(past)
        await self.hosted.call("restore", self._kept)

    async def _keep(self) -> None:
        if self.hosted.killable and not self.environment.replayable:
            self._kept = await self.hosted.call("snapshot")

    async def _again(self) -> None:
        if self.environment.replayable:
            await super()._again()
            return
        await self._anew()
        if self._kept is not None:
            await self.hosted.call("restore", self._kept)


class Plain:
    """What runs in the thread or the process: one episode of a synchronous class."""

    def __init__(self, environment: Any, task: Task, longest: int) -> None:
        self.episode, self.task, self.longest = environment.episode(task), task, longest

    def begin(self) -> Opening:
        """The tools are those of the task, unless it names none."""
        opening = getattr(self.episode, "opening", None)
        messages = opening() if callable(opening) else self.task.prompt
        if isinstance(messages, str):
            messages = [Message(role=Role.USER, content=messages)]
        if not isinstance(messages, list) or not all(isinstance(message, Message) for message in messages):
            raise TypeError(self._returned("opening", messages, "a list of Message, or the text of a user's message"))
        offered = self.task.tools if json.loads(self.task.tools) else tools.schemas(self.episode)
        restorable = all(callable(getattr(self.episode, name, None)) for name in ("snapshot", "restore"))
        return Opening(messages, offered, callable(getattr(self.episode, "user", None)), restorable)

    def call(self, call: ToolCall) -> tuple[Observation, bool]:
        """The observation, and whether it was cut."""
        own = getattr(self.episode, "call", None)
        if callable(own) and not getattr(own, "is_tool", False):
            seen = tools.observed(own(call))
        else:
            seen = tools.answer(self.episode, call)
        text = cut(seen.content, self.longest)
        return Observation(text, seen.error, seen.reward, seen.done), text is not seen.content

    def user(self, text: str) -> Observation | None:
        """What the user says; None ends the episode."""
        answer = self.episode.user(text)
        return Observation(answer) if isinstance(answer, str) else answer

    def snapshot(self) -> bytes:
        return pickle.dumps(self.episode.snapshot())

    def restore(self, state: bytes) -> None:
        self.episode.restore(pickle.loads(state))

    def score(self, answer: str | None) -> Score | None:
        """The score; a number alone is the reward, and a task is solved by a reward above 0. None is unscored."""
        score = self.episode.score(answer)
        if score is None:
            return None
        if not isinstance(score, Score):
            try:
                value = float(score)
            except (TypeError, ValueError):
                raise TypeError(self._returned("score", score, "a Score, a number, or None")) from None
            score = Score(value > 0, (RewardComponent(name="score", value=value),))
        state = getattr(self.episode, "state", None)
        return Score(score.success, score.components, state()) if callable(state) else score

    def _returned(self, method: str, value: object, allowed: str) -> str:
        return f"{method}() of {type(self.episode).__name__} returned {value!r:.80}; return {allowed}"

    def close(self) -> None:
        close = getattr(self.episode, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()
