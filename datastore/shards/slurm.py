"""Shards as arrays of Slurm jobs. What is to be done, and how it ended, are files of a folder that all nodes see."""

import pickle
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from agentrl.datastore.shards.shard import Ending, Shard, ShardError, packed
from agentrl.datastore.shards.worker import installed
from agentrl.schemas.installation import PACKAGE_ROOT

LOOK_S = 5.0
"""Seconds between two looks at which jobs Slurm still has."""
GONE = 2
"""Looks in a row at which Slurm has no job of a shard that did not end, until it counts as lost."""


class Slurm:
    """``workers``: how many jobs of an array run at once; ``options``: more of ``sbatch``, such as a partition."""

    def __init__(
        self, folder: Path, workers: int | None, memory_gib: float | None = None, options: Sequence[str] = ()
    ) -> None:
        self._folder = folder / f"slurm-{uuid.uuid4().hex[:12]}"
        self._folder.mkdir(parents=True)
        self._workers = workers
        self._options = [*options, *([f"--mem={int(memory_gib * 1024)}M"] if memory_gib else [])]
        self._jobs: dict[int, str] = {}
        """Number of a shard -> its job, ``<array>_<index>``."""
        self._missed: dict[int, int] = {}
        self._next, self._looked = 0, 0.0

    @property
    def room(self) -> int:
        return 1000 - len(self._jobs)  # of an array, by Slurm's default

    def start(self, shards: Sequence[Shard]) -> list[int]:
        if not shards:
            return []
        numbers = list(range(self._next, self._next + len(shards)))
        self._next += len(shards)
        for number, shard in zip(numbers, shards, strict=True):
            (self._folder / f"{number}.shard").write_bytes(pickle.dumps((packed(shard), installed())))
        at_once = f"%{self._workers}" if self._workers else ""
        command = [sys.executable, "-P", "-m", "agentrl.datastore.shards.worker", "folder", str(self._folder)]
        script = self._folder / f"{numbers[0]}.sh"
        script.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
            f'exec {shlex.join(command)} "$(({numbers[0]} + SLURM_ARRAY_TASK_ID))"\n'
        )
        array = ["--array", f"0-{len(shards) - 1}{at_once}", "--output", str(self._folder / "%A_%a.log")]
        job = _slurm(["sbatch", "--parsable", *array, *self._options, str(script)]).partition(";")[0].strip()
        self._jobs |= {number: f"{job}_{index}" for index, number in enumerate(numbers)}
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
            del self._jobs[number]
            self._missed.pop(number, None)
        return outcomes

    def _outcomes(self) -> list[tuple[int, Ending]]:
        there = [(number, self._folder / f"{number}.outcome") for number in self._jobs]
        return [(number, pickle.loads(path.read_bytes())) for number, path in there if path.exists()]

    def _lost(self) -> list[tuple[int, Ending]]:
        arrays = ",".join({job.partition("_")[0] for job in self._jobs.values()})
        if not arrays:
            return []
        listed = set(_slurm(["squeue", "--noheader", "--array", "--format", "%i", "--jobs", arrays], "").split())
        outcomes = []
        for number, job in self._jobs.items():
            self._missed[number] = 0 if job in listed else self._missed.get(number, 0) + 1
            if self._missed[number] >= GONE:
                log = self._folder / f"{job}.log"
                text = log.read_text(errors="replace").strip() if log.exists() else ""
                last = text.splitlines()[-1][:200] if text else "it left no output"
                outcomes.append((number, Ending(f"job {job}", f"the job is gone: {last}", died=True)))
        return outcomes

    def stop(self, number: int) -> None:
        if number in self._jobs:
            _slurm(["scancel", self._jobs.pop(number)], "")

    def close(self) -> None:
        for array in {job.partition("_")[0] for job in self._jobs.values()}:
            _slurm(["scancel", array], "")
        self._jobs = {}


def _slurm(command: list[str], otherwise: str | None = None) -> str:
    """What a command of Slurm prints. If it fails it is ``otherwise``; raises ShardError if that is None."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        reason = f"{command[0]} is not on this machine; engine slurm runs where jobs can be submitted"
        raise ShardError(reason) from None
    if done.returncode and otherwise is None:
        raise ShardError(f"{command[0]} failed: {' '.join(done.stderr.split())[:300]}")
    return done.stdout if not done.returncode else otherwise or ""
