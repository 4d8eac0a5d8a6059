"""The default sandbox: bubblewrap, a small program that gives another one its own view of the machine.

No network, a read-only system, its own process tree, users, and memory file system; no environment variable of ours.
"""

import asyncio
import fcntl
import functools
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Literal

import psutil
from pydantic import Field

from agentrl.sandbox import seccomp
from agentrl.sandbox.cgroups import Cgroup, places
from agentrl.sandbox.run import LocalPrograms, Ran, ResourceLimits, SandboxError, archive, attended, kill, room

FOLDER = "/tmp/work"
"""Where the files of a run are, and where it starts. All of /tmp is one file system in memory."""

WORKSPACE, DOOR = "/workspace", "/run/door"
"""A second file system in memory, and the socket that a run may connect to, of runs that are given a ``door``."""

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the tools that set a run up are found, besides ``bwrap`` and ``setpriv`` themselves."""

HIDDEN = ["--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
"""bwrap's own process in the run, whose memory and variables a program of the same user could open as files; and the
lists of the kernel's keys."""
for _list in ("/proc/keys", "/proc/key-users"):
    HIDDEN += ["--ro-bind", "/dev/null", _list] if os.path.exists(_list) else []

# bwrap's own --disable-userns lets the program survive bwrap (0.8): it forgets to die with its parent
BEGIN = f"""
echo 0 > /proc/sys/user/max_user_namespaces && tar -xf - -C {FOLDER} || exit 125
ulimit -S -t "$1"; ulimit -H -t "$2"; ulimit -f "$3"; ulimit -c 0; ulimit -n 512; ulimit -v "$5"
ulimit -u "$4" 2>/dev/null || ulimit -p "$4"
shift 5
flock -n 0 && exit 125
exec setpriv --ambient-caps=-all --inh-caps=-all "$@" </dev/null
"""
"""Closes namespaces, unpacks the files, sets the limits of single processes, and ends if the owner is gone
(:func:`_owned`). No namespaces inside, whose root could mount; closing them needs one right, which the program does not
get. ``-u`` is what bash calls ``-p`` of dash."""

OPEN = """
for door in $1; do echo 0 > "$door" || exit 125; done
count=$2; shift 2; number=0
[ $count -le 1 ] || mount -t tmpfs -o mode=755 none /sys || exit 125
while [ $number -lt $count ]; do
    place=/sys; [ $count -eq 1 ] || { place=/sys/$number; mkdir $place; }
    mount --rbind "$1" $place || exit 125
    shift; number=$((number + 1))
done
exec "$@"
"""
"""Enters the cgroup, and shows folders under /sys, in a view of the machine that this run alone has."""

INSTALL = (
    "bubblewrap runs untrusted code, and there is no `bwrap` on this machine. Install it: apt-get install bubblewrap "
    "(Debian, Ubuntu), dnf install bubblewrap (Fedora). Without a sandbox code runs only with `sandbox: unsafe`"
)


class Bubblewrap(LocalPrograms):
    """Runs programs under ``bwrap``, as a user without rights."""

    type: Literal["bubblewrap"] = "bubblewrap"
    readable: tuple[str, ...] = Field((), description="further folders that programs may read, at the same path")

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        limits: ResourceLimits | None = None,
        door: Path | None = None,
    ) -> Ran:
        """Run a command in a folder with these files. ``door`` is a socket of the host's that it may connect to, at
        :data:`DOOR`; such a run has an empty folder :data:`WORKSPACE` too, and mostly waits for what is behind the
        door, so that it does not wait for a core. Raises SandboxError if there is no sandbox here."""
        await asyncio.to_thread(check)
        async with nullcontext() if door else room():
            return await self._run(command, files, limits or self.limits, door)

    async def _run(
        self, command: Sequence[str], files: Mapping[str, bytes], limits: ResourceLimits, door: Path | None = None
    ) -> Ran:
        with await asyncio.to_thread(archive, files) as packed, _owned(packed) as release:
            async with Cgroup(limits) as cgroup:
                ran = await self._attended(command, packed, limits, cgroup, door, release)
                if ran.stopped is None and cgroup.out_of_memory():
                    return Ran(ran.code, ran.stdout, ran.stderr, ran.seconds, "memory")
                return ran

    async def _attended(
        self,
        command: Sequence[str],
        packed: IO[bytes],
        limits: ResourceLimits,
        cgroup: Cgroup,
        door: Path | None,
        release: Callable[[], None],
    ) -> Ran:
        async def end(process: asyncio.subprocess.Process) -> None:
            release()
            _kill_inside(process.pid)
            await kill(process)  # before the process tree inside is set up, it ends with the group of bwrap

        filtered = seccomp.readable()
        try:
            argv = [*_as_nobody(self._folders(), cgroup.doors), _tool("bwrap"), *self._view(limits, door)]
            argv += ["--seccomp", str(filtered), "--"]
            argv += ["/bin/sh", "-c", BEGIN, "sh", *_limited(limits, bool(cgroup.doors)), *command]
            # nothing of the host's variables or working folder goes in, not even into bwrap's own process
            return await attended(argv, packed, limits, {"PATH": SYSTEM_PATH}, end, folder="/", descriptors=[filtered])
        finally:
            os.close(filtered)

    def _folders(self) -> list[Path]:
        """The folders outside the system that programs may read."""
        folders = [Path(folder).absolute() for folder in (sys.base_prefix, *self.readable)]
        return [folder for folder in folders if not folder.is_relative_to("/usr")]

    def _view(self, limits: ResourceLimits, door: Path | None) -> list[str]:
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
        if door:
            view += ["--ro-bind", str(door), DOOR, "--size", str(limits.disk_mb << 20), "--tmpfs", WORKSPACE]
        # before the folders, since some lie in /tmp, as an environment that was made there
        view += ["--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp", "--dir", FOLDER, "--chdir", FOLDER]
        for folder in self._folders():
            view += ["--ro-bind", _source(folder, self._folders()), str(folder)]
        view += ["--proc", "/proc", *HIDDEN, "--dev", "/dev", "--size", str(1 << 20), "--tmpfs", "/dev/shm"]
        return [*view, "--remount-ro", "/dev", "--remount-ro", "/"]


