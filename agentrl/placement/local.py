"""Processes on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

from agentrl.placement.base import STOP_S, changed, filled
from agentrl.placement.devices import Devices, shown, visible
from agentrl.placement.watch import Watch


class KeptPort:
    """A port of this machine that is kept for one process until it ends, so that no other process and no connection
    gets it while that one loads. It may bind the port because both set SO_REUSEADDR, as servers do."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()


class Child:
    """A process of this machine, in a group of its own, which ends with this process, also if that is killed. See
    :class:`agentrl.placement.base.Process`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        address: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._on_end = cache(on_end)  # once
        # A process group, so that Ctrl-C does not reach it; no session. Linux shares its cores between sessions
        # ("autogroup"), and one that computes all the time can keep a thread of this process waiting for seconds.
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                process_group=0,
            )
        self._watch = Watch(-self._popen.pid, log=log)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        return self._popen.poll()

    def stop(self) -> None:
        """End it and all of its group: those that it started may outlive it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._watch.close()
        self._on_end()


class Local:
    """See :class:`agentrl.placement.base.Launcher`. Its devices are those that this process may use."""

    nodes = 1

    def __init__(self) -> None:
        self._started: list[Child] = []

    @cached_property
    def _devices(self) -> Devices:
        return Devices([visible()])

    @cached_property
    def gpus(self) -> int:
        return len(self._devices.free[0])

    def start(
        self,
        role: str,
        command: Sequence[str],
        *,
        log: Path,
        gpus: int = 0,
        env: Mapping[str, str | None] | None = None,
        node: int | None = None,
    ) -> Child:
        taken: list[str] = self._devices.take(role, gpus)[1] if gpus else []
        port = KeptPort()
        environment = changed(os.environ, {**(env or {}), **shown(taken)})

        def over() -> None:
            port.close()
            if gpus:
                self._devices.give_back(0, taken)

        address = f"127.0.0.1:{port.number}"
        child = Child(filled(command, "127.0.0.1", port.number), environment, log, address, over)
        self._started.append(child)
        return child

    def close(self) -> None:
        for child in self._started:
            child.stop()
        self._started.clear()
