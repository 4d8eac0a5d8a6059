"""Shards as jobs of a scheduler: Slurm, or Prefect's work pools. What is to be done, who began with it and how it
ended are files of a folder that all machines see; the scheduler only starts processes."""

import pickle
import time
import uuid
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

from agentrl.datastore.shards.shard import Ending, Shard, packed
from agentrl.datastore.shards.worker import BEGAN, OUTCOME, SHARD, installed

LOOK_S = 5.0
"""Seconds between two looks at which jobs the scheduler still has."""
GONE = 2
"""Looks in a row at which it has no job of a shard that did not end, until the shard counts as lost."""


class Jobs(Protocol):
    """A scheduler. A job is known by the number of its shard."""

    @property
    def most(self) -> int:
        """How many may be submitted while none runs; if that is more than are to run at once, it sees to that."""

    @property
    def notice(self) -> str:
        """Why jobs do not start, if it says so; else empty."""

    def submit(self, folder: Path, numbers: Sequence[int]) -> None:
        """Have a process run ``from_folder`` of the worker for each number."""

    def gone(self) -> dict[int, str]:
        """Those that neither wait nor run, and the last that is known of each, in one line."""

    def cancel(self, numbers: Collection[int]) -> None: ...

    def forget(self, number: int) -> None:
        """It ended."""

    def close(self) -> None:
        """Cancel all that are left."""


class Queued:
    """A pool of jobs. ``workers``: how many may run at once; None: as many as are submitted."""

    def __init__(self, folder: Path, jobs: Jobs, workers: int | None = None) -> None:
        self._folder = (folder / f"jobs-{uuid.uuid4().hex[:12]}").absolute()
        self._folder.mkdir(parents=True)
        self._jobs = jobs
        self._workers = workers or jobs.most
        self._running: dict[int, str] = {}
        """Number of a shard -> the worker that began with it, empty if none did."""
        self._missed: dict[int, int] = {}
        self._numbers, self._looked = count(), 0.0

    @property
    def room(self) -> int:
        """A scheduler keeps ``workers`` for those that it is given together. What comes later counts from here, such
        as shards that are made again, so that all of them keep it."""
        return max(0, self._workers - len(self._running)) if self._running else self._jobs.most

    @property
    def working(self) -> dict[int, str]:
        return {number: worker for number, worker in self._running.items() if worker}

    @property
    def notice(self) -> str:
        return self._jobs.notice

    def start(self, shards: Sequence[Shard]) -> list[int]:
        numbers = []
        for shard in shards:
            numbers.append(next(self._numbers))
            (self._folder / f"{numbers[-1]}{SHARD}").write_bytes(pickle.dumps((packed(shard), installed())))
        if numbers:
            self._jobs.submit(self._folder, numbers)
        self._running |= dict.fromkeys(numbers, "")
        return numbers

    def ended(self, timeout_s: float) -> list[tuple[int, Ending]]:
        outcomes = self._outcomes()
        if not outcomes:
            time.sleep(timeout_s)
            outcomes = self._outcomes()
        if not outcomes and time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            outcomes = self._lost()
        for number, _ in outcomes:
            del self._running[number]
            self._missed.pop(number, None)
            self._jobs.forget(number)
            for kind in (SHARD, BEGAN, OUTCOME):
                (self._folder / f"{number}{kind}").unlink(missing_ok=True)
        return outcomes

    def _outcomes(self) -> list[tuple[int, Ending]]:
        there = {path.name for path in self._folder.iterdir()}
        for number in [number for number, worker in self._running.items() if not worker]:
            if f"{number}{BEGAN}" in there:
                self._running[number] = (self._folder / f"{number}{BEGAN}").read_text()
        done = [number for number in self._running if f"{number}{OUTCOME}" in there]
        return [(number, pickle.loads((self._folder / f"{number}{OUTCOME}").read_bytes())) for number in done]

    def _lost(self) -> list[tuple[int, Ending]]:
        gone, outcomes = self._jobs.gone(), []
        for number, worker in self._running.items():
            self._missed[number] = self._missed.get(number, 0) + 1 if number in gone else 0
            if self._missed[number] >= GONE:
                problem = f"the job is gone: {gone[number]}"
                if worker:
                    outcomes.append((number, Ending(worker, problem, died=True)))
                    continue
                problem += f"; it never began: its worker must see {self._folder} and have agentrl {installed()}, and "
                problem += "what the worker printed says more"
                outcomes.append((number, Ending("a worker that is not known", problem, again=True)))
        return outcomes

    def stop(self, number: int) -> None:
        if self._running.pop(number, None) is not None:
            self._jobs.cancel([number])

    def close(self) -> None:
        self._running = {}
        self._jobs.close()
