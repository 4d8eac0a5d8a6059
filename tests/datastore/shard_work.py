"""Shards of tests: functions that workers call."""

import errno
import os
import signal
import time
import warnings
from pathlib import Path


def write(path: Path, text: str) -> None:
    path.write_text(text)


def count(path: Path) -> int:
    """How often it was called with this path, this time included."""
    with path.with_suffix(".tries").open("a") as file:
        file.write("x")
    return path.with_suffix(".tries").stat().st_size


def dies(path: Path, times: int) -> None:
    """End the process so many times, then write."""
    if count(path) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, "done")


def hangs_once(path: Path) -> None:
    if count(path) == 1:
        time.sleep(600)
    write(path, "done")


def full_disk(path: Path, times: int) -> None:
    if count(path) <= times:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    write(path, "done")


def wrong(path: Path) -> None:
    raise ValueError("row 7 is no row")


def reads(path: Path, other: Path) -> None:
    path.write_text(other.read_text())


def sees(path: Path, variable: str) -> None:
    write(path, os.environ[variable])


def warns(path: Path, *texts: str) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=1)
    write(path, "done")


def alone(path: Path, busy: Path) -> None:
    """Fail if another one runs at the same time."""
    busy.mkdir()
    time.sleep(1)
    busy.rmdir()
    write(path, "done")


def takes(path: Path, mib: int) -> None:
    """Memory, for a while."""
    kept = bytearray(mib * 2**20)
    time.sleep(60)
    write(path, str(len(kept)))


def waits(path: Path, other: Path, fails: int = 0) -> None:
    """Until there is another file; fail so many times."""
    tries = count(path)
    while not other.exists():
        time.sleep(0.1)
    if tries <= fails:
        raise OSError(errno.EIO, "Input/output error", str(path))
    write(path, "done")
