"""Commands of `agentrl` that the viewer leaves to processes of their own: they import the user's code, or torch."""

import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.schemas.installation import PACKAGE_ROOT

FRESH_S = 10.0
"""Seconds for which an answer is believed."""
AT_ONCE, KEPT = 4, 32
"""Commands that are asked for at once, and answers that are kept."""


@dataclass(frozen=True)
class Told:
    """The JSON that a command printed, or why there is none."""

    answer: dict[str, Any]
    problem: str = ""


def told_by(arguments: Sequence[str], patience: float) -> Told:
    """What a command of `agentrl` says, in a process of its own, with this code."""
    path = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.flows.cli", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=patience,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
    except subprocess.TimeoutExpired:
        return Told({}, f"it took more than {patience:g} s and was given up")
    try:
        return Told(json.loads(done.stdout))
    except ValueError:
        lines = done.stderr.strip().rpartition("error: ")[2].splitlines() or [f"exit code {done.returncode}"]
        return Told({}, lines[0][:500])


class Commands:
    """What commands say, asked one after another, since each takes a whole core: who asks again later gets it. While
    one is asked again, what it said before counts, unless that was a problem: what went wrong may go well now."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._known: dict[str, tuple[float, Told]] = {}
        self._at_work: dict[str, threading.Event] = {}
        self._lock, self._one = threading.Lock(), threading.Lock()

    def of(self, arguments: Sequence[str], wait: float = 0.0, about: str | None = None) -> Told | None:
        """The answer; None if there is none after ``wait`` seconds. What a command says ``about`` a state that has not
        changed stays true; without it, it is asked again after :data:`FRESH_S`."""
        key = shlex.join([*arguments, about or ""])
        with self._lock:
            made, known = self._known.get(key, (-math.inf, None))
            stale = time.monotonic() > made + FRESH_S and not (about and known and not known.problem)
            known = None if known and known.problem and stale else known
            done = self._at_work.get(key)
            if done is None and len(self._at_work) >= AT_ONCE:
                return known  # a page that asks too often waits for what it asked before
            if done is None and stale:
                done = self._at_work[key] = threading.Event()
                threading.Thread(target=self._ask, args=(key, arguments, done), daemon=True).start()
        if known is None and done is not None:
            done.wait(wait)
            with self._lock:
                known = self._known.get(key, (0.0, None))[1]
        return known

    def _ask(self, key: str, arguments: Sequence[str], done: threading.Event) -> None:
        try:
            with self._one:
                told = told_by(arguments, self._patience)
        except Exception as error:  # shown, instead of an answer that never comes
            told = Told({}, f"{type(error).__name__}: {error}")
        with self._lock:
            self._known[key] = (time.monotonic(), told)
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]
            del self._at_work[key]
        done.set()
