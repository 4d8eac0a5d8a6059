"""``mcp``: the tools of a server of the Model Context Protocol, by the official ``mcp`` package.

Each episode starts a server of its own, a process that is spoken to over stdio, or connects to a URL. A server brings
tools, and neither tasks nor scores: tasks come from a file (``tasks.import``). If a task's ground truth is an object,
its facts are compared with the state that ``state_tool`` tells at the end; if it is text or a number, with the answer.
Without a ground truth the episode is unscored, for ``trajectories.score`` or a judge.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from agentrl.environments.base import Episode, Observation, Score, Step, answered, timed
from agentrl.rewards.answers import exact_match, truths
from agentrl.rewards.verifiers import share_of_facts
from agentrl.schemas.installation import install_hint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import InfrastructureError, Message, RewardComponent, Role, ToolCall

if TYPE_CHECKING:
    from mcp import Client

Ask = Callable[["Client"], Awaitable[Any]]


class McpEnvironment:
    """See the module's docstring. ``state_tool`` is called without arguments when the episode ends, and the policy does
    not see it. A server's code is not in the fingerprint: raise ``server_version`` if it changes."""

    name = "mcp"

    def __init__(
        self,
        command: Annotated[str, Field(description="program that serves over stdio")] = "",
        args: Annotated[list[str], Field(description="its arguments")] = [],  # noqa: B006  (the default of a setting)
        env: Annotated[dict[str, str], Field(description="its environment variables")] = {},  # noqa: B006
        url: Annotated[str, Field(description="of a server over HTTP, in place of command")] = "",
        tools: Annotated[list[str] | None, Field(description="those on offer; null: all")] = None,
        state_tool: Annotated[str | None, Field(description="a tool that tells the server's state")] = None,
        server_version: Annotated[str, Field(description="in every row, as env_version")] = "1",
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 32,
        start_s: Annotated[float, Field(gt=0, description="seconds in which a server must answer")] = 60.0,
    ) -> None:
        if bool(command) == bool(url):
            raise ValueError("set exactly one of command (a server over stdio) and url")
        self.command, self.args, self.env, self.url = command, args, env, url
        self.offered, self.state_tool, self.start_s = tools, state_tool, start_s
        self.version, self.max_steps = server_version, max_steps

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Raises ValueError: a server has no tasks."""
        raise ValueError("an MCP server brings tools and no tasks; bring tasks in with tasks.import, with.env: mcp")

    async def reset(self, task: Task) -> Episode:
        """Raises ImportError if ``mcp`` is not installed, TimeoutError if the server does not answer in time, and
        LookupError if it lacks a tool that is to be offered."""
        try:
            from mcp import Client, StdioServerParameters
        except ImportError:
            raise ImportError(f"environment mcp needs the package mcp; {install_hint('mcp')}") from None
        server = StdioServerParameters(command=self.command, args=self.args, env=self.env or None)
        line = _Line(Client(server if self.command else self.url))
        try:
            async with asyncio.timeout(self.start_s):
                known = await line.ask(_all_tools)
            return McpEpisode(task, line, self._tools(known), self.state_tool)
        except BaseException:
            await line.close()
            raise

    def _tools(self, known: dict[str, Any]) -> dict[str, Any]:
        names = [name for name in known if name != self.state_tool] if self.offered is None else self.offered
        wanted = [*names, *([self.state_tool] if self.state_tool else [])]
        if missing := [name for name in wanted if name not in known]:
            raise LookupError(f"the MCP server has no tool {missing[0]!r}; it has {', '.join(known) or 'none'}")
        return {name: known[name] for name in names}


async def _all_tools(client: "Client") -> dict[str, Any]:
    """Name -> tool, from all pages of the server's list."""
    tools: dict[str, Any] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools.update((tool.name, tool) for tool in page.tools)
        cursor = page.next_cursor
        if not cursor:
            return tools


