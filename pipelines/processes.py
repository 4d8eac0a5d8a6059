"""Ending a process with everything that it started, also what moved to a session of its own."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Processes below this one, nearest first. Empty where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo = [child for parent in todo for child in children.get(parent, [])]
        found += todo
    return found


def end(process: subprocess.Popen[bytes], grace_s: float = 2.0) -> None:
    """SIGTERM to a session leader's whole tree, SIGKILL to what is left after ``grace_s`` seconds."""
    tree = [process.pid, *descendants(process.pid)]
    _signal(process.pid, tree, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and (process.poll() is None or any(map(_lives, tree[1:]))):
        time.sleep(0.02)
    _signal(process.pid, [*tree, *descendants(process.pid)], signal.SIGKILL)
    process.wait()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _signal(group: int, tree: list[int], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for pid in tree:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
