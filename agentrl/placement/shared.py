"""Files in a folder that several machines share. A file may be seen there seconds after it was written, and not in the
order of writing, so whoever names a file to another machine says its size, and that one waits until it sees as much.

No lock is used: on network file systems a lock may hold on one machine only, or not be there at all.
"""

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SHORTEST_S, LONGEST_S = 0.01, 1.0
"""Seconds between two looks at a shared folder."""

Sizes = dict[str, int]
"""Absolute path of a file -> its bytes."""


class UnseenError(RuntimeError):
    """A file that another machine wrote is not seen here."""


def pause_s(waited_s: float) -> float:
    """Seconds until the next look, after a wait of ``waited_s``: a twentieth of it, so that nobody waits much longer
    than needed, and a long wait costs the file system a look a second."""
    return min(LONGEST_S, max(SHORTEST_S, waited_s / 20))


def is_listed(path: Path) -> bool:
    """Whether its folder lists a file. NFS keeps for up to a minute that a name was not there, and asks again when a
    folder is opened."""
    try:
        return path.name in os.listdir(path.parent)
    except FileNotFoundError:
        return False


def wait_until_listed(path: Path, limit_s: float = math.inf, alive: Callable[[], object] = lambda: None) -> bool:
    """Wait until a file is listed; False if it is not within ``limit_s`` seconds. ``alive`` is called meanwhile, and
    may raise."""
    began = time.monotonic()
    while not is_listed(path):
        waited = time.monotonic() - began
        if waited > limit_s:
            return False
        alive()
        time.sleep(pause_s(waited))
    return True


def sizes_of(*paths: Path) -> Sizes:
    """The sizes of files, and of all files in folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return {str(file.absolute()): file.stat().st_size for file in files if file.is_file()}


def wait_until_seen(files: Mapping[str, int], limit_s: float, alive: Callable[[], object] = lambda: None) -> None:
    """Wait until all files are seen here in their sizes. ``alive`` is called meanwhile, and may raise.

    Raises UnseenError after ``limit_s`` seconds.
    """
    missing, began = list(files), time.monotonic()
    while missing := [path for path in missing if not _is_seen(Path(path), files[path])]:
        waited = time.monotonic() - began
        if waited > limit_s:
            raise UnseenError(
                f"{missing[0]} ({files[missing[0]]} bytes) was written by another process and is not seen here after "
                f"{limit_s:g} s; all machines of a stage must share this folder (--store, engine.folder), or set "
                "execution.limits.heartbeat_s higher"
            )
        alive()
        time.sleep(pause_s(waited))


def _is_seen(path: Path, size: int) -> bool:
    try:
        with path.open("rb") as file:  # NFS asks for the size again when a file is opened
            return os.fstat(file.fileno()).st_size == size
    except FileNotFoundError:
        is_listed(path)  # so that the next look may see it
        return False
