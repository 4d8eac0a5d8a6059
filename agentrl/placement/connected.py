"""Processes on other machines, each at the end of a connection: one of ssh, or a task of srun.

Every machine has this checkout and the same Python at the same path, and reads the store.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from agentrl.placement.base import STOP_S, LaunchError, passed
from agentrl.placement.devices import Devices, shown
from agentrl.placement.remote import AT, LOST
from agentrl.placement.shared import pause_s
from agentrl.schemas.installation import python_path

FOUND = ("LD_LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE")
"""Variables by which programs find their libraries, which a `module load` or an activated environment sets."""


class Machine(NamedTuple):
    name: str
    slots: int
    """How many GPUs it has; 0 for a machine without any."""


class Way(Protocol):
    """How commands come to a machine."""

    name: str
    keeps_environment: bool
    """Whether it should bring all of this process's environment there."""

    def command(self, machine: str, script: str) -> list[str]:
        """Runs a script of the shell there, with the standard input and output of here."""
        ...


def _script(command: Sequence[str]) -> str:
    """What the shell of the other machine runs, in the folder of this process."""
    remote = [sys.executable, "-P", "-m", "agentrl.placement.remote", *command]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', f'PYTHONPATH={python_path()}', *remote])}"


class Connected:
    """A process on another machine. See :class:`agentrl.placement.base.Process`."""

    def __init__(
        self,
        way: Way,
        machine: str,
        command: Sequence[str],
        env: Mapping[str, str | None],
        log: Path,
        connect_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self._on_end = cache(on_end)  # once
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self._connection = subprocess.Popen(
                way.command(machine, _script(command)),
                stdin=subprocess.PIPE,  # its end tells the other side that this one is gone
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            expected = [name for name in FOUND if way.keeps_environment and name in os.environ]
            self._say(json.dumps({"changes": dict(env), "expected": expected}))
            self.address = self._wait(way, machine, log, before, connect_s)
        except BaseException:
            self.stop()
            raise

    def _say(self, line: str) -> None:
        assert self._connection.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: it is asked why
            self._connection.stdin.write(f"{line}\n".encode())
            self._connection.stdin.flush()

    def _wait(self, way: Way, machine: str, log: Path, start: int, connect_s: float) -> str:
        """The address that the other side says."""
        began, warned = time.monotonic(), False
        while True:
            over = self._connection.poll() is not None
            printed = log.read_bytes()[start:].decode(errors="replace")
            for line in printed.splitlines(keepends=True):
                if line.startswith(LOST) and line.endswith("\n") and not warned:
                    warned = True
                    warnings.warn(f"{way.name} {line[len(LOST) :].strip()}", stacklevel=2)
                if line.startswith(AT) and line.endswith("\n"):
                    return line[len(AT) :].strip()
            waited = time.monotonic() - began
            if over or waited > connect_s:
                what = f"ended with {self._connection.returncode}" if over else f"said nothing for {connect_s:g} s"
                test = shlex.join(way.command(machine, "true"))
                raise LaunchError(f"{way.name} {machine} {what}; try: {test}; it printed: {printed.strip()[-500:]}")
            time.sleep(pause_s(waited))

    def poll(self) -> int | None:
        return self._connection.poll()

    def stop(self) -> None:
        assert self._connection.stdin is not None
        with contextlib.suppress(OSError):
            self._connection.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._connection.wait(STOP_S + 5)  # the other side needs STOP_S for one that does not want to end
        if self._connection.poll() is None:
            self._connection.kill()
        self._connection.wait()
        self._on_end()


class Machines:
    """See :class:`agentrl.placement.base.Launcher`. ``env`` is set for everything that it starts, over what
    :func:`agentrl.placement.base.passed` takes from here. A machine that says nothing for ``connect_s`` seconds
    counts as gone."""

    def __init__(self, way: Way, machines: Sequence[Machine], env: Mapping[str, str], connect_s: float) -> None:
        self.way, self.machines, self.nodes, self._env = way, list(machines), len(machines), dict(env)
        self.gpus = min(machine.slots for machine in machines)
        self._connect_s = connect_s
        self._devices = Devices([[str(number) for number in range(machine.slots)] for machine in machines])
        self._started: list[Connected] = []

    def start(
        self,
        role: str,
        command: Sequence[str],
        *,
        log: Path,
        gpus: int = 0,
        env: Mapping[str, str | None] | None = None,
        node: int | None = None,
    ) -> Connected:
        index, taken = self._devices.take(role, gpus, node)
        name, changes = self.machines[index].name, {**passed(), **self._env, **(env or {}), **shown(taken)}
        try:
            process = Connected(
                self.way, name, command, changes, log, self._connect_s, lambda: self._devices.give_back(index, taken)
            )
        except LaunchError as error:
            raise LaunchError(f"the {role} cannot be started: {error}") from None
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.stop()
        self._started.clear()
