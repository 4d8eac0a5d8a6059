"""What runs shards in another process: ``python -m agentrl.datastore.shards.worker``."""

import contextlib
import os
import pickle
import platform
import queue
import sys
import threading
import traceback
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import agentrl
from agentrl.datastore.shards.heard import heard
from agentrl.datastore.shards.shard import Ending, finished
from agentrl.datastore.spared import spare_pandas
from agentrl.schemas.installation import code_digest, leave_checkout

CODE = ("chat", "datastore", "engines", "environments", "models", "pipelines", "rewards", "rollouts", "schemas")
"""Packages whose code shards run."""
SHARD, BEGAN, OUTCOME = ".shard", ".began", ".outcome"
"""What files of a shard end with, in a folder that a scheduler's jobs share with the run."""


@lru_cache(maxsize=1)
def installed() -> str:
    """The version of the package, and a digest of its code that shards run."""
    return f"{agentrl.__version__} (code {code_digest(*CODE)})"


def me() -> str:
    return f"{platform.node()}, process {os.getpid()}"


def tried(shard: bytes, driver: str) -> Ending:
    """Run a pickled shard. ``driver``: what :func:`installed` says where the work is divided; a worker that says
    another thing does not even unpickle it."""
    if installed() != driver:
        problem = f"it has agentrl {installed()}, and the run has {driver}; install the same on all workers"
        return Ending(me(), problem)
    warned: list[str] = []
    try:
        work = pickle.loads(shard)
        if work.function.startswith("agentrl.datastore."):  # elsewhere code of users runs, which may need pandas
            spare_pandas()
        with heard(warned, shown=False):
            work()
    except Exception as error:
        traceback.print_exc()
        return Ending(me(), _line(error), again=isinstance(error, OSError), warnings=tuple(warned))
    return Ending(me(), warnings=tuple(warned))


def _line(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; install it on all workers, or put its folder on PYTHONPATH where they start"
    if isinstance(error, LookupError) and "environment variable" in text:
        return f"{text}; set it where workers start, as before `ray start` or `prefect worker start`"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"{text}; if the file is there, this worker does not see the folder: mount it on all workers"
    if isinstance(error, OSError) and error.errno == 28:
        return f"{text}; free space on its disk"
    return text


def main() -> None:
    """Run what comes over one pipe, and answer over the other. The process ends when its driver does."""
    incoming = Connection(int(sys.argv[1]), writable=False)
    outgoing = Connection(int(sys.argv[2]), readable=False)
    given: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                given.put(incoming.recv_bytes())
        os._exit(0)  # also in the middle of a shard

    threading.Thread(target=listen, daemon=True).start()
    while True:
        shard, driver = pickle.loads(given.get())
        outgoing.send_bytes(pickle.dumps(tried(shard, driver)))


def from_folder(folder: Path, number: int) -> Ending:
    """Run the shard ``number`` of a folder that a scheduler's jobs share with the run, and write who began with it and
    how it ended."""
    shard, driver = pickle.loads((folder / f"{number}{SHARD}").read_bytes())
    with finished(folder / f"{number}{BEGAN}") as unfinished:
        unfinished.write_text(me())
    outcome = tried(shard, driver)
    with finished(folder / f"{number}{OUTCOME}") as unfinished:
        unfinished.write_bytes(pickle.dumps(outcome))
    return outcome


if __name__ == "__main__":
    leave_checkout()
    if sys.argv[1] == "folder":
        from_folder(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
