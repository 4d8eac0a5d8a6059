"""Orders from one process to the ranks of a job, as files: each order has a number, and all ranks carry it out.

The ranks look into the folder by themselves, so none of them waits in a collective operation, which has a limit of
time, while rollouts are made. Each order and each answer names the files that go with it, which the other side waits
for (see :mod:`agentrl.placement.shared`). Whether anybody is left who gives orders is not asked here: the process that
forked the ranks ends them (:func:`agentrl.training.launch.fork_ranks`).
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.placement.shared import sizes_of, wait_until_listed, wait_until_seen

END = "end"
FILES = "files"


class Orders:
    """The side that gives orders, in a new folder inside ``parent``, which all ranks read. What an earlier one left
    there is removed. ``alive`` is called while an answer is waited for, and raises if the ranks have ended. Files of an
    answer must be seen within ``limit_s`` seconds of it."""

    def __init__(self, parent: Path, alive: Callable[[], None], limit_s: float) -> None:
        shutil.rmtree(parent, ignore_errors=True)
        self.folder, self.alive, self.limit_s = parent / uuid.uuid4().hex[:8], alive, limit_s
        self.folder.mkdir(parents=True)
        self.given = 0

    def give(self, do: str, files: Sequence[Path] = (), **about: Any) -> dict[str, Any]:
        """The answer to an order that goes with ``files``, when this process sees all files that it names. Raises
        whatever ``alive`` does, and UnseenError."""
        number, self.given = self.given, self.given + 1
        self._remove(number - 1)
        _write(self.folder / f"{number:06d}.order", {"do": do, **about}, files)
        path = self.folder / f"{number:06d}.answer"
        wait_until_listed(path, alive=self.alive)
        reply: dict[str, Any] = json.loads(path.read_text())
        wait_until_seen(reply.pop(FILES), self.limit_s, self.alive)
        return reply

    def file(self, name: str) -> Path:
        """A file that goes with the next order. It has the order's number, so that none is taken for it that an earlier
        order left, and is removed after the order."""
        return self.folder / f"{self.given:06d}.{name}"

    def answered(self, name: str) -> Path:
        """A file that came with the last answer. It is removed when the next order is given."""
        return self.folder / f"{self.given - 1:06d}.{name}"

    def close(self) -> None:
        """Tell the ranks to end."""
        self._remove(self.given - 1)
        _write(self.folder / f"{self.given:06d}.order", {"do": END}, ())

    def _remove(self, number: int) -> None:
        for old in self.folder.glob(f"{number:06d}.*"):
            old.unlink()


def arriving(folder: Path, limit_s: float) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Orders as they come, each with the file that its answer goes into, until one says that there are no more. The
    files that go with an order are seen here by then.

    Raises UnseenError if they are not within ``limit_s`` seconds.
    """
    for number in count():
        path = folder / f"{number:06d}.order"
        wait_until_listed(path)
        order = json.loads(path.read_text())
        if order["do"] == END:
            return
        wait_until_seen(order.pop(FILES), limit_s)
        yield path.with_suffix(".answer"), order


def answer(path: Path, about: dict[str, Any], files: Sequence[Path] = ()) -> None:
    """Answer an order, as one of the ranks, with ``files`` that go with the answer."""
    _write(path, about, files)


def _write(path: Path, about: dict[str, Any], files: Sequence[Path]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({**about, FILES: sizes_of(*files)}))
    os.replace(partial, path)
