"""Reading files by the workers of an engine, in the order of the rows.

The files are cut into the parts that workers of this machine read too. What comes of a part depends on the part alone,
and lies in a file whose name says what it was read from and how: so it does not matter who reads which, and what is
there is not read again."""

import mmap
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.columns import Keep, RowBatch
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.parts import Part, parts
from agentrl.datastore.formats.recognise import Recognised
from agentrl.datastore.formats.source import Source
from agentrl.datastore.formats.workers import File, batches_of, write_part
from agentrl.datastore.shards.divide import Divide, in_groups
from agentrl.datastore.shards.shard import Shard, digest_of, finished

PARTS = 8
"""Parts of a shard, if no number of shards is asked for."""
_SIZE = 8
"""Bytes at the end of a result that say how many of it are tables."""


class Read(NamedTuple):
    """A file to read, and its fingerprint."""

    source: Source
    recognised: Recognised
    fingerprint: str


@dataclass(frozen=True)
class _Elsewhere:
    """A file as a worker opens it. ``size``: bytes of it where the work is divided; None for a folder."""

    path: Path
    name: str
    recognised: Recognised
    limit: int
    quarantine: bool
    prompts: bool
    size: int | None

    @classmethod
    def of(cls, read: Read) -> "_Elsewhere":
        source, notes = read.source, read.source.notes
        path = source.path.absolute()
        size = path.stat().st_size if path.is_file() else None
        return cls(path, source.name, read.recognised, source.limit, notes.quarantine, notes.prompts, size)

    def open(self) -> File:
        """Raises OSError or StoreError if the file is not there, or if another one is."""
        size = self.path.stat().st_size
        if self.size is not None and size != self.size:
            raise StoreError(
                f"{self.path} has {size} bytes here, and {self.size} where the run is; mount one folder on all workers"
            )
        source = Source(self.path, Notes(self.quarantine, self.prompts), self.name)
        source.limit = self.limit
        return File(source, self.recognised.reader)


def read_divided(reads: Sequence[Read], keep: Keep, divide: Divide) -> Iterator[RowBatch]:
    """Tables of the rows of all files, in order, as :func:`agentrl.datastore.formats.workers.read_files` gives them.
    All parts are read before the first table comes. Raises ShardError if a worker sees no such file."""
    assert divide.work is not None
    files = [File(read.source, read.recognised.reader) for read in reads]
    cut = list(parts(files))
    paths = [divide.work / "files" / f"{_name(part, reads, keep)}.rows" for part in cut]
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    shards = []
    for group in in_groups(missing, divide.shards, PARTS):
        work = [(cut[number], paths[number]) for number in group]
        needed = {at for part, _ in work for at in range(part.first, part.first + part.files)}
        sent = {at: _Elsewhere.of(reads[at]) for at in sorted(needed)}
        shards.append(Shard(_said(work, reads), f"{__name__}:read_parts", (work, sent, keep)))
    divide.run(shards, "files")
    for path in paths:
        yield from _collected(path, files)


def _name(part: Part, reads: Sequence[Read], keep: Keep) -> str:
    of_part = reads[part.first : part.first + part.files]
    return digest_of(
        part.span, keep, *((read.source.name, read.fingerprint, read.source.limit, read.source.notes.quarantine)
                           for read in of_part)
    )  # fmt: skip


def _said(work: Sequence[tuple[Part, Path]], reads: Sequence[Read]) -> str:
    first, _ = work[0]
    begins = f"{reads[first.first].source.name}"
    begins += f" from {first.span.start}" if first.span else ""
    return f"rows of {begins}" + (f" and {len(work) - 1} more parts" if len(work) > 1 else "")


def read_parts(work: Sequence[tuple[Part, Path]], sent: dict[int, _Elsewhere], keep: Keep) -> None:
    """Write what comes of parts of files, each to its own file."""
    files = {number: file.open() for number, file in sent.items()}
    for part, path in work:
        if path.exists():
            continue
        with finished(path) as unfinished, unfinished.open("wb") as file:
            outcome, tables = write_part(part, files, keep, file), file.tell()
            pickle.dump(outcome, file)
            file.write(tables.to_bytes(_SIZE, "little"))


def _collected(path: Path, files: Sequence[File]) -> Iterator[RowBatch]:
    """The tables of a part. If its reader raised an error, so does this, and the part is read again the next time."""
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tables = int.from_bytes(held[-_SIZE:], "little")
    outcome = pickle.loads(memoryview(held)[tables:-_SIZE])
    if outcome.error:
        path.unlink(missing_ok=True)
    yield from batches_of(outcome, pa.py_buffer(held).slice(0, tables), files)
