"""Ending processes with the one that started them, however that ends."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

from agentrl.placement.base import STOP_S

WATCH = """
import contextlib, os, signal, sys, time
sys.stdin.read()  # it ends with the process that started this one
print("the process that started this one is gone: it is ended too", flush=True)
for number, wait in ((signal.SIGTERM, float(sys.argv[1])), (signal.SIGKILL, 0)):
    for one in sys.argv[2:]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(one), number)
    time.sleep(wait)
"""


class Watch:
    """A process beside this one. If this one is gone, it ends others: asked first, then killed. They are named by id,
    and whole groups by the negative id of the group.

    Linux could tell a process itself (``PR_SET_PDEATHSIG``), but a vLLM server that is just starting drops a SIGTERM,
    and one that is killed leaves the process of its model.
    """

    def __init__(self, *processes: int, log: Path | None = None) -> None:
        """``log`` is where it says so; None: where this process prints."""
        command = [sys.executable, "-I", "-S", "-c", WATCH, str(STOP_S), *map(str, processes)]
        # out of reach of Ctrl-C, and of what ends the group of this process
        with log.open("ab") if log else nullcontext() as out:
            self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, process_group=0)

    def close(self) -> None:
        """Let them be: they have ended, and their ids may be given to others."""
        self._popen.kill()
        self._popen.communicate()
