"""An agent program as an environment: it asks an OpenAI-compatible endpoint for turns, and the policy gives them.

class Helpdesk(AgentEnvironment):
    name, version = "helpdesk", "1"
    def tasks(self, sizes, seed): ...
    async def run(self, task, endpoint):
        return await my_agent(task.prompt, endpoint.base_url, endpoint.api_key, endpoint.model)   # the reward

The program is written with any framework and is not changed. What it sends first is the opening of the episode, what it
sends after a turn is the observation, and what ``run`` returns is the score. Its requests must go on with one
conversation, since an episode is one token sequence here. Record other agents with ``agentrl serve``.
"""

import asyncio
import inspect
import secrets
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from agentrl.environments.base import Episode, Score, Step
from agentrl.recorder.tree import canonical
from agentrl.recorder.wire import Answered, ApiError, Reply, TurnRequest, check_model
from agentrl.schemas.installation import missing
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role

_AT_ONCE = 4096  # programs that are no coroutines, each in a thread
_ENDS_S = 10.0  # what a program may take to end after it was told that the episode is over


@dataclass(frozen=True)
class Endpoint:
    """What a client of OpenAI's API needs. ``api_key`` belongs to one episode."""

    base_url: str
    api_key: str
    model: str = "policy"


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

    def run(self, task: Task, endpoint: Endpoint) -> "Awaitable[Score | float | None] | Score | float | None":
        """One attempt of the agent: a coroutine, or a function that is called in a thread. Returns the score, or a
        number, the reward, by which a task is solved if it is above 0. None is unscored. What it raises is a failure of
        the environment, so that an agent that failed by what the policy said should return a reward."""
        raise NotImplementedError

    async def reset(self, task: Task) -> Episode:
        """Start the agent, and wait for its first request."""
        episode = AgentEpisode(self, task, await self._desk())
        try:
            await episode.begin()
        except BaseException:
            await episode.close()
            raise
        return episode

    async def close(self) -> None:
        """Stop the endpoint."""
        desk: _Desk | None = self.__dict__.pop("_running", None)
        if desk is not None:
            await desk.stop()

    async def _desk(self) -> "_Desk":
        """The endpoint, on this event loop."""
        desk: _Desk | None = self.__dict__.get("_running")
        if desk is None or desk.loop is not asyncio.get_running_loop():
            desk = self.__dict__["_running"] = _Desk()
            desk.started = asyncio.create_task(desk.start())
        await asyncio.shield(desk.started)
        return desk

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_running"}


class _Desk:
    """The endpoint of all episodes under way: it hands requests to the episode whose key they have."""

    model = Endpoint.model
    started: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.episodes: dict[str, AgentEpisode] = {}
        self.threads = ThreadPoolExecutor(_AT_ONCE, "agent")

    async def start(self) -> None:
        from agentrl.recorder.app import application
        from agentrl.recorder.listening import bound
        from agentrl.recorder.server import server_of

        self.listening = bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        self.server = server_of(application(self))
        self.serving = asyncio.create_task(self.server.serve([self.listening]))

    async def stop(self) -> None:
        self.server.should_exit = True
        [ended] = await asyncio.gather(self.serving, return_exceptions=True)
        if ended is not None:  # it was cancelled with all else on the loop
            await self.server.shutdown([self.listening])
        self.threads.shutdown(wait=False, cancel_futures=True)

    def place_of(self, key: str | None, episode: str | None) -> "AgentEpisode":
        asking = self.episodes.get(key or "")
        if asking is None:
            raise ApiError(401, "the api key is not that of an episode under way", "invalid_api_key")
        return asking

    async def ask(self, episode: "AgentEpisode", asked: TurnRequest, digest: str, again: bool) -> Reply:
        check_model(asked.model, self.model)
        known = episode.replies.get(digest)
        if again and known is not None:
            return known
        reply = episode.replies[digest] = Reply(f"{episode.key}-{len(episode.replies)}")
        reply.begin(asyncio.create_task(episode.asked(reply, asked)))
        assert reply.task is not None
        reply.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return reply

    async def count(self, addressed: "AgentEpisode", asked: TurnRequest) -> int:
        raise ApiError(404, "tokens are not counted here")

    def received(self, reply: Reply) -> None:
        """What the policy said counts, whoever has received it."""

    async def left(self, reply: Reply) -> None:
        """The policy's turn does not depend on who waits for it."""


