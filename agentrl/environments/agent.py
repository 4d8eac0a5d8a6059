"""An agent program as an environment: it asks an endpoint for turns, and the policy gives them.

class Helpdesk(AgentEnvironment):
    name, version = "helpdesk", "1"
    def tasks(self, sizes, seed): ...
    async def run(self, task, endpoint):
        return await my_agent(task.prompt, endpoint.base_url, endpoint.api_key, endpoint.model)   # the reward

The program is written with any framework and is not changed. What it asks is recorded as ``agentrl serve`` records it:
each of its conversations is a row of the episode, and what ``run`` returns is the score of all.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from agentrl.environments.base import Episode, Score
from agentrl.environments.scripted import NoExpertError
from agentrl.schemas.installation import missing
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Termination

if TYPE_CHECKING:
    from agentrl.recorder.desk import AgentDesk

_AT_ONCE = 4096  # programs that are no coroutines, each in a thread


@dataclass(frozen=True)
class Endpoint:
    """What a client of OpenAI's API or of Anthropic's needs. ``api_key`` belongs to one episode. After ``seconds``
    requests are refused. ``door`` is a socket of files with the same behind it, for programs without a network."""

    base_url: str
    api_key: str
    model: str
    seconds: float
    door: Path

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True)
class AgentEnd:
    """How a program ended, for those who return more than a score. ``failure`` says how the program itself failed: then
    the episode is unscored, unless a limit of the episode explains it. ``stopped`` is a limit that ended it."""

    score: Score | float | None = None
    failure: str = ""
    stopped: Termination | None = None
    tags: tuple[str, ...] = ()


Returned = AgentEnd | Score | float | None


class AgentEnvironment:
    """Derive an environment from this, with ``name``, ``version``, :meth:`tasks` and :meth:`run`."""

    name: str
    version: str
    max_steps = 64

    def __new__(cls, *_: Any, **__: Any) -> "AgentEnvironment":
        """Raises ValueError if what serves the endpoint is not installed."""
        if lack := missing("uvicorn", "serve"):
            raise ValueError(f"an agent program asks an endpoint, and {lack}")
        return super().__new__(cls)

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """See :class:`agentrl.environments.base.Environment`."""
        raise NotImplementedError

    def run(self, task: Task, endpoint: Endpoint) -> Awaitable[Returned] | Returned:
        """One attempt of the agent: a coroutine, or a function that is called in a thread. Returns the score, or a
        number, the reward, by which a task is solved if it is above 0. None is unscored. What it raises is a failure of
        the environment, so that an agent that failed by what the policy said should return a reward."""
        raise NotImplementedError

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """See :class:`agentrl.environments.base.Demonstrator`: what an expert says in place of the policy."""
        raise NoExpertError(f"env {self.name!r} has no scripted expert; give it demonstrate(), or import trajectories")

    async def reset(self, task: Task) -> Episode:
        """Raises ValueError: no other than its own program can act in such an episode."""
        raise ValueError(f"env {self.name!r} is an agent program, whose episodes cannot be opened or gone on with")

    def begin(self, task: Task, endpoint: Endpoint) -> "asyncio.Future[Any]":
        """Start :meth:`run`."""
        if inspect.iscoroutinefunction(self.run):
            return asyncio.ensure_future(self.run(task, endpoint))
        threads: ThreadPoolExecutor = self.__dict__.setdefault("_threads", ThreadPoolExecutor(_AT_ONCE, "agent"))
        return asyncio.get_running_loop().run_in_executor(threads, self.run, task, endpoint)

    async def desk(self) -> "AgentDesk":
        """The endpoint, on this event loop."""
        from agentrl.recorder.desk import AgentDesk

        desk: AgentDesk | None = self.__dict__.get("_desk")
        if desk is None or desk.loop is not asyncio.get_running_loop():
            desk = self.__dict__["_desk"] = AgentDesk()
        await asyncio.shield(desk.started)
        return desk

    async def close(self) -> None:
        """Stop the endpoint."""
        if (desk := self.__dict__.pop("_desk", None)) is not None:
            await desk.stop()
        if (threads := self.__dict__.pop("_threads", None)) is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_desk", "_threads")}