def _kill_inside(pid: int) -> None:
    """Kill the first process of the tree inside, and with it the tree. That ends with bwrap only after it has asked the
    kernel for it, which it may do late: its program can run before. bwrap is stopped, so that it reaps nobody and the
    number stays that of its process."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGSTOP)
        for child in psutil.Process(pid).children():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)


def _as_nobody(folders: Sequence[Path], doors: Sequence[str]) -> list[str]:
    """The command that enters a cgroup, and by which root becomes a user without rights, because root could write files
    under /proc/sys even if it has another name inside. Before that, it makes folders readable that only root may enter
    (:func:`_source`)."""
    opened = [str(folder) for folder in folders if _closed(folder)] if os.geteuid() == 0 else []
    apart = ["unshare", "--mount", "--propagation", "private"] if opened else []
    begin = [*apart, "/bin/sh", "-c", OPEN, "sh", " ".join(doors), str(len(opened)), *opened]
    nobody = [_tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    return [*(begin if doors or opened else []), *nobody]


def _tool(name: str) -> str:
    """The path of a program of the host, by the host's own PATH."""
    return os.path.abspath(shutil.which(name) or name)


def _closed(folder: Path) -> bool:
    """Whether nobody but its owner may enter a folder above this one."""
    return any(not above.stat().st_mode & stat.S_IXOTH for above in folder.parents)


def _source(folder: Path, folders: Sequence[Path]) -> str:
    """Where a folder is found after :func:`_as_nobody`."""
    if os.geteuid() != 0 or not _closed(folder):
        return str(folder)
    opened = [folder for folder in folders if _closed(folder)]
    return "/sys" if len(opened) == 1 else f"/sys/{opened.index(folder)}"


def _limited(limits: ResourceLimits, grouped: bool) -> list[str]:
    """The limits of single processes, as :data:`BEGIN` takes them: seconds, blocks of 512 bytes, processes, and the KiB
    of memory that a cgroup does not limit."""
    memory = "unlimited" if grouped else str(limits.memory_mb << 10)
    return [str(limits.cpu_s), str(limits.cpu_s + 1), str(limits.file_mb * 2048), str(limits.processes), memory]


@contextmanager
def _owned(packed: IO[bytes]) -> Iterator[Callable[[], None]]:
    """Hold a lock on this file while this process lives, until the function that this gives is called. What runs inside
    dies with its parents, but bwrap asks the kernel for that late in its set-up: so the last thing before a program is
    to see whether the lock is still held."""
    other = os.open(f"/proc/self/fd/{packed.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(other, fcntl.LOCK_UN)
    finally:
        os.close(other)


@functools.cache
def check() -> str:
    """How memory and processes are limited here: ``cgroup``, or ``each process``. Raises SandboxError that says what to
    do if bubblewrap is missing or may not work."""
    if not shutil.which("bwrap"):
        raise SandboxError(INSTALL)
    for name in ("setpriv", "flock"):
        if not shutil.which(name):
            raise SandboxError(f"there is no `{name}` on this machine; install the package util-linux")
    try:
        seccomp.program()
    except ValueError as error:
        raise SandboxError(f"{error}; choose `sandbox: docker`, whose daemon has a filter of its own") from error
    tried = asyncio.run(Bubblewrap()._run(["/bin/true"], {}, ResourceLimits()))
    if tried.code:
        reason = tried.stderr.decode(errors="replace").strip() or f"exit code {tried.code}"
        raise SandboxError(
            f"bubblewrap cannot make a sandbox here: {reason}. It needs version 0.8 and user namespaces "
            "(sysctl user.max_user_namespaces; kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; "
            "a container needs --privileged)"
        )
    return "cgroup" if places() else "each process"
