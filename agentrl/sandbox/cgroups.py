"""A cgroup for one run: memory of all its processes and their files together, number of processes, one core.

Both versions of cgroups are known. If this user may make none (without delegation, or in a container), the limits of
single processes apply instead, which the kernel enforces for every user but root.
"""

import asyncio
import functools
import os
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil

from agentrl.sandbox.run import ResourceLimits

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
PERIOD_US = 100_000
_NUMBER = count()


@functools.cache
def places() -> tuple[Path, ...]:
    """The folders in which a cgroup with memory and processes can be made: one in version 2, one for each controller in
    version 1, none if there are no such folders."""
    try:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:
        return ()
    own = {controller: path.lstrip("/") for _, names, path in lines for controller in names.split(",")}
    if {"memory", "pids"} <= set(own):
        folders = [ROOT / name / own[name] for name in ("memory", "pids", "cpu") if name in own]
        folders = [folder for folder in folders if _usable(folder)]
        return tuple(folders) if {"memory", "pids"} <= {_controller(folder) for folder in folders} else ()
    here = ROOT / own.get("", "")
    for folder in (here, *here.parents):
        if folder == ROOT.parent:
            break
        with suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()) and _usable(folder):
                return (folder,)
    return ()


def _controller(folder: Path) -> str:
    return folder.relative_to(ROOT).parts[0]


def _usable(folder: Path) -> bool:
    probe = folder / f"agentrl-{os.getpid()}-probe"
    try:
        probe.mkdir()
    except OSError:
        return False
    probe.rmdir()
    _sweep(folder)
    return True


def _sweep(folder: Path) -> None:
    """Remove what killed processes left: empty groups, named by the process that made them."""
    for left in folder.glob("agentrl-*-*"):
        made_by = left.name.split("-")[1]
        if made_by.isdigit() and not psutil.pid_exists(int(made_by)):
            with suppress(OSError):
                left.rmdir()


class Cgroup:
    """The cgroup of one run, as a context: made at the start, removed at the end with all that still runs."""

    def __init__(self, limits: ResourceLimits) -> None:
        self.limits = limits
        name = f"agentrl-{os.getpid()}-{next(_NUMBER)}"
        self.folders = [folder / name for folder in places()]

    @property
    def doors(self) -> list[str]:
        """The files that a process writes 0 into, to enter."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    async def __aenter__(self) -> "Cgroup":
        memory, pids = str(self.limits.memory_mb << 20), str(self.limits.processes + 2)  # with the two of bwrap
        for folder in self.folders:
            folder.mkdir()
            _write(folder / "pids.max", pids)
            _write(folder / "memory.limit_in_bytes", memory)
            _write(folder / "memory.memsw.limit_in_bytes", memory)
            _write(folder / "memory.max", memory)
            _write(folder / "memory.swap.max", "0")
            _write(folder / "memory.oom.group", "1")
            _write(folder / "cpu.cfs_quota_us", str(PERIOD_US))
            _write(folder / "cpu.max", f"{PERIOD_US} {PERIOD_US}")
        return self

    def out_of_memory(self) -> bool:
        """Whether the kernel ended a process for the memory that the group used."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                    if int(counts.get("oom_kill", 0)):
                        return True
        return False

    async def __aexit__(self, *_error: object) -> None:
        for folder in self.folders:
            await _empty(folder)


def _write(file: Path, value: str) -> None:
    """Set a limit, if the kernel has it: which files are there depends on version and controller."""
    if file.exists():
        file.write_text(value)


async def _empty(folder: Path) -> None:
    """Kill what is in a group, and remove it. The kernel removes a killed process a moment later."""
    for wait in (0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5):
        await asyncio.sleep(wait)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            _kill_all(folder)
    raise RuntimeError(f"{folder} has processes that cannot be killed")


def _kill_all(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)
