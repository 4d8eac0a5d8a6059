"""The live log of a training stage: the metrics of its steps, in the store while it runs.

``runs/<run_id>/live/<stage>.jsonl`` has a line of JSON for each step, with its ``step`` and its ``time`` in seconds
since 1970. In a folder it is a file that grows. S3 cannot append: there it is a folder of parts, each named by the byte
of the log that it begins at. The last part is put again, once a second at most, until it has :data:`PART` bytes.

The lines are also kept in the stage's scratch folder. A run that goes on after a kill begins a log of its own with
those lines, and leaves out steps that are in it already.
"""

import json
import math
import os
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple, Self

from agentrl.datastore.artifacts.catalog import checked_name
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage, make_folder
from agentrl.datastore.storage.ownership import mark

PART = 1 << 16
"""Bytes from which on a part on S3 is not put again."""

PUT_S = 1.0
"""Seconds between two looks for new lines to put on S3."""

MOST = 1 << 20
"""Bytes of a log that :func:`lines_after` reads at once, unless told otherwise."""


class LiveLog:
    """Writes the log of one stage of one run. ``kept`` is a file that outlives a kill, in the stage's scratch folder.
    Use it in ``with``.

    A log that cannot be written ends with a warning; it never ends the training.
    """

    def __init__(self, storage: LocalStorage | S3Storage, run_id: str, stage: str, kept: Path) -> None:
        self.storage, self.key, self.kept = storage, _key(run_id, stage), kept
        self._last = -1
        self._file: IO[bytes] | None = None
        self._parts: _Parts | None = None
        try:
            self._begin()
        except Exception as error:
            self._give_up(error)

    def _begin(self) -> None:
        lines = _whole(self.kept.read_bytes()) if self.kept.exists() else b""
        if lines:
            self._last = json.loads(lines.splitlines()[-1])["step"]
        fresh = self.kept.with_suffix(".new")  # the log of the run before is another one from now on
        fresh.write_bytes(lines)
        if isinstance(self.storage, LocalStorage):
            target = self.storage.root / self.key
            make_folder(target.parent)
            beside = target.parent / f".{target.name}.{mark(self.storage.working_folder())}.tmp"
            os.link(fresh, beside)
            os.replace(beside, target)
        os.replace(fresh, self.kept)
        self._file = self.kept.open("ab", buffering=0)
        if isinstance(self.storage, S3Storage):
            self._parts = _Parts(self.storage, self.key, self.kept)

    def write(self, metrics: Mapping[str, float | None]) -> None:
        """Add the metrics of a step, unless it is there. Numbers that are not finite become null. Takes tens of
        microseconds; another thread talks to S3."""
        step = int(metrics["step"] or 0)
        if self._file is None or step <= self._last:
            return
        numbers = {
            name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()
        }
        line = json.dumps({**numbers, "step": step, "time": round(time.time(), 3)})
        try:
            self._file.write(f"{line}\n".encode())
            self._last = step
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        warnings.warn(
            f"{self.storage.uri}/{self.key} is no longer written: {error}; the run goes on without live metrics",
            stacklevel=3,
        )
        self._close_file()

    def _close_file(self) -> None:
        if self._file:
            self._file.close()
        self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_file()
        if self._parts:
            self._parts.close()


class _Parts:
    """Puts what is added to a file on S3, in a thread. What this run put before, from the same beginning, is replaced.
    A put that fails is tried again; the last failure is warned of at the end."""

    def __init__(self, storage: S3Storage, key: str, path: Path) -> None:
        self._storage, self._key, self._path = storage, key, path
        self._start = self._put = 0
        self._failed: Exception | None = None
        self._stop = threading.Event()
        storage.delete(key)
        self._thread = threading.Thread(target=self._keep_up, daemon=True, name=f"live log {key}")
        self._thread.start()

    def _keep_up(self) -> None:
        over = False
        while not over:
            over = self._stop.wait(PUT_S)
            try:
                self._put_new()
                self._failed = None
            except Exception as error:  # the store may be back the next time
                self._failed = error

    def _put_new(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._start)
            part = _whole(file.read())
        if self._start + len(part) == self._put:
            return
        self._storage.write(f"{self._key}/{self._start:012d}", part)
        self._put = self._start + len(part)
        if len(part) >= PART:
            self._start = self._put

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._failed:
            warnings.warn(
                f"{self._storage.uri}/{self._key} lacks its last lines, which could not be written: {self._failed}",
                stacklevel=4,
            )


class LiveLines(NamedTuple):
    """Lines of a log, and the ``cursor`` after them, in bytes."""

    lines: list[str]
    cursor: int


def lines_after(
    storage: LocalStorage | S3Storage, run_id: str, stage: str, cursor: int = 0, most: int = MOST
) -> LiveLines | None:
    """The lines of a live log after a cursor, about ``most`` bytes of them; None if there is no such log. A line that
    is not whole yet is left for the next time. If the log is shorter than the cursor, its stage began again, and so do
    the lines."""
    key = _key(run_id, stage)
    data = _bytes_of(storage, key, cursor, most)
    if data is None and cursor:
        return lines_after(storage, run_id, stage, 0, most)
    if data is None:
        return None
    whole = _whole(data)
    return LiveLines(whole.decode().splitlines(), cursor + len(whole))


def length(storage: LocalStorage | S3Storage, run_id: str, stage: str) -> int:
    """The bytes of a live log, the beginning of a line that is not whole yet included; 0 if there is none."""
    key = _key(run_id, stage)
    if isinstance(storage, LocalStorage):
        path = storage.root / key
        return path.stat().st_size if path.exists() else 0
    last = max(map(int, storage.children(key)[1]), default=0)
    return last + len(storage.read(f"{key}/{last:012d}") or b"")


def live_stages(storage: LocalStorage | S3Storage, run_id: str) -> list[str]:
    """The stages of a run that have a live log, sorted."""
    folders, files = storage.children(folder_of(run_id))
    names = files if isinstance(storage, LocalStorage) else folders
    return [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]


_SUFFIX = ".jsonl"


def folder_of(run_id: str) -> str:
    """Key of the folder that holds the live logs of a run."""
    return f"runs/{checked_name('run_id', run_id)}/live"


def _key(run_id: str, stage: str) -> str:
    return f"{folder_of(run_id)}/{checked_name('stage', stage)}{_SUFFIX}"


def _whole(data: bytes) -> bytes:
    """The lines of these bytes that are whole."""
    return data[: data.rfind(b"\n") + 1]


def _bytes_of(storage: LocalStorage | S3Storage, key: str, cursor: int, most: int) -> bytes | None:
    """The bytes from ``cursor`` on; None if there are not so many bytes, or no log."""
    if isinstance(storage, LocalStorage):
        try:
            with (storage.root / key).open("rb") as file:
                if file.seek(0, os.SEEK_END) < cursor:
                    return None
                file.seek(cursor)
                return file.read(most)
        except FileNotFoundError:
            return None
    starts = sorted(int(name) for name in storage.children(key)[1])
    current = max((start for start in starts if start <= cursor), default=None)
    if current is None:
        return None
    data = b""
    for start in starts[starts.index(current) :]:
        part = storage.read(f"{key}/{start:012d}")
        if part is None or (start == current and len(part) < cursor - start):
            return None
        data += part[max(0, cursor - start) :]
        if len(data) >= most:
            break
    return data
