"""The child of :mod:`agentrl.rewards.mathematics`: compares answers until its parent is gone."""

import contextlib
import logging
import pickle
import resource
import sys
from multiprocessing.connection import Connection

MEMORY = 2 * 1024**3


def serve(connection: Connection) -> None:
    from math_verify import parse, verify

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    connection.send_bytes(b"ready")
    while True:
        answer, truth = pickle.loads(connection.recv_bytes())
        # The parent keeps the time.
        gold = parse(_marked(truth), parsing_timeout=None) or parse(truth, parsing_timeout=None)
        parsed = parse(answer, parsing_timeout=None)
        verdict: bool | str = verify(gold, parsed, timeout_seconds=None) if gold else f"{truth!r} is no mathematics"
        connection.send_bytes(pickle.dumps(verdict))


def _marked(truth: str) -> str:
    """A ground truth in signs of mathematics, so that all of it is read."""
    return truth if "$" in truth or "\\boxed" in truth else f"${truth}$"


if __name__ == "__main__":
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(Connection(int(sys.argv[1])))
