"""Locks that killed builds of DeepSpeed's operators leave behind. PyTorch builds each operator in a folder of its own,
and waits without end while that folder holds a file ``lock``."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

OLD_SECONDS = 600
"""No build of one operator takes longer."""


def clear_stale_locks(shared: bool = False, root: Path | None = None) -> list[str]:
    """Remove the locks of builds that have ended, and return what was done about each lock, as sentences.

    A build keeps its lock open. A lock that no process of this machine has open is stale; if other machines build in
    the same folders (``shared``), only if it is older than :data:`OLD_SECONDS`. ``root`` is where PyTorch builds
    extensions, unless it is given.
    """
    notes = []
    for lock in _locks(root or _root()):
        if _is_open(lock):
            continue
        try:
            age = time.time() - lock.stat().st_mtime
            if shared and age < OLD_SECONDS:
                notes.append(
                    f"{lock} is {age:.0f} s old, and no process of this machine has it open: if no other machine "
                    "builds there, remove it, or DeepSpeed waits for it without end"
                )
                continue
            lock.unlink()
        except FileNotFoundError:  # its build ended meanwhile
            continue
        notes.append(
            f"removed {lock}, {age:.0f} s old: the build that made it was killed, and DeepSpeed would wait for it"
        )
    return notes


def _root() -> Path:
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def _locks(root: Path) -> Iterator[Path]:
    """``<root>/<operator>/lock``, or with the default root ``<root>/<python and device>/<operator>/lock``."""
    yield from sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])


def _is_open(path: Path) -> bool:
    """Whether a process of this machine, of those that may be looked at, has a file open."""
    import psutil

    name = str(path.resolve())
    for process in psutil.process_iter():
        try:
            if any(file.path == name for file in process.open_files()):
                return True
        except psutil.Error:  # it ended, or belongs to another user
            continue
    return False
