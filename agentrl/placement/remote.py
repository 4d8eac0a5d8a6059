"""Runs a command on the other end of a connection: ``python -m agentrl.placement.remote COMMAND...``

The first line of its standard input is a JSON object: ``changes`` of the environment, null for a variable that is
removed, and names of variables that are ``expected`` here, of which it says those that are not. The changes come so
because everybody on a machine can read the arguments of its processes, and secrets are among them. It prints the
address that the command is given in place of ``{host}:{port}``, and then what the command prints. If its standard
input ends, the connection is gone, and the command is ended with all of its group.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

from agentrl.placement.addresses import own_address
from agentrl.placement.base import STOP_S, changed, filled
from agentrl.placement.local import KeptPort

AT, LOST = "AGENTRL_AT ", "AGENTRL_LOST "
"""How lines begin that the other end understands."""


def _end(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _first_line() -> bytes:
    """Of the standard input, without a byte of what follows."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def main(command: list[str]) -> int:
    """The exit code of the command."""
    line = _first_line()
    if not line.endswith(b"\n"):
        print(f"the connection to {socket.gethostname()} ended before its environment came", flush=True)
        return 1
    about = json.loads(line)
    environment = changed(os.environ, about["changes"])
    if lost := [name for name in about["expected"] if name not in environment]:
        remedy = "set them in execution.env, or leave out an option such as --export=NONE"
        print(f"{LOST}brought no {', '.join(lost)} to {socket.gethostname()}: {remedy}", flush=True)
    try:
        host = own_address(environment)
    except LookupError as error:
        print(error.args[0], flush=True)
        return 1
    port = KeptPort()
    print(f"{AT}{host}:{port.number}", flush=True)
    given = filled(command, host, port.number)
    child = subprocess.Popen(given, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)

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
    sys.exit(main(sys.argv[1:]))
