"""Environments of packages that cannot be installed beside ours: a program in an interpreter of their own holds them.

The program (:mod:`agentrl.environments.adapters.foreign_process` and what it loads) answers JSON lines. One serves all
episodes of a process of ours, and ends with it.
"""

import asyncio
import atexit
import itertools
import json
import os
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from agentrl.environments.base import Episode, Score, Step
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall

HERE = Path(__file__).parent


class ForeignError(RuntimeError):
    """The program in the other interpreter failed; the text says how."""


class Program:
    """A program in another interpreter, started when it is first asked. Threads and event loops may ask at once."""

    def __init__(self, python: str, holder: str, settings: dict[str, Any]) -> None:
        self.python, self.holder, self.settings = python, holder, settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"python": self.python, "holder": self.holder, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def ask(self, do: str, **values: Any) -> "Future[Any]":
        """What the program answers. The future raises ForeignError if the program does, or if it ends."""
        answer: Future[Any] = Future()
        with self._lock:
            process = self._started()
            number = next(self._numbers)
            self._waiting[number] = answer
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps({"number": number, "do": do, **values}) + "\n")
                process.stdin.flush()
            except OSError:
                pass  # the reader says why it ended
        return answer

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._numbers = itertools.count()
            self._waiting: dict[int, Future[Any]] = {}
            try:
                self._process = subprocess.Popen(
                    [self.python, "-P", str(HERE / "foreign_process.py"), self.holder, json.dumps(self.settings)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                )
            except OSError as error:
                raise ForeignError(f"{self.python} cannot be started: {error.strerror}; set python") from None
            threading.Thread(target=self._read, args=(self._process, self._waiting), daemon=True).start()
            atexit.register(self._process.terminate)
        return self._process

    def _read(self, process: "subprocess.Popen[str]", waiting: "dict[int, Future[Any]]") -> None:
        last: list[str] = []
        errors = threading.Thread(target=lambda: last.extend(process.stderr or []), daemon=True)
        errors.start()
        for line in process.stdout or []:
            reply = json.loads(line)
            answer = waiting.pop(reply["number"])
            if "error" in reply:
                answer.set_exception(ForeignError(reply["error"]))
            else:
                answer.set_result(reply["value"])
        process.wait()
        errors.join(5)
        atexit.unregister(process.terminate)
        printed = "".join(last)[-2000:] or f"it ended with status {process.returncode}"
        with self._lock:
            left = list(waiting.values())
            waiting.clear()
        for answer in left:
            answer.set_exception(ForeignError(f"{self.holder} in {self.python}: {printed}"))


class ForeignEpisode:
    """One attempt, which the program holds under ``number``."""

    def __init__(self, program: Program, number: int, begun: dict[str, Any]) -> None:
        self._program, self._number = program, number
        self.opening = [message_of(message) for message in begun["opening"]]
        self.tools = json.dumps(begun["tools"])

    async def step(self, message: Message) -> Step:
        reply = await asyncio.wrap_future(self._program.ask("step", episode=self._number, message=plain(message)))
        names = {call.id: call.name for call in message.tool_calls}
        messages = [message_of(message) for message in reply["messages"]]
        answers = [
            message.model_copy(update={"name": names.get(message.tool_call_id or "", message.name)})
            for message in messages
        ]
        return Step(answers, reply.get("reward"), reply["done"], {"tool_errors": reply.get("tool_errors", 0)})

    async def score(self) -> Score:
        reply = await asyncio.wrap_future(self._program.ask("score", episode=self._number))
        parts = tuple(RewardComponent(**component) for component in reply["components"])
        return Score(reply["success"], parts, reply.get("state"))

    async def close(self) -> None:
        await asyncio.wrap_future(self._program.ask("end", episode=self._number))


async def begin(program: Program, task: Task) -> Episode:
    """A new attempt at a task, as its metadata describes it to the program."""
    begun = await asyncio.wrap_future(program.ask("begin", task=json.loads(task.metadata), prompt=task.prompt))
    return ForeignEpisode(program, begun["episode"], begun)


def plain(message: Message) -> dict[str, Any]:
    """An assistant message for the program."""
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {"content": message.content, "reasoning": message.reasoning, "tool_calls": calls}


def message_of(plain_message: dict[str, Any]) -> Message:
    """A message of the program's."""
    calls = [ToolCall(**call) for call in plain_message.get("tool_calls") or []]
    answers, error = plain_message.get("tool_call_id"), plain_message.get("error")
    return Message(
        role=Role(plain_message["role"]),
        content=plain_message["content"],
        tool_calls=calls,
        tool_call_id=answers,
        error=error,
    )
