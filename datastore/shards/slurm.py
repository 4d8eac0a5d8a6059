"""Shards as arrays of Slurm jobs."""

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from agentrl.datastore.shards.shard import ShardError
from agentrl.schemas.installation import PACKAGE_ROOT

MOST = 1000
"""Jobs of an array, if Slurm allows so many."""
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
ENDED |= {"REVOKED", "TIMEOUT"}
"""States of jobs that neither wait nor run."""
PASSING = {"None", "Priority", "Resources", "JobArrayTaskLimit", "BeginTime", "Cleaning", "Prolog"}
"""Why jobs wait that start by themselves when others end."""
AWAY = re.compile(r"unable to contact|timed out|zero bytes|standby|temporarily un|connection refused", re.IGNORECASE)
"""What commands say if the controller does not answer now."""
OWN = ("SLURM_CONF", "SLURM_CLUSTERS")
_THREADS = "".join(
    f"export {name}=${{{name}:-${{SLURM_CPUS_PER_TASK:-1}}}}\n" for name in ("OMP_NUM_THREADS", "POLARS_MAX_THREADS")
)

_SAYS_HOW = 'code=$?\n[ $code = 0 ] || echo "the process exited with code $code" >&2\nexit $code\n'
"""Slurm calls the end of a script by a signal a failed launch, and has no word on it in the log."""


class SlurmJobs:
    """``workers``: how many jobs of an array run at once; ``options``: more of ``sbatch``, such as a partition. Raises
    ShardError if Slurm does not answer."""

    def __init__(self, workers: int | None, memory_gib: float | None = None, options: Sequence[str] = ()) -> None:
        self._workers = workers
        self._options = [*options, *([f"--mem={int(memory_gib * 1024)}M"] if memory_gib else [])]
        settings = dict(re.findall(r"^(\w+) *= (.*)$", _asked(["scontrol", "show", "config"]), re.MULTILINE))
        self.most = min(MOST, int(settings.get("MaxArraySize", MOST)))
        if not self.most:
            raise ShardError("this Slurm allows no arrays of jobs (its MaxArraySize is 0); choose another engine")
        if memory_gib and "MEMORY" not in settings.get("SelectTypeParameters", "").upper():
            warnings.warn(
                "this Slurm does not reserve memory (its SelectTypeParameters is "
                f"{settings.get('SelectTypeParameters')}), so memory_gib: {memory_gib:g} only rules out smaller nodes",
                stacklevel=2,
            )
        self.notice = ""
        self._jobs: dict[int, str] = {}
        """Number of a shard -> its job, ``<array>_<index>``."""
        self._unsent: list[tuple[list[str], Sequence[int]]] = []
        """Commands that the controller did not answer, and the shards of their arrays."""
        self._folder: Path | None = None

    def submit(self, folder: Path, numbers: Sequence[int]) -> None:
        if self._folder is None:
            self._folder = folder
            for killed in folder.parent.glob("jobs-*"):  # of a run that could not cancel its jobs
                if killed != folder:
                    _cancel(killed)
        logs = folder / "logs"
        logs.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "agentrl.datastore.shards.worker", "folder", str(folder)]
        script = logs / f"{numbers[0]}.sh"
        script.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(PACKAGE_ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}\n{_THREADS}"
            f'{shlex.join(command)} "$(({numbers[0]} + SLURM_ARRAY_TASK_ID))"\n{_SAYS_HOW}'
        )
        at_once = f"%{self._workers}" if self._workers else ""
        array = ["--array", f"0-{len(numbers) - 1}{at_once}", "--output", str(logs / "%A_%a.log")]
        named = ["--job-name", _name(folder)]
        self._unsent.append((["sbatch", "--parsable", *array, *named, *self._options, str(script)], numbers))
        self._send()

    def _send(self) -> bool:
        """Whether all is submitted."""
        while self._unsent:
            command, numbers = self._unsent[0]
            answer = self._now(command)
            if answer is None:
                return False
            job = answer.partition(";")[0].strip()
            self._jobs |= {number: f"{job}_{index}" for index, number in enumerate(numbers)}
            del self._unsent[0]
        return True

    def _now(self, command: list[str]) -> str | None:
        """What a command prints; None if the controller does not answer, which the notice then says."""
        try:
            return _asked(command)
        except _AwayError as error:
            self.notice = f"{error}; it is asked again"
            return None

    def gone(self) -> dict[int, str]:
        self.notice = ""
        if not self._send() or not self._jobs or self._folder is None:
            return {}
        what = ["--states=all", "--array", f"--name={_name(self._folder)}", f"--user={os.getuid()}"]
        answer = self._now(["squeue", "--noheader", *what, "--format=%i|%T|%r"])
        if answer is None:
            return {}
        listed = {job: (state, reason) for job, state, reason in (line.split("|", 2) for line in answer.splitlines())}
        states = {job: listed.get(job, ("not there any more", "None")) for job in self._jobs.values()}
        self.notice = _notice(states)
        lost = {job for job, (state, _) in states.items() if state in ENDED or job not in listed}
        return {number: self._last_words(job, *states[job]) for number, job in self._jobs.items() if job in lost}

    def _last_words(self, job: str, state: str, reason: str) -> str:
        assert self._folder is not None
        log = self._folder / "logs" / f"{job}.log"
        text = log.read_text(errors="replace").strip() if log.exists() else ""
        why = "" if reason == "None" else f" ({reason})"
        return f"{job} is {state}{why}: {text.splitlines()[-1][:200] if text else 'it left no output'}"

    def cancel(self, numbers: Collection[int]) -> None:
        if jobs := [self._jobs.pop(number) for number in numbers if number in self._jobs]:
            _ended(["scancel", "--quiet", *jobs])

    def forget(self, number: int) -> None:
        self._jobs.pop(number, None)

    def close(self) -> None:
        if self._folder is not None:
            _cancel(self._folder)


