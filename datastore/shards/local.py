"""Shards in processes of this machine. A process that dies is replaced."""

import contextlib
import os
import pickle
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait

from agentrl.datastore.shards.shard import Ending, Shard, ShardError, packed
from agentrl.datastore.shards.worker import installed
from agentrl.schemas.installation import python_path

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass
class _Worker:
    popen: subprocess.Popen[bytes]
    to: Connection
    back: Connection
    gpus: Sequence[str] | None = None
    number: int | None = None
    """Of the shard that it works on."""

    @classmethod
    def start(cls, gpus: Sequence[str] | None) -> "_Worker":
        """``gpus`` are those that it sees; None: all that this process sees."""
        (theirs, to), (back, answers) = os.pipe(), os.pipe()
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentrl.datastore.shards.worker", str(theirs), str(answers)],
            pass_fds=(theirs, answers),
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", **os.environ, "PYTHONPATH": python_path()}
            | ({} if gpus is None else {VISIBLE: ",".join(gpus)}),
        )
        os.close(theirs)
        os.close(answers)
        return cls(popen, Connection(to, readable=False), Connection(back, writable=False), gpus)

    @property
    def name(self) -> str:
        return f"{platform.node()}, process {self.popen.pid}"

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.to.close()
        self.back.close()


class LocalProcesses:
    """As many processes as ``workers``. They start with the first shards. Each has so many ``gpus`` of its own, of
    those that ``CUDA_VISIBLE_DEVICES`` names; None: all see the same. Raises ShardError if it names too few."""

    def __init__(self, workers: int, gpus: int | None = None) -> None:
        self._workers, self._each = workers, gpus
        self._gpus = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
        if gpus and len(self._gpus) < workers * gpus:
            raise ShardError(
                f"{workers} processes with {gpus} GPUs each need {workers * gpus}, and {VISIBLE} names "
                f"{len(self._gpus)}; set execution.gpus of the stage, or {VISIBLE} of a command, or fewer workers"
            )
        self._processes: list[_Worker] = []
        self._numbers = count()

    @property
    def room(self) -> int:
        return self._workers - sum(process.number is not None for process in self._processes)

    @property
    def working(self) -> dict[int, str]:
        workers = ((process.number, process.name) for process in self._processes)
        return {number: name for number, name in workers if number is not None}

    notice = ""

    @property
    def pids(self) -> list[int]:
        return [process.popen.pid for process in self._processes]

    def start(self, shards: Sequence[Shard]) -> list[int]:
        numbers = []
        for shard in map(packed, shards):
            process = next((idle for idle in self._processes if idle.number is None), None)
            if process is None:
                process = _Worker.start(self._free())
                self._processes.append(process)
            process.number = next(self._numbers)
            numbers.append(process.number)
            with contextlib.suppress(OSError):  # it died, which ended() says
                process.to.send_bytes(pickle.dumps((shard, installed())))
        return numbers

    def _free(self) -> list[str] | None:
        """GPUs for one more process."""
        if not self._each:
            return None
        taken = {name for process in self._processes for name in process.gpus or ()}
        return [name for name in self._gpus if name not in taken][: self._each]

    def ended(self, timeout_s: float) -> list[tuple[int, Ending]]:
        outcomes = []
        ready = wait([process.back for process in self._processes], timeout_s)
        for process in [process for process in self._processes if process.back in ready]:
            number, process.number = process.number, None
            try:
                outcome = pickle.loads(process.back.recv_bytes())
            except (EOFError, OSError):
                outcome = self._died(process)
            if number is not None:
                outcomes.append((number, outcome))
        return outcomes

    def _died(self, process: _Worker) -> Ending:
        self._processes.remove(process)
        process.end()
        return Ending(process.name, f"it {exit_reason(process.popen.returncode)}", died=True)

    def stop(self, number: int) -> None:
        for process in [process for process in self._processes if process.number == number]:
            self._processes.remove(process)
            process.end()

    def close(self) -> None:
        for process in self._processes:
            process.end()
        self._processes = []


def exit_reason(code: int) -> str:
    """How a process ended, after "it" or "its process", by its exit code."""
    if code == -signal.SIGKILL:
        return "was killed (signal 9); often the system ran out of memory"
    if code < 0:
        return f"died of signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"
