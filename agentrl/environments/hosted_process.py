"""The child of :class:`agentrl.environments.hosts.Processes`: holds an object and calls its methods, until its parent
is gone."""

import contextlib
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from agentrl.schemas.installation import leave_checkout
from agentrl.schemas.trajectory import InfrastructureError


def serve(connection: Connection) -> None:
    held: Any = None
    while True:
        what, *rest = pickle.loads(connection.recv_bytes())
        try:
            value: Any = None
            if what == "start":
                held = rest[0]()
            elif what == "call":
                value = getattr(held, rest[0])(*rest[1])
            else:
                held.close()
                held = None
            reply = pickle.dumps(("value", value))
        except BaseException as error:  # whatever a user's code raises
            summary = f"{type(error).__name__}: {error}"[:500]
            reply = pickle.dumps(("raised", (summary, traceback.format_exc(), isinstance(error, InfrastructureError))))
        connection.send_bytes(reply)


if __name__ == "__main__":
    leave_checkout()
    with contextlib.suppress(EOFError, BrokenPipeError):
        serve(Connection(int(sys.argv[1])))