class _AwayError(ShardError):
    """Slurm's controller does not answer now."""


def _name(folder: Path) -> str:
    """Of all jobs of a folder, by which they are found also if their numbers are not known."""
    return f"agentrl-{folder.name}"


def _cancel(folder: Path) -> None:
    _ended(["scancel", "--quiet", f"--user={os.getuid()}", f"--name={_name(folder)}"])


def _ended(command: list[str]) -> None:
    """Run ``scancel``. Jobs that it did not end are warned of, by the command that does."""
    try:
        _asked(command)
    except ShardError as error:
        warnings.warn(f"jobs may go on: {error}; cancel them by `{shlex.join(command)[:300]}`", stacklevel=2)


def _notice(states: dict[str, tuple[str, str]]) -> str:
    """Why jobs do not start that wait for no others."""
    waiting = {job: why for job, (state, why) in states.items() if state == "PENDING" and why not in PASSING}
    if not waiting:
        return ""
    reason, number = Counter(waiting.values()).most_common(1)[0]
    first = next(job for job, why in waiting.items() if why == reason)
    return f"Slurm does not start {number} of {len(states)} jobs: {reason} (see `scontrol show job {first}`)"


def _asked(command: list[str]) -> str:
    """What a command of Slurm prints. Raises ShardError with what it says if it fails."""
    # variables of the allocation that this process may run in, and of the user's squeue, are for other jobs
    foreign = ("SLURM_", "SQUEUE_", "SCANCEL_")
    env = {name: value for name, value in os.environ.items() if name in OWN or not name.startswith(foreign)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)
    except FileNotFoundError:
        reason = f"{command[0]} is not on this machine; engine slurm runs where jobs can be submitted"
        raise ShardError(reason) from None
    except subprocess.TimeoutExpired:
        raise _AwayError(f"{command[0]} said nothing for 60 s") from None
    if done.returncode:
        lines = [line.removeprefix(f"{command[0]}: error: ").strip() for line in done.stderr.splitlines()]
        reason = "; ".join(filter(None, lines))[:300]
        if AWAY.search(reason):
            raise _AwayError(f"Slurm's controller does not answer {command[0]}: {reason}")
        remedy = "; change memory_gib, gpus or options of execution.engine" if command[0] == "sbatch" else ""
        raise ShardError(f"{command[0]} failed: {reason}{remedy}")
    return done.stdout
