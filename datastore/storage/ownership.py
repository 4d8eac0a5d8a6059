"""Which process works on an unfinished file or folder, and whether it still lives.

Each process takes a random name and holds a file lock under it for as long as it lives; the system drops the lock when
the process dies, however it dies. Temporary files and half-built folders carry their owner's name, so every process can
tell whether they will still be finished. Process numbers would not do: they are used again, and are not unique among
containers that share a store.
"""

import errno
import fcntl
import itertools
import os
import re
import threading
import uuid
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from agentrl.datastore.errors import StoreError

_MARK = re.compile(r"(?:^|[.-])([0-9a-f]{12})_\d+(?:\.|$)")
_WITHOUT = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_guard = threading.Lock()
_mine: dict[tuple[int, Path], tuple[str, int]] = {}
_numbers = itertools.count()


class Owner(Enum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def mark(working: Path) -> str:
    """A new name for something unfinished of this process, ``<owner>_<number>``.

    ``working`` is the place's working folder; the owner's lock lies in ``owners/`` there.
    """
    return f"{me(working)}_{next(_numbers)}"


def me(working: Path) -> str:
    """This process's name among the owners of a working folder."""
    with _guard:
        key = (os.getpid(), working)
        while key not in _mine or not os.fstat(_mine[key][1]).st_nlink:  # new, or the whole store was removed
            name = uuid.uuid4().hex[:12]
            path = _lock(working, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            if _try(handle, working):
                _mine[key] = (name, handle)
            else:  # another process tests it right now
                os.close(handle)
        return _mine[key][0]


def owner_in(name: str) -> str | None:
    """The owner that a file's or folder's name carries, or None."""
    match = _MARK.search(name)
    return match[1] if match else None


def state(working: Path, owner: str) -> Owner:
    """Whether an owner lives. UNKNOWN: it never worked on this machine, or died and was forgotten."""
    try:
        handle = os.open(_lock(working, owner), os.O_RDWR)
    except OSError:
        return Owner.UNKNOWN
    try:
        return Owner.DEAD if _try(handle, working) else Owner.ALIVE
    finally:
        os.close(handle)


def dead(working: Path) -> set[str]:
    """Owners that worked on this machine and are dead, and not forgotten."""
    names = [path.stem for path in (working / "owners").glob("*.lock")]
    return {name for name in names if state(working, name) is Owner.DEAD}


def forget(working: Path, owners: Iterable[str]) -> None:
    """Remove the locks of owners that died; nothing may be left that names them."""
    for name in owners:
        _lock(working, name).unlink(missing_ok=True)


def _lock(working: Path, name: str) -> Path:
    return working / "owners" / f"{name}.lock"


def _try(handle: int, working: Path) -> bool:
    """Raises StoreError if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT:
            raise
        raise StoreError(
            f"the file system of {working} has no locks ({error.strerror}), by which a store knows whether a process "
            "that writes into it lives; mount it with locks (flock on Lustre, local_lock=flock on NFS if one machine "
            "writes), or put the store on another one or in a bucket"
        ) from error
    return True
