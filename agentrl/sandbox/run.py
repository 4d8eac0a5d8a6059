"""One run of a program in a sandbox: its limits, its files, its output, and its end, whatever it does."""

import asyncio
import io
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field

from agentrl.schemas.trajectory import InfrastructureError

Stop = Literal["wall_time", "cpu_time", "memory", "output"]


class SandboxError(InfrastructureError):
    """There is no sandbox to run in. The message says what to install or to set."""


class ResourceLimits(BaseModel):
    """What one run may use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpu_s: int = Field(10, ge=1, description="seconds of CPU time of one process")
    wall_s: float = Field(20.0, gt=0, description="seconds from start to end; with a cgroup, on one core")
    memory_mb: int = Field(512, ge=16, description="of all processes and their files, or of each without a cgroup")
    processes: int = Field(64, ge=4, description="processes and threads at the same time")
    file_mb: int = Field(16, ge=1, description="size of one file")
    disk_mb: int = Field(64, ge=1, description="size of all files, which are in memory")
    output_kb: int = Field(256, ge=1, description="of standard output, and as much of standard error")


class LocalPrograms(BaseModel):
    """A sandbox on this machine. ``python`` is the interpreter that runs agentrl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limits: ResourceLimits = ResourceLimits()

    @property
    def python(self) -> str:
        return os.path.realpath(sys.executable)


@dataclass(frozen=True)
class Ran:
    """How a run ended. ``stopped`` is the limit that ended it, or None. ``code`` is the exit code, and
    128 plus the signal if a signal ended the program. Output beyond the limit is cut."""

    code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    stopped: Stop | None = None

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself, with exit code 0."""
        return self.code == 0 and self.stopped is None


_ROOM: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]" = WeakKeyDictionary()


def room() -> asyncio.Semaphore:
    """At most as many runs at once as there are cores, so that a run's wall time does not depend on how many wait."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _ROOM.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(cores))


def archive(files: Mapping[str, bytes]) -> IO[bytes]:
    """An unnamed file with a tar of the files, at its start. Raises ValueError that names a path outside the folder."""
    packed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (its user closes it)
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(checked(path))
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    return packed


def checked(path: str) -> str:
    """The path itself. Raises ValueError if it is no plain path inside a folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"path {path!r}: give a path inside the folder, without '..'")
    return path


async def attended(
    argv: Sequence[str],
    stdin: IO[bytes],
    limits: ResourceLimits,
    environment: Mapping[str, str],
    end: Callable[[asyncio.subprocess.Process], Awaitable[None]],
    *,
    folder: str | None = None,
    descriptors: Sequence[int] = (),
) -> Ran:
    """Start a program, read its output, and end it by ``end`` if it exceeds its time or its output, or if this call is
    cancelled. When this returns, the program is gone. It starts in ``folder``, and gets the file
    ``descriptors``."""
    started = time.perf_counter()
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=folder,
            pass_fds=descriptors,
            start_new_session=True,
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:  # asyncio would kill the first process alone, and wait for those that it started
        await _ended(await starting, end)
        raise
    kept, ended = (bytearray(), bytearray()), False
    stopped: Stop | None = None
    assert process.stdout is not None
    assert process.stderr is not None
    streams = (process.stdout, process.stderr)
    try:
        async with asyncio.timeout(limits.wall_s):
            reading = (_read(*pair, limits, lambda: end(process)) for pair in zip(streams, kept, strict=True))
            more = await asyncio.gather(*reading)
            await process.wait()
        ended = True
        stopped = "output" if any(more) else None
    except TimeoutError:
        stopped = "wall_time"
    finally:
        if not ended:
            await _ended(process, end)
    code = process.returncode or 0
    if stopped is None and code in (128 + 24, -24):  # SIGXCPU
        stopped = "cpu_time"
    seconds = time.perf_counter() - started
    return Ran(code if code >= 0 else 128 - code, bytes(kept[0]), bytes(kept[1]), seconds, stopped)


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process group of a program."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _ended(
    process: asyncio.subprocess.Process, end: Callable[[asyncio.subprocess.Process], Awaitable[None]]
) -> None:
    with suppress(ProcessLookupError):
        await end(process)
    await process.wait()


async def _read(
    stream: asyncio.StreamReader, into: bytearray, limits: ResourceLimits, end: Callable[[], Awaitable[None]]
) -> bool:
    """Keep what there is room for, and end the program at more. Returns whether there was more."""
    more = False
    while chunk := await stream.read(1 << 16):
        left = limits.output_kb * 1024 - len(into)
        into += chunk[:left]
        if len(chunk) > left and not more:
            more = True
            await end()
    return more
