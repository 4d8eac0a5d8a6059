"""Shards as arrays of Slurm jobs."""

import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from agentrl.datastore.shards.shard import ShardError
from agentrl.schemas.installation import PACKAGE_ROOT


class SlurmJobs:
    """``workers``: how many jobs of an array run at once; ``options``: more of ``sbatch``, such as a partition."""

    notice = ""

    def __init__(self, workers: int | None, memory_gib: float | None = None, options: Sequence[str] = ()) -> None:
        self._workers = workers
        self._options = [*options, *([f"--mem={int(memory_gib * 1024)}M"] if memory_gib else [])]
        self._jobs: dict[int, str] = {}
        """Number of a shard -> its job, ``<array>_<index>``."""
        self._logs = Path()

    def submit(self, folder: Path, numbers: Sequence[int]) -> None:
        at_once = f"%{self._workers}" if self._workers else ""
        command = [sys.executable, "-P", "-m", "agentrl.datastore.shards.worker", "folder", str(folder)]
        self._logs = folder / "logs"
        self._logs.mkdir(exist_ok=True)
        script = self._logs / f"{numbers[0]}.sh"
        script.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}\n"
            f'exec {shlex.join(command)} "$(({numbers[0]} + SLURM_ARRAY_TASK_ID))"\n'
        )
        array = ["--array", f"0-{len(numbers) - 1}{at_once}", "--output", str(self._logs / "%A_%a.log")]
        job = _slurm(["sbatch", "--parsable", *array, *self._options, str(script)]).partition(";")[0].strip()
        self._jobs |= {number: f"{job}_{index}" for index, number in enumerate(numbers)}

    def gone(self) -> dict[int, str]:
        if not self._jobs:
            return {}
        arrays = ",".join({job.partition("_")[0] for job in self._jobs.values()})
        listed = set(_slurm(["squeue", "--noheader", "--array", "--format", "%i", "--jobs", arrays], "").split())
        return {number: self._last_words(job) for number, job in self._jobs.items() if job not in listed}

    def _last_words(self, job: str) -> str:
        log = self._logs / f"{job}.log"
        text = log.read_text(errors="replace").strip() if log.exists() else ""
        return f"{job}: {text.splitlines()[-1][:200] if text else 'it left no output'}"

    def cancel(self, numbers: Collection[int]) -> None:
        if jobs := [self._jobs.pop(number) for number in numbers if number in self._jobs]:
            _slurm(["scancel", *jobs], "")

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    def close(self) -> None:
        pass


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
