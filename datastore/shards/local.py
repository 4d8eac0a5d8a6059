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

from agentrl.datastore.shards.shard import Ending, Shard, packed
from agentrl.datastore.shards.worker import installed
from agentrl.schemas.installation import python_path


@dataclass
class _Worker:
    popen: subprocess.Popen[bytes]
    to: Connection
    back: Connection
    number: int | None = None
    """Of the shard that it works on."""

    @classmethod
    def start(cls) -> "_Worker":
        (theirs, to), (back, answers) = os.pipe(), os.pipe()
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentrl.datastore.shards.worker", str(theirs), str(answers)],
            pass_fds=(theirs, answers),
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", **os.environ, "PYTHONPATH": python_path()},
        )
        os.close(theirs)
        os.close(answers)
        return cls(popen, Connection(to, readable=False), Connection(back, writable=False))

    @property
    def name(self) -> str:
        return f"{platform.node()}, process {self.popen.pid}"

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.to.close()
        self.back.close()


class LocalProcesses:
    """As many processes as ``workers``. They start with the first shards."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
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
                process = _Worker.start()
                self._processes.append(process)
            process.number = next(self._numbers)
            numbers.append(process.number)
            with contextlib.suppress(OSError):  # it died, which ended() says
                process.to.send_bytes(pickle.dumps((shard, installed())))
        return numbers

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
