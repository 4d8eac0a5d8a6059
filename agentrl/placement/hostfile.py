"""Processes on machines that a hostfile lists, over ssh.

Every machine has this checkout and the same Python at the same path, and reads the store. ``~/.ssh/config`` says how to
reach a machine; no password can be asked for.
"""

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from agentrl.placement.base import STOP_S, LaunchError, python_path
from agentrl.placement.devices import Devices, shown
from agentrl.placement.remote import AT
from agentrl.placement.shared import pause_s

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")


class Machine(NamedTuple):
    name: str
    slots: int
    """How many GPUs it has; 0 for a machine without any."""


def read_hosts(path: Path, nodes: int | None = None, gpus: int = 0) -> list[Machine]:
    """The machines of a hostfile, one ``name slots=N`` a line; ``#`` begins a comment. ``nodes`` takes the first ones,
    and ``gpus`` so many of the slots of each.

    Raises LaunchError, which names a line that cannot be read, also if there are fewer machines or slots than asked
    for.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"hostfile {path} cannot be read: {error.strerror}; give one 'name slots=N' a line") from None
    hosts: list[Machine] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9][\w.@:-]*)\s+slots\s*=\s*(\d+)", text)
        if not match:
            raise LaunchError(f"hostfile {path}, line {number}: {text!r} is not 'name slots=N', as in 'gpu-1 slots=8'")
        if any(host.name == match[1] for host in hosts):
            raise LaunchError(f"hostfile {path}, line {number}: {match[1]} is named twice; add its slots up")
        hosts.append(Machine(match[1], int(match[2])))
    if len(hosts) < (nodes or 1):
        raise LaunchError(f"hostfile {path} has {len(hosts)} machines, and execution.nodes is {nodes or 1}")
    hosts = hosts[:nodes]
    if few := [host.name for host in hosts if host.slots < gpus]:
        raise LaunchError(f"hostfile {path} has fewer than execution.gpus = {gpus} slots for {', '.join(few)}")
    return [host._replace(slots=gpus or host.slots) for host in hosts]


def _script(host: str, command: Sequence[str], env: Mapping[str, str | None]) -> str:
    """What the shell of the other machine runs, in the folder of this process."""
    remote = [sys.executable, "-P", "-m", "agentrl.placement.remote", host]
    unset = [part for name, value in env.items() if value is None for part in ("-u", name)]
    values = [f"{name}={value}" for name, value in env.items() if value is not None]
    wrapped = ["env", f"PYTHONPATH={python_path()}", *remote, "env", *unset, *values, *command]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(wrapped)}"


class OverSsh:
    """A process on another machine. See :class:`agentrl.placement.base.Process`."""

    def __init__(self, host: str, script: str, log: Path, connect_s: float, on_end: Callable[[], None]) -> None:
        self._on_end = cache(on_end)  # once
        before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self._ssh = subprocess.Popen(
                [*SSH, host, script],
                stdin=subprocess.PIPE,  # its end tells the other side that this one is gone
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.address = self._wait(host, log, before, connect_s)
        except BaseException:
            self.stop()
            raise

    def _wait(self, host: str, log: Path, start: int, connect_s: float) -> str:
        """The address that the other side says."""
        began = time.monotonic()
        while True:
            over = self._ssh.poll() is not None
            printed = log.read_bytes()[start:].decode(errors="replace")
            for line in printed.splitlines(keepends=True):
                if line.startswith(AT) and line.endswith("\n"):
                    return line[len(AT) :].strip()
            waited = time.monotonic() - began
            if over or waited > connect_s:
                what = f"ended with {self._ssh.returncode}" if over else f"said nothing for {connect_s:g} s"
                raise LaunchError(f"ssh {host} {what}; try: ssh {host} true; it printed: {printed.strip()[-500:]}")
            time.sleep(pause_s(waited))

    def poll(self) -> int | None:
        return self._ssh.poll()

    def stop(self) -> None:
        assert self._ssh.stdin is not None
        with contextlib.suppress(OSError):
            self._ssh.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh.wait(STOP_S + 5)  # the other side needs STOP_S for one that does not want to end
        if self._ssh.poll() is None:
            self._ssh.kill()
        self._ssh.wait()
        self._on_end()


class Hostfile:
    """See :class:`agentrl.placement.base.Launcher`. ``env`` is set for everything that it starts."""

    def __init__(self, hosts: Sequence[Machine], env: Mapping[str, str], connect_s: float) -> None:
        self.hosts, self.nodes, self._env = list(hosts), len(hosts), dict(env)
        self.gpus = min(host.slots for host in hosts)
        self._connect_s = connect_s
        self._devices = Devices([[str(number) for number in range(host.slots)] for host in hosts])
        self._started: list[OverSsh] = []

    def start(
        self,
        role: str,
        command: Sequence[str],
        *,
        log: Path,
        gpus: int = 0,
        env: Mapping[str, str | None] | None = None,
        node: int | None = None,
    ) -> OverSsh:
        index, taken = self._devices.take(role, gpus, node)
        host = self.hosts[index].name
        script = _script(host.rpartition("@")[2], command, {**self._env, **(env or {}), **shown(taken)})
        try:
            process = OverSsh(host, script, log, self._connect_s, lambda: self._devices.give_back(index, taken))
        except LaunchError as error:
            raise LaunchError(f"the {role} cannot be started: {error}") from None
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.stop()
        self._started.clear()
