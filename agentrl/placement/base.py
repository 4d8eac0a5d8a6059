"""Starting the processes of a stage, training ranks and servers: on this machine, over ssh, or through Ray.

The command is the same in each case, and so is what tells that it works: what it prints goes into a file that the stage
reads.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentrl.schemas.secret_names import names_a_secret

STOP_S = 10.0
"""Seconds between asking a process to end and killing it."""

PASSED = ("NCCL_", "GLOO_", "HF_", "UCX_", "FI_")
"""How the names of variables begin that processes on other machines have from the stage's: how they find each other,
and where models are kept."""


class LaunchError(RuntimeError):
    """A process could not be started."""


class Process(Protocol):
    """A process that a launcher started, with all that it starts itself."""

    address: str
    """``host:port``, as others reach it: no name. The port is kept free for the process from before its start."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        ...

    def stop(self) -> None:
        """End it and what it started: asked first, killed after :data:`STOP_S`. Nothing happens if it has ended."""
        ...


class Launcher(Protocol):
    """Starts processes on ``nodes`` machines, each with ``gpus`` GPUs; 0 if the machines have none."""

    nodes: int

    @property
    def gpus(self) -> int: ...

    def start(
        self,
        role: str,
        command: Sequence[str],
        *,
        log: Path,
        gpus: int = 0,
        env: Mapping[str, str | None] | None = None,
        node: int | None = None,
    ) -> Process:
        """Start a command. ``role`` is what messages call it, ``log`` is appended to. ``{host}`` and ``{port}`` in the
        command stand for its own address. ``env`` changes that machine's environment; None removes a variable. ``gpus``
        devices are taken from those that are left, and shown to it alone. ``node`` None takes the machine with the
        fewest processes that has them.

        Raises LaunchError if it cannot be started, or if so many devices are not left.
        """
        ...

    def close(self) -> None:
        """End what was started, and give back what was reserved."""
        ...


def filled(command: Sequence[str], host: str, port: int) -> list[str]:
    """The command with its own address."""
    return [part.replace("{host}", host).replace("{port}", str(port)) for part in command]


def changed(environment: Mapping[str, str], env: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with changes; None removes a variable."""
    return {name: value for name, value in {**environment, **env}.items() if value is not None}


def passed(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables of this process that its processes on other machines get, besides ``execution.env``: those of
    :data:`PASSED`, and those that are named like a secret."""
    return {name: value for name, value in environment.items() if name.startswith(PASSED) or names_a_secret([name])}
