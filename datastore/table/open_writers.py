"""Marks of writers: a small object that exists as long as a writer's files are in the table's folder and in no commit.

A file's name carries its writer's id, so that ``vacuum`` leaves the files of a living writer alone, however old they
are. A writer of this machine is dead if its process is (:mod:`agentrl.datastore.storage.ownership`). A writer of
another machine renews its mark, and counts as dead if it has not for :data:`STALE`, by the clock of the store. That is
a guess, which must not cost a row: ``vacuum`` first commits that the writer is dead, and a later commit of that writer
is refused.
"""

import json
import os
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from agentrl.datastore.storage import ownership as owners
from agentrl.datastore.storage.object_store import LocalStorage, S3Storage

FOLDER = "writers"
RENEW_SECONDS = 60.0
STALE = timedelta(minutes=15)
_WRITER = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")


@dataclass(frozen=True)
class Mark:
    """A writer's mark, as found. ``owner``: the process it belongs to, empty if the mark cannot be read."""

    writer: str
    renewed: datetime
    owner: str

    def alive(self, working: Path, now: datetime) -> bool:
        """Whether the writer lives. ``working``: the place's working folder; ``now``: the place's time."""
        state = owners.state(working, self.owner) if self.owner else owners.Owner.UNKNOWN
        return now - self.renewed < STALE if state is owners.Owner.UNKNOWN else state is owners.Owner.ALIVE


def new_writer() -> str:
    return uuid.uuid4().hex


def writer_of(name: str) -> str | None:
    """The writer's id in the name of a file, or None."""
    match = _WRITER.search(name)
    return match[0] if match else None


def key_of(writer: str) -> str:
    return f"{FOLDER}/{writer}.json"


def death(writer: str) -> str:
    """Name of the transaction that declares a writer dead."""
    return f"dead-writer/{writer}"


class Marked:
    """A writer's own mark, from :meth:`set` to :meth:`clear`."""

    def __init__(self, storage: LocalStorage | S3Storage, writer: str) -> None:
        self._storage = storage
        self._writer = writer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name=f"mark {writer}")

    def set(self) -> None:
        self._write()
        self._thread.start()

    def stop(self) -> None:
        """Renew no more, but leave the mark: nobody knows yet whether the files were committed."""
        self._stop.set()
        self._thread.join()

    def clear(self) -> None:
        self.stop()
        self._storage.delete(key_of(self._writer))

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            with suppress(Exception):  # the next renewal may succeed, and a mark that is lost costs no row
                self._write()

    def _write(self) -> None:
        working = self._storage.working_folder()
        data = json.dumps({"owner": owners.me(working)}).encode()
        if not isinstance(self._storage, LocalStorage):
            self._storage.write(key_of(self._writer), data)
            return
        path = self._storage.root / key_of(self._writer)  # not made durable: after a power loss no writer lives
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{owners.mark(working)}.tmp"
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError:  # a full disk
            temporary.unlink(missing_ok=True)
            raise


def marks(storage: LocalStorage | S3Storage) -> list[Mark]:
    """All marks of the store."""
    marks_read = []
    for key, renewed in storage.listing(FOLDER):
        writer = writer_of(key)
        data = storage.read(key)
        if writer is not None and data is not None:
            try:
                marks_read.append(Mark(writer, renewed, str(json.loads(data)["owner"])))
            except (ValueError, TypeError, KeyError):
                marks_read.append(Mark(writer, renewed, ""))
    return marks_read


@contextmanager
def clock(storage: LocalStorage | S3Storage) -> Iterator[datetime]:
    """The time of the store: that of a mark written just now."""
    writer = new_writer()
    mark = Marked(storage, writer)
    mark.set()
    try:
        yield next(other.renewed for other in marks(storage) if other.writer == writer)
    finally:
        mark.clear()
