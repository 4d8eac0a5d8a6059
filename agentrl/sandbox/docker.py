"""The second sandbox: a container for each run, of an image with ``sh``, ``tar`` and ``python3``."""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.sandbox.bubblewrap import ENVIRONMENT, FOLDER
from agentrl.sandbox.run import Ran, ResourceLimits, SandboxError, archive, attended, room

_NUMBER = count()
KILLED = 137
"""The exit code of what was killed. The limit of memory does that; a program may also kill itself."""
END_S = 10
"""A container ends by itself so many seconds after its time, also if nobody is there any more to end it."""
BEGUN = b"begun\n"
"""What standard error begins with if the container began. A program can print what docker prints if it did not."""
START = (
    f"echo begun >&2; mkdir -p {FOLDER} && cd {FOLDER} && tar -xf - || exit 1; "
    '(sleep "$1"; kill -9 -1) </dev/null >/dev/null 2>&1 & shift; exec "$@" </dev/null'
)


class Docker(BaseModel):
    """Runs programs in containers: no network, read-only, no capabilities, as a user without rights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["docker"] = "docker"
    image: str = Field("python:3.12-slim", description="it has sh, tar and python3, and is on this machine already")
    limits: ResourceLimits = ResourceLimits(wall_s=40.0)

    @property
    def python(self) -> str:
        return "python3"

    async def run(
        self, command: Sequence[str], files: Mapping[str, bytes], limits: ResourceLimits | None = None
    ) -> Ran:
        """Run a command in a folder with these files. Its time begins when its container has been made. Raises
        SandboxError if docker is missing or starts nothing."""
        if not shutil.which("docker"):
            raise SandboxError("there is no `docker` on this machine; install it, or use `sandbox: bubblewrap`")
        limits = limits or self.limits
        name = f"agentrl-{os.getpid()}-{next(_NUMBER)}"
        start = ["docker", "start", "--attach", "--interactive", name]

        async def end(process: asyncio.subprocess.Process) -> None:
            with suppress(ProcessLookupError):
                process.kill()  # first: a container whose output nobody reads does not end
            await _docker("rm", "--force", "--volumes", name)

        async with room():
            with await asyncio.to_thread(archive, files) as packed:
                await self._make(name, limits, command)
                try:
                    ran = await attended(start, packed, limits, dict(os.environ), end)
                except BaseException:
                    await _docker("rm", "--force", "--volumes", name)
                    raise
        if ran.stopped is None and not ran.stderr.startswith(BEGUN):
            raise self._nothing(ran.stderr)
        killed = ran.code == KILLED and ran.stopped is None
        stderr = ran.stderr.removeprefix(BEGUN)
        return Ran(ran.code, ran.stdout, stderr, ran.seconds, "memory" if killed else ran.stopped)

    async def _make(self, name: str, limits: ResourceLimits, command: Sequence[str]) -> None:
        """Make the container. The daemon goes on making it if nobody waits any more, and only then can it be removed:
        a call that is cancelled waits too."""
        making = asyncio.ensure_future(_docker(*self._argv(name, limits, command)))
        try:
            code, output = await asyncio.shield(making)
        except asyncio.CancelledError:
            await making
            await _docker("rm", "--force", "--volumes", name)
            raise
        if code:
            raise self._nothing(output)

    def _nothing(self, output: bytes) -> SandboxError:
        words = output.decode(errors="replace").strip()
        return SandboxError(f"docker made no container of {self.image!r}: {words}")

    def _argv(self, name: str, limits: ResourceLimits, command: Sequence[str]) -> list[str]:
        argv = ["create", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none"]
        argv += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        argv += ["--user", "65534:65534", "--init", "--cpus", "1", "--pids-limit", str(limits.processes + 3)]
        argv += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
        argv += ["--tmpfs", f"/tmp:rw,exec,uid=65534,gid=65534,size={limits.disk_mb}m", "--workdir", "/tmp"]
        argv += ["--tmpfs", "/dev/shm:rw,size=1m"]
        argv += ["--ulimit", f"cpu={limits.cpu_s}:{limits.cpu_s + 1}", "--ulimit", f"fsize={limits.file_mb << 20}"]
        argv += ["--ulimit", "core=0", "--ulimit", "nofile=512"]
        for variable, value in ENVIRONMENT.items():
            argv += ["--env", f"{variable}={value}"]
        return [*argv, self.image, "/bin/sh", "-c", START, "sh", str(int(limits.wall_s) + END_S), *command]


async def _docker(*arguments: str) -> tuple[int, bytes]:
    """Run a docker command: its exit code, and what it complained of. It may fail, as it does if the container is
    gone."""
    quiet, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdin=quiet, stdout=quiet, stderr=pipe, start_new_session=True
    )
    _, output = await process.communicate()
    return process.returncode or 0, output
