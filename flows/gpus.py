"""GPUs of this machine, which stages ask for by ``execution.gpus`` and have for themselves while they run.

A lock for each GPU lies among the machine's temporary files, so that stages of other runs and other stores count too.
It is free as soon as its holder is gone.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from agentrl.placement.base import LaunchError
from agentrl.placement.devices import VISIBLE, visible

POLL_S = 0.3


def shortage(wanted: int, env: Mapping[str, str]) -> str | None:
    """Why a stage with these variables cannot run on this machine: it asks for more GPUs than there are. None if there
    are enough."""
    if not wanted or wanted <= (there := len(visible({**os.environ, **env}))):
        return None
    shown = env.get(VISIBLE, os.environ.get(VISIBLE))
    why = f" ({VISIBLE}={shown})" if shown is not None else ""
    return (
        f"execution.gpus is {wanted}, and this machine has {there}{why}; lower it, run the stage in a work pool "
        "(execution.pool), or start its processes on other machines (execution.launcher: ray, slurm or hostfile)"
    )


@contextmanager
def reserved(
    wanted: int, env: Mapping[str, str], stopping: threading.Event, waits: Callable[[str], None]
) -> Iterator[Mapping[str, str] | None]:
    """The variables ``env`` of a stage, with which it sees as many GPUs as are ``wanted`` and no other. Waits while
    others have them, and tells so by ``waits``, which is given an empty text when the wait is over. None if
    ``stopping`` is set meanwhile.

    Raises LaunchError if there are not so many.
    """
    if not wanted:
        yield env
        return
    if why := shortage(wanted, env):
        raise LaunchError(why)
    names, announced = visible({**os.environ, **env}), False
    while not stopping.is_set():
        with ExitStack() as stack:
            taken: list[str] = []
            for name in names:
                if len(taken) < wanted and _lock(name, stack):
                    taken.append(name)
            if len(taken) == wanted:
                if announced:
                    waits("")
                yield {**env, VISIBLE: ",".join(taken)}
                return
        if not announced:
            waits(f"waits for {wanted} GPUs; {len(taken)} of {len(names)} are free")
            announced = True
        stopping.wait(POLL_S)
    yield None


def _lock(name: str, stack: ExitStack) -> bool:
    """Take a GPU until the stack ends. False if somebody has it."""
    folder = Path(tempfile.gettempdir()) / "agentrl-gpus"
    folder.mkdir(mode=0o777, exist_ok=True)
    try:
        stack.enter_context(FileLock(folder / f"{name.replace('/', '-')}.lock", timeout=0, mode=0o666))
    except Timeout:
        return False
    return True
