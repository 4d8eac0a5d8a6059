"""Where synchronous episodes run: threads, or processes that can be killed. Neither blocks the event loop."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Pipe
from queue import SimpleQueue
from typing import Any, Protocol

from agentrl.schemas.installation import python_path
from agentrl.schemas.trajectory import InfrastructureError


class HostedError(Exception):
    """An episode's own code raised. The text is the exception in one line, and its traceback is a note.
    ``infrastructure`` says that it raised :class:`agentrl.schemas.trajectory.InfrastructureError`."""

    def __init__(self, summary: str, trace: str, infrastructure: bool = False) -> None:
        super().__init__(summary)
        self.add_note(trace)
        self.infrastructure = infrastructure


class Hosted(Protocol):
    """An object that lives elsewhere. ``killable`` says that a call that is cancelled takes it along, ``lost`` that it
    is gone."""

    killable: bool
    lost: bool

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of it. Raises HostedError if the method raises. If the call is cancelled, a thread is left to
        itself, and a process is killed."""
        ...

    async def close(self) -> None: ...


class Host(Protocol):
    async def start(self, make: Callable[[], Any]) -> Hosted:
        """What ``make`` returns, in its place."""
        ...

    async def close(self) -> None: ...


class Threads:
    """At most ``size`` daemon threads. A thread that hangs is replaced by another: Python cannot end it."""

    def __init__(self, size: int = 64) -> None:
        self._room = asyncio.Semaphore(size)
        self._idle: list[SimpleQueue[Any]] = []

    async def start(self, make: Callable[[], Any]) -> "_InThread":
        return _InThread(self, await self.run(make))

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns, called in a thread. Raises HostedError if it raises."""
        async with self._room:
            jobs = self._idle.pop() if self._idle else self._new()
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            jobs.put((function, arguments, done))
            try:
                result = await done
            except asyncio.CancelledError:
                jobs.put(None)
                raise
            except BaseException:
                self._idle.append(jobs)
                raise
            self._idle.append(jobs)
            return result

    @staticmethod
    def _new() -> "SimpleQueue[Any]":
        jobs: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), daemon=True, name="agentrl-tool").start()
        return jobs

    async def close(self) -> None:
        for jobs in self._idle:
            jobs.put(None)
        self._idle = []


def _serve(jobs: "SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        function, arguments, done = job
        try:
            outcome, value = done.set_result, function(*arguments)
        except BaseException as error:  # whatever a user's code raises
            outcome, value = done.set_exception, _hosted(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            done.get_loop().call_soon_threadsafe(_settle, done, outcome, value)
        del job, function, arguments, done, outcome, value


def _settle(done: "asyncio.Future[Any]", outcome: Callable[[Any], None], value: Any) -> None:
    if not done.done():
        outcome(value)


def _hosted(error: BaseException) -> HostedError:
    if isinstance(error, HostedError):
        return error
    trace = "".join(traceback.format_exception(error))
    return HostedError(f"{type(error).__name__}: {error}"[:500], trace, isinstance(error, InfrastructureError))


class _InThread:
    killable = lost = False

    def __init__(self, threads: Threads, inner: Any) -> None:
        self.threads, self.inner = threads, inner

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.threads.run(getattr(self.inner, method), *arguments)

    async def close(self) -> None:
        await self.threads.run(self.inner.close)


class Processes:
    """At most ``size`` processes, one for each episode under way. A process is used again after its episode."""

    def __init__(self, size: int) -> None:
        self._room = asyncio.Semaphore(size)
        self._threads = Threads(size)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    async def start(self, make: Callable[[], Any]) -> "_InProcess":
        await self._room.acquire()
        process = self._idle.pop() if self._idle else None
        try:
            if process is None:
                process = _Process()
                self._all.add(process)
            hosted = _InProcess(self, process)
            await hosted.ask("start", make)
        except BaseException:
            if process is not None:
                self.end(process)
            self._room.release()
            raise
        return hosted

    def end(self, process: "_Process") -> None:
        self._all.discard(process)
        process.kill()

    async def close(self) -> None:
        for process in list(self._all):
            self.end(process)
        self._idle = []
        await self._threads.close()


class _InProcess:
    killable = True

    def __init__(self, host: Processes, process: "_Process") -> None:
        self.host, self.process = host, process
        self.lost = self.closed = False

    async def ask(self, *message: Any) -> Any:
        try:
            kind, value = await self.host._threads.run(self.process.ask, message)
        except asyncio.CancelledError:
            self.lost = True
            self.host.end(self.process)
            raise
        except HostedError as error:
            self.lost = True
            self.host.end(self.process)
            raise RuntimeError(f"the process of an episode died: {error}") from None
        if kind == "raised":
            raise HostedError(*value)
        return value

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.ask("call", method, arguments)

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        try:
            if not self.lost:
                await self.ask("close")
        finally:
            if not self.lost:
                self.host._idle.append(self.process)
            self.host._room.release()


class _Process:
    """A child that holds one object at a time; a session of its own, so that what its tools start dies with it."""

    def __init__(self) -> None:
        self.connection, child_end = Pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentrl.environments.hosted_process", str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        child_end.close()

    def ask(self, message: tuple[Any, ...]) -> Any:
        self.connection.send_bytes(pickle.dumps(message))
        return pickle.loads(self.connection.recv_bytes())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        with contextlib.suppress(OSError):
            self.connection.close()
