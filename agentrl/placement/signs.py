"""Signs of life over a shared folder: a process raises a counter in a file each second, and others look whether it
changes. Each side uses its own clock alone, and no lock (see :mod:`agentrl.placement.shared`)."""

import os
import threading
import time
import warnings
from pathlib import Path

SIGNS = ".alive"
"""How the name of the file ends."""

BEAT_S = 1.0
MOST_S = 5.0
"""Seconds that one look can add to a silence. Who could not look for longer was held up itself."""


class Signs:
    """Gives signs of life in the file ``path`` until it is closed, however busy this process is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0
        self._over = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="signs", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failing = False
        while not self._over.wait(BEAT_S):
            try:
                self._beat()
                failing = False
            except OSError as error:
                if not failing:
                    warnings.warn(f"no sign of life can be written: {error}; ranks end without one", stacklevel=1)
                failing = True

    def _beat(self) -> None:
        """In place: a new file each second would be work for the server of names. It is closed, so that NFS sends it.
        A reader may see a half of it, which is a change too."""
        self._count += 1
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, f"{self._count:020d}\n".encode(), 0)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.path.unlink(missing_ok=True)


class Silence:
    """How long ``path`` has given no sign of life: what counts is that the file changes, on the clock of this
    process. ``limit_s`` seconds are allowed."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self.path, self.limit_s = path, limit_s
        self.seconds = 0.0
        self._seen, self._problem = b"", ""
        self._looked = time.monotonic()

    def look(self) -> str | None:
        """Why it is too long, as a sentence; None while it is not."""
        now = time.monotonic()
        self.seconds += min(now - self._looked, MOST_S)
        self._looked = now
        try:
            text, self._problem = self.path.read_bytes(), ""
        except OSError as error:
            text, self._problem = self._seen, f" ({error.strerror})"
        if text != self._seen:
            self._seen, self.seconds = text, 0.0
        if self.seconds <= self.limit_s:
            return None
        where = f"in {self.path}{self._problem} for {self.limit_s:g} s"
        if not self._seen:
            return (
                f"no sign of life of the stage was ever seen {where}; this machine must share that folder with the "
                "stage's (--store on shared storage)"
            )
        return (
            f"the stage gave no sign of life {where}: its process ended, or its machine or the shared folder is gone; "
            "run it again, or set execution.limits.heartbeat_s higher"
        )
