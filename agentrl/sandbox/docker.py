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
FAILED = 125
"""The exit code of ``docker run`` if it made no container."""
KILLED = 137
"""The exit code of what was killed. The limit of memory does that; a program may also kill itself."""
END_S = 10
"""A container ends by itself so many seconds after its time, also if nobody is there any more to end it."""
START = (
    f'mkdir -p {FOLDER} && cd {FOLDER} && tar -xf - || exit 1; (sleep "$1"; kill -9 -1) </dev/null >/dev/null 2>&1 & '
    'shift; exec "$@" </dev/null'
)


class Docker(BaseModel):
    """Runs programs with ``docker run``: no network, read-only, no capabilities, as a user without rights."""

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
        """Run a command in a folder with these files. Raises SandboxError if docker is missing or starts nothing."""
        if not shutil.which("docker"):
            raise SandboxError("there is no `docker` on this machine; install it, or use `sandbox: bubblewrap`")
        limits = limits or self.limits
        name = f"agentrl-{os.getpid()}-{next(_NUMBER)}"

        async def end(process: asyncio.subprocess.Process) -> None:
            with suppress(ProcessLookupError):
                process.kill()  # first: a container whose output nobody reads does not end
            await _docker("rm", "--force", "--volumes", name)

        async with room():
            with await asyncio.to_thread(archive, files) as packed:
                ran = await attended(self._argv(name, limits, command), packed, limits, dict(os.environ), end)
        said = ran.stderr.decode(errors="replace")
        if ran.code == FAILED and said.startswith(("docker:", "Unable to find image")):
            raise SandboxError(f"docker made no container of {self.image!r}: {said.strip()}")
        killed = ran.code == KILLED and ran.stopped is None
        return Ran(ran.code, ran.stdout, ran.stderr, ran.seconds, "memory") if killed else ran

    def _argv(self, name: str, limits: ResourceLimits, command: Sequence[str]) -> list[str]:
        argv = ["docker", "run", "--rm", "--interactive", "--name", name, "--pull", "never", "--log-driver", "none"]
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


async def _docker(*arguments: str) -> None:
    """Run a docker command. It may fail, as it does if the container is gone already."""
    process = await asyncio.create_subprocess_exec(
        "docker", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    await process.wait()
