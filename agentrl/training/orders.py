"""Orders from one process to the ranks of a job, as files: each order has a number, and all ranks carry it out.

The ranks look into the folder by themselves, so none of them waits in a collective operation, which has a limit of
time, while rollouts are made. If the process that gives orders is gone, its lock is, and the ranks end.
"""

import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.01
ALIVE_S = 2.0
END = "end"


class Orders:
    """The side that gives orders, in a new folder inside ``parent``, which all ranks read. What an earlier one left
    there is removed. ``alive`` is called while an answer is waited for, and raises if the ranks have ended."""

    def __init__(self, parent: Path, alive: Callable[[], None]) -> None:
        shutil.rmtree(parent, ignore_errors=True)
        self.folder, self.alive = parent / uuid.uuid4().hex[:8], alive
        self.folder.mkdir(parents=True)
        self.given = 0
        self._lock = (self.folder / "lock").open("w")
        fcntl.lockf(self._lock, fcntl.LOCK_EX)

    def give(self, do: str, **about: Any) -> dict[str, Any]:
        """The answer to an order. Raises whatever ``alive`` does."""
        number, self.given = self.given, self.given + 1
        _write(self.folder / f"{number:06d}.order", {"do": do, **about})
        answer = self.folder / f"{number:06d}.answer"
        while not answer.exists():
            self.alive()
            time.sleep(POLL_S)
        reply: dict[str, Any] = json.loads(answer.read_text())
        for old in self.folder.glob(f"{number:06d}.*"):
            old.unlink()
        return reply

    def file(self, suffix: str) -> Path:
        """A file that goes with the next order, and is removed with it."""
        return self.folder / f"{self.given:06d}.{suffix}"

    def close(self) -> None:
        """Tell the ranks to end."""
        _write(self.folder / f"{self.given:06d}.order", {"do": END})
        self._lock.close()


def arriving(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Orders as they come, each with the file that its answer goes into. Ends if there is nobody left to give more."""
    number, looked = 0, time.monotonic()
    while True:
        path = folder / f"{number:06d}.order"
        if path.exists():
            order = json.loads(path.read_text())
            if order["do"] == END:
                return
            yield path.with_suffix(".answer"), order
            number += 1
        elif time.monotonic() - looked > ALIVE_S:
            looked = time.monotonic()
            if _is_alone(folder / "lock"):
                return
        else:
            time.sleep(POLL_S)


def answer(path: Path, about: dict[str, Any]) -> None:
    """Answer an order, as one of the ranks."""
    _write(path, about)


def _write(path: Path, about: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(about))
    os.replace(partial, path)


def _is_alone(lock: Path) -> bool:
    """Whether nobody holds a lock any more."""
    try:
        with lock.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
