"""Commands of `agentrl` that the viewer leaves to processes of their own: they import the user's code, or torch."""

import os
import subprocess
import sys

from agentrl.schemas.installation import PACKAGE_ROOT


def command_of(*arguments: str, patience: float) -> "subprocess.CompletedProcess[str]":
    """Run a command of `agentrl` in a process of its own, with this code."""
    return subprocess.run(
        [sys.executable, "-m", "agentrl.flows.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=patience,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": _with_this_code()},
    )


def begun(*arguments: str, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    """Begin a command of `agentrl` in a process of its own, with this code, and with ``environment`` beside the
    variables of this process; the caller waits for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl.flows.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {}), "PYTHONPATH": _with_this_code()},
    )


def _with_this_code() -> str:
    there = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.pathsep.join([str(PACKAGE_ROOT), *there])
