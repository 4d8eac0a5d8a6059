"""Runs a command on the other end of a connection: ``python -m agentrl.placement.remote HOST COMMAND...``

It prints the address that the command is given in place of ``{host}:{port}``, and then what the command prints. If its
standard input ends, the connection is gone, and the command is ended with all of its group.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

from agentrl.placement.base import STOP_S, filled
from agentrl.placement.local import free_port

AT = "AGENTRL_AT "


def _end(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def main(host: str, command: list[str]) -> int:
    """The exit code of the command."""
    port = free_port()
    print(f"{AT}{host}:{port}", flush=True)
    child = subprocess.Popen(filled(command, host, port), stdin=subprocess.DEVNULL, start_new_session=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        print(f"the connection to the stage ended: {socket.gethostname()} ends what it started", flush=True)
        _end(child)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    _end(child)  # what it left behind
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