class _Line:
    """A connection that one asyncio task holds from beginning to end, because its contexts must be left by the task
    that entered them. Other tasks ask through it, one after the other."""

    def __init__(self, client: "Client") -> None:
        self._asked: asyncio.Queue[tuple[Ask, asyncio.Future[Any]] | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._hold(client))

    async def ask(self, work: Ask) -> Any:
        """What ``work`` returns, given the client. Raises what it raises, and ConnectionError if the line is down. If
        it is cancelled, so is ``work``, and the next one begins."""
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((work, done))
        try:
            await asyncio.wait([done, self._task], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            done.cancel()
            raise
        if not done.done():
            raise ConnectionError("the MCP server is gone") from _reason(self._task)
        return done.result()

    async def close(self) -> None:
        self._asked.put_nowait(None)
        done, _ = await asyncio.wait([self._task], timeout=10)
        if not done:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _hold(self, client: "Client") -> None:
        async with client:
            while (asked := await self._asked.get()) is not None:
                work, done = asked
                if done.cancelled():
                    continue
                working = asyncio.ensure_future(work(client))
                result: Any
                try:
                    await asyncio.wait([working, done], return_when=asyncio.FIRST_COMPLETED)
                finally:  # a call that hangs ends here if nobody waits for it any more
                    working.cancel()
                    [result] = await asyncio.gather(working, return_exceptions=True)
                if done.done():
                    continue
                if isinstance(result, asyncio.CancelledError):
                    done.cancel()
                elif isinstance(result, BaseException):
                    done.set_exception(result)
                else:
                    done.set_result(result)


def _reason(task: "asyncio.Task[None]") -> BaseException | None:
    with contextlib.suppress(asyncio.CancelledError, asyncio.InvalidStateError):
        return task.exception()
    return None


class McpEpisode:
    """One attempt, with a server of its own."""

    def __init__(self, task: Task, line: _Line, tools: dict[str, Any], state_tool: str | None) -> None:
        self.task, self._line, self._names, self._state_tool = task, line, set(tools), state_tool
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.tools = json.dumps([_schema(tool) for tool in tools.values()])
        self.answer: str | None = None

    async def step(self, message: Message) -> Step:
        if not message.tool_calls:
            self.answer = message.content
            return Step(done=True)
        return answered(message, [await timed(self._call(call)) for call in message.tool_calls])

    async def _call(self, call: ToolCall) -> Observation:
        arguments = call.parsed()
        if call.name not in self._names:
            return Observation(f"no tool {call.name}; there are {', '.join(sorted(self._names)) or 'none'}", error=True)
        if not isinstance(arguments, dict):
            return Observation(f"{call.name} takes an object of arguments", error=True)
        return await self._asked(call.name, arguments)

    async def _asked(self, name: str, arguments: dict[str, Any]) -> Observation:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        try:
            result = await self._line.ask(lambda client: client.call_tool(name, arguments))
        except (MCPError, ConnectionError) as error:
            if not isinstance(error, MCPError) or error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
                raise InfrastructureError(f"{name}: the MCP server does not answer: {error}") from error
            return Observation(f"{name}: {error}", error=True)
        return Observation("\n".join(map(_text, result.content)), error=bool(result.is_error))

    async def score(self) -> Score | None:
        """The share of facts that hold, or 1 if the answer is right; None of a task without a ground truth. Raises
        ValueError if facts are expected, and the server has no tool that tells its state as JSON."""
        truth = json.loads(self.task.ground_truth)
        state: dict[str, Any] = {"answer": self.answer}
        if self._state_tool:
            observation = await self._asked(self._state_tool, {})
            if observation.error:
                raise ValueError(f"state_tool {self._state_tool} failed: {observation.content}")
            state["server"] = json.loads(observation.content)
        if truth is None:
            return None
        if isinstance(truth, dict):
            if not self._state_tool:
                raise ValueError(f"task {self.task.task_id} expects facts; set state_tool, which tells them")
            share = share_of_facts(truth, state["server"])
            return Score(share == 1, (RewardComponent(name="facts", value=share),), state)
        right = self.answer is not None and any(exact_match(self.answer, truth) for truth in truths(self.task))
        return Score(right, (RewardComponent(name="exact_match", value=float(right)),), state)

    async def close(self) -> None:
        await self._line.close()


def _schema(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(content: Any) -> str:
    """A part of a result as text; other kinds than text are named with their type and size."""
    if content.type == "text":
        return str(content.text)
    return f"[{content.type} of {len(content.model_dump_json())} characters]"
