"""Starts actors in milliseconds: a process that has imported everything and forks one for each line it reads.

A line is the JSON list of an actor's arguments. What is printed: the process id of each that was started, in the order
asked. When the standard input ends, so does this process.
"""

import gc
import json
import os
import signal
import sys
import warnings


def main() -> None:
    import actors
    import deltalake  # noqa: F401
    import obstore.store  # noqa: F401
    import polars  # noqa: F401  imported, and used only after the fork: its threads would not survive it
    import pyarrow.parquet  # noqa: F401

    warnings.filterwarnings("ignore", message=".*fork.*")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin.buffer:
        arguments = json.loads(line)
        if not (child := os.fork()):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            _become(arguments)
            sys.argv = ["actors.py", *arguments]
            actors.main()
            sys.exit(0)
        print(child, flush=True)


def _become(arguments: list[str]) -> None:
    """The child's own standard streams."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(f"{arguments[0]}-{arguments[3]}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)


if __name__ == "__main__":
    main()