class AgentEpisode:
    """One attempt of an agent program."""

    opening: list[Message]
    tools = "[]"

    def __init__(self, environment: AgentEnvironment, task: Task, desk: _Desk) -> None:
        self.environment, self.task, self.desk = environment, task, desk
        self.key = f"run-{secrets.token_hex(12)}"
        self.replies: dict[str, Reply] = {}
        self._requests: asyncio.Queue[tuple[Reply, TurnRequest, asyncio.Future[Message]]] = asyncio.Queue()
        self._waiting: tuple[Reply, TurnRequest, asyncio.Future[Message]] | None = None
        self._said: list[Message] = []
        self._names: dict[str, tuple[str, str]] = {}
        self._over = False
        desk.episodes[self.key] = self

    async def begin(self) -> None:
        """Start the program. Raises what it raises, and RuntimeError if it ends without a request."""
        endpoint = Endpoint(self.desk.url, self.key)
        run = self.environment.run
        if inspect.iscoroutinefunction(run):
            self._program: asyncio.Future[Any] = asyncio.ensure_future(run(self.task, endpoint))
        else:
            self._program = asyncio.get_running_loop().run_in_executor(self.desk.threads, run, self.task, endpoint)
        if not await self._heard():
            raise RuntimeError("the agent ended without a request to its endpoint")
        assert self._waiting is not None
        asked = self._waiting[1]
        self._said = asked.conversation()
        self._instructed = asked.instructions is not None
        self.opening, self.tools = list(self._said), asked.tools

    async def asked(self, reply: Reply, asked: TurnRequest) -> Answered:
        """The policy's turn for a request."""
        turn: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._over:
            raise ApiError(400, "the episode is over", "episode_over")
        reply.encoded(0)  # it is the runner that counts tokens
        self._requests.put_nowait((reply, asked, turn))
        message = await turn
        if message.content:
            reply.add(message.content)
        finish = "tool_calls" if message.tool_calls else "stop"
        return Answered(reply.name, asked.model, message, finish, 0, 0, int(time.time()))  # type: ignore[arg-type]

    async def step(self, message: Message) -> Step:
        """Hand the turn to the program, and wait until it asks for the next one, or ends.

        Raises ValueError if it asks for a turn of another conversation.
        """
        if self._waiting is None:
            raise RuntimeError("the agent was still at work when limits.tool_s had passed; set it higher")
        (_, _, turn), self._waiting = self._waiting, None
        calls = [call.model_copy(update={"id": f"call_{secrets.token_hex(6)}"}) for call in message.tool_calls]
        self._names.update((new.id, (call.id, call.name)) for new, call in zip(calls, message.tool_calls, strict=True))
        shown = message.model_copy(update={"tool_calls": calls})
        self._said.append(shown)
        turn.set_result(shown)
        if not await self._heard():
            return Step(done=True)
        return Step(self._new())

    def _new(self) -> list[Message]:
        """What the request that waits adds to the conversation."""
        assert self._waiting is not None
        _, asked, _ = self._waiting
        before = self._said[self._instructed :] if asked.previous else []
        conversation = asked.conversation(before)
        known, new = conversation[: len(self._said)], conversation[len(self._said) :]
        for number, (then, now) in enumerate(zip(self._said, known, strict=False)):
            if canonical(then) != canonical(now):
                raise ValueError(
                    f"the agent changed message {number} of its conversation from {canonical(then)[:200]} to "
                    f"{canonical(now)[:200]}; record it with `agentrl serve`, and train with train.offline"
                )
        if asked.tools != self.tools or not new or any(message.role is Role.ASSISTANT for message in new):
            what = "its tools changed" if asked.tools != self.tools else "it began another conversation"
            raise ValueError(
                f"an episode is one conversation here, and {what}; record this agent with `agentrl serve`, and train "
                "with train.offline"
            )
        self._said += new
        return [self._named(message) for message in new]

    def _named(self, message: Message) -> Message:
        """A message with the id and the name that the policy gave the call that it answers."""
        if message.role is not Role.TOOL or (message.tool_call_id or "") not in self._names:
            return message
        call_id, name = self._names[message.tool_call_id or ""]
        return message.model_copy(update={"tool_call_id": call_id, "name": message.name or name})

    async def _heard(self) -> bool:
        """Wait for the next request; False if the program has ended. Raises what it raised."""
        request = asyncio.ensure_future(self._requests.get())
        try:
            await asyncio.wait({request, self._program}, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                self._waiting = request.result()
                return True
        finally:
            request.cancel()
        self._program.result()
        return False

    async def score(self) -> Score | None:
        """What the program returned. One that a limit ended is told that the episode is over, and may still return a
        reward; otherwise its task is not solved."""
        if not self._program.done():
            self._end()
            await asyncio.wait({self._program}, timeout=_ENDS_S)
            if not self._program.done() or self._program.cancelled() or self._program.exception() is not None:
                return Score(False, (RewardComponent(name="unfinished", value=0.0),))
        result = self._program.result()
        if result is None or isinstance(result, Score):
            return result
        return Score(float(result) > 0, (RewardComponent(name="score", value=float(result)),))

    def _end(self) -> None:
        """Refuse the request that waits, and those that come."""
        self._over = True
        left = [self._waiting] if self._waiting else []
        while not self._requests.empty():
            left.append(self._requests.get_nowait())
        for _, _, turn in left:
            if not turn.done():
                turn.set_exception(ApiError(400, "the episode is over", "episode_over"))
        self._waiting = None

    async def close(self) -> None:
        self._end()
        self.desk.episodes.pop(self.key, None)
        self._program.cancel()
        await asyncio.wait({self._program}, timeout=0.1)
        if self._program.done() and not self._program.cancelled():
            self._program.exception()  # it was told, or does not matter any more
