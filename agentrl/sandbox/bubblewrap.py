"""The default sandbox: bubblewrap, a small program that gives another one its own view of the machine.

No network, a read-only system, its own process tree, users, and memory file system; no environment variable of ours.
"""

import asyncio
import functools
import os
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.sandbox.cgroups import Cgroup, places
from agentrl.sandbox.run import Ran, ResourceLimits, SandboxError, archive, attended, room

FOLDER = "/tmp/work"
"""Where the files of a run are, and where it starts. All of /tmp is one file system in memory."""

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
UNPACK = f'tar -xf - -C {FOLDER} && exec "$@" </dev/null'
# bwrap's own --disable-userns lets the program survive bwrap (0.8): it forgets to die with its parent
CLOSE = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
"""No namespaces inside, whose root could mount. It needs one right, which the program does not get."""

OPEN = (
    "mount -t tmpfs -o mode=755 none /sys; count=$1; shift; number=0; while [ $number -lt $count ]; do "
    'mkdir /sys/$number; mount --rbind "$1" /sys/$number || exit 125; shift; number=$((number + 1)); done; exec "$@"'
)
"""Shows folders under /sys, in a view of the machine that this run alone has."""

ENTER = 'doors=$1; shift; for door in $doors; do echo 0 > "$door" || exit 125; done; exec "$@"'

INSTALL = (
    "bubblewrap runs untrusted code, and there is no `bwrap` on this machine. Install it: apt-get install bubblewrap "
    "(Debian, Ubuntu), dnf install bubblewrap (Fedora). Without a sandbox code runs only with `sandbox: unsafe`"
)


class Bubblewrap(BaseModel):
    """Runs programs under ``bwrap``, as a user without rights. ``python`` is the interpreter that runs agentrl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["bubblewrap"] = "bubblewrap"
    limits: ResourceLimits = ResourceLimits()
    readable: tuple[str, ...] = Field((), description="further folders that programs may read, at the same path")

    @property
    def python(self) -> str:
        return os.path.realpath(sys.executable)

    async def run(
        self, command: Sequence[str], files: Mapping[str, bytes], limits: ResourceLimits | None = None
    ) -> Ran:
        """Run a command in a folder with these files. Raises SandboxError if there is no sandbox here."""
        await asyncio.to_thread(check)
        async with room():
            return await self._run(command, files, limits or self.limits)

    async def _run(self, command: Sequence[str], files: Mapping[str, bytes], limits: ResourceLimits) -> Ran:
        with await asyncio.to_thread(archive, files) as packed:
            async with Cgroup(limits) as cgroup:
                ran = await self._attended(command, packed, limits, cgroup)
                if ran.stopped is None and cgroup.out_of_memory():
                    return Ran(ran.code, ran.stdout, ran.stderr, ran.seconds, "memory")
                return ran

    async def _attended(self, command: Sequence[str], packed: IO[bytes], limits: ResourceLimits, cgroup: Cgroup) -> Ran:
        argv = ["/bin/sh", "-c", ENTER, "sh", " ".join(cgroup.doors)]
        argv += [*_as_nobody(self._folders()), "bwrap", *self._view(limits), "--"]
        argv += ["/bin/sh", "-c", CLOSE, "sh", "setpriv", "--ambient-caps=-all", "--inh-caps=-all"]
        argv += [*_limited(limits, bool(cgroup.doors)), "/bin/sh", "-c", UNPACK, "sh", *command]
        # bwrap's own environment could be read inside, in /proc/1/environ
        return await attended(argv, packed, limits, {"PATH": os.environ.get("PATH", os.defpath)}, _kill)

    def _folders(self) -> list[Path]:
        """The folders outside the system that programs may read."""
        return [one for one in map(Path, (sys.base_prefix, *self.readable)) if not one.is_relative_to("/usr")]

    def _view(self, limits: ResourceLimits) -> list[str]:
        """What a program sees of the machine."""
        view = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
        view += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--clearenv"]
        view += ["--cap-add", "CAP_SYS_RESOURCE"]
        for name, value in ENVIRONMENT.items():
            view += ["--setenv", name, value]
        view += ["--ro-bind", "/usr", "/usr"]
        for path in (Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib32"), Path("/lib64")):
            if path.is_symlink():
                view += ["--symlink", os.readlink(path), str(path)]
            elif path.exists():
                view += ["--ro-bind", str(path), str(path)]
        for part in ("/etc/ld.so.cache", "/etc/alternatives"):
            view += ["--ro-bind-try", part, part]
        # before the folders, since some lie in /tmp, as an environment that was made there
        view += ["--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--dir", FOLDER, "--chdir", FOLDER]
        for folder in self._folders():
            view += ["--ro-bind", _source(folder, self._folders()), str(folder)]
        view += ["--proc", "/proc", "--dev", "/dev", "--size", str(1 << 20), "--tmpfs", "/dev/shm"]
        return [*view, "--remount-ro", "/dev", "--remount-ro", "/"]


def _as_nobody(folders: Sequence[Path]) -> list[str]:
    """The command by which root becomes a user without rights, because files under /proc/sys are root's, whatever root
    is called inside. Before that, it makes folders readable that only root may enter (:func:`_source`)."""
    if os.geteuid() != 0:
        return []
    opened = [str(folder) for folder in folders if _closed(folder)]
    door = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", OPEN, "sh", str(len(opened)), *opened]
    return [*(door if opened else []), "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def _closed(folder: Path) -> bool:
    """Whether nobody but its owner may enter a folder above this one."""
    return any(not above.stat().st_mode & stat.S_IXOTH for above in folder.parents)


def _source(folder: Path, folders: Sequence[Path]) -> str:
    """Where a folder is found after :func:`_as_nobody`."""
    if os.geteuid() != 0 or not _closed(folder):
        return str(folder)
    return f"/sys/{[one for one in folders if _closed(one)].index(folder)}"


def _limited(limits: ResourceLimits, grouped: bool) -> list[str]:
    """The command that sets the limits of single processes."""
    argv = ["prlimit", f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", f"--fsize={limits.file_mb << 20}", "--core=0"]
    argv += ["--nofile=512", f"--nproc={limits.processes}"]
    return argv if grouped else [*argv, f"--as={limits.memory_mb << 20}"]


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()  # the process tree inside ends with bwrap


@functools.cache
def check() -> str:
    """How memory and processes are limited here: ``cgroup``, or ``each process``. Raises SandboxError that says what to
    do if bubblewrap is missing or may not work."""
    if not shutil.which("bwrap"):
        raise SandboxError(INSTALL)
    if not shutil.which("prlimit") or not shutil.which("setpriv"):
        raise SandboxError("there is no `prlimit` or no `setpriv` on this machine; install the package util-linux")
    tried = asyncio.run(Bubblewrap()._run(["/bin/true"], {}, ResourceLimits()))
    if tried.code:
        said = tried.stderr.decode(errors="replace").strip() or f"exit code {tried.code}"
        raise SandboxError(
            f"bubblewrap cannot make a sandbox here: {said}. It needs version 0.8 and user namespaces "
            "(sysctl user.max_user_namespaces; kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; "
            "a container needs --privileged)"
        )
    return "cgroup" if places() else "each process"
