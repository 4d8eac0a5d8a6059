"""A bad disk: calls that make things durable fail at random, before they did their work or after it, or the process is
killed right there. Wanted by ``STORM_MISHAPS=SEED``, for a whole tree of processes."""

import errno
import os
import random
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any

VARIABLE = "STORM_MISHAPS"
CALLS = ("fsync", "replace", "rename", "link")
FAIL, FAIL_AFTER, KILL, KILL_AFTER = "fail", "fail after", "kill", "kill after"
SHARES = {FAIL: 0.004, FAIL_AFTER: 0.002, KILL: 0.002, KILL_AFTER: 0.002}
"""Shares of the calls."""


def install() -> None:
    """Make this process's disk a bad one if the environment says so."""
    if seed := os.environ.get(VARIABLE):
        chance = random.Random(f"{seed} {os.getpid()}")
        os.register_at_fork(after_in_child=lambda: chance.seed(f"{seed} {os.getpid()}"))
        for name in CALLS:
            setattr(os, name, mishap(getattr(os, name), chance))


def mishap(call: Callable[..., Any], chance: random.Random) -> Callable[..., Any]:
    """The call, with mishaps."""

    @wraps(call)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        [what] = chance.choices([*SHARES, ""], [*SHARES.values(), 1 - sum(SHARES.values())])
        if what == FAIL:
            raise OSError(chance.choice([errno.EIO, errno.ENOSPC]), f"{call.__name__} fails, as the storm wants it")
        if what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments, **options)
        if what == FAIL_AFTER:
            raise OSError(errno.EIO, f"{call.__name__} is done and fails, as the storm wants it")
        if what == KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped
