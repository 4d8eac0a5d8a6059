"""Reading large files by several processes, in the order of the rows.

The files are cut into parts of some megabytes, at the ends of lines, of row groups or of whole files. Each worker is a
fork of this process: it reads parts, and hands their tables over in shared memory. This process only cuts and
collects, and holds a bounded number of parts. Small imports, and systems without fork, are read in this process.
"""

import gc
import itertools
import mmap
import os
import pickle
import signal
import socket
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.blocks import RowBlock
from agentrl.datastore.formats.columns import Keep, RowBatch, batches
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.parts import Part, in_parts, parts
from agentrl.datastore.formats.source import Row, Source
from agentrl.datastore.spared import spare_pandas
from agentrl.datastore.table.validation import LENIENT_SCHEMA

if TYPE_CHECKING:
    from agentrl.datastore.formats import Format

WORTH_IT = 4
"""Parts from which on workers read them."""
MOST_WORKERS = 4
"""Each takes some 60 MB of memory of its own."""
AHEAD = 2
"""Parts that a worker has at once: one that it reads, and one that waits."""
_TASK = 2**16
_KILLED = "a process that read a part of the files was ended from outside, for instance because memory was short"


class File(NamedTuple):
    """A file and the format to read it by."""

    source: Source
    format: "Format"


def read_files(files: Sequence[File], keep: Keep | None = None) -> Iterator[RowBatch]:
    """Tables of the rows of all files, in order. ``keep`` says what to keep of a record beside its row. What the
    readers count and refuse is in the notes of the sources afterwards."""
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0))) if hasattr(os, "memfd_create") else 1
    cut = parts(files)
    first = list(itertools.islice(cut, WORTH_IT)) if workers > 1 else []
    if len(first) < WORTH_IT:
        return batches(((file.source, row) for file in files for row in _guarded(file.source, _rows(file, keep))), keep)
    return _read_together(files, itertools.chain(first, cut), keep, workers)


def _rows(file: File, keep: Keep | None) -> Iterator[Row | RowBlock]:
    """The rows of a file. A long list in JSON is read in parts here too: what is broken ends its part, and no other."""
    source, format = file
    if format.cut and source.kind in ("array", "document"):
        return in_parts(source, format.cut, format.rows)
    return format.blocks(source, keep)


def _guarded(source: Source, rows: Iterator[Row | RowBlock]) -> Iterator[Row | RowBlock]:
    """The rows of a file up to where it cannot be read on. If such files are set aside, other files are read."""
    try:
        yield from rows
    except StoreError as error:
        if not source.notes.quarantine:
            raise
        source.notes.refuse(source.name, error)


def _read_together(files: Sequence[File], cut: Iterable[Part], keep: Keep | None, count: int) -> Iterator[RowBatch]:
    pool = [_Worker.start(files, keep) for _ in range(count)]
    waiting: deque[_Worker] = deque()
    """The workers of the parts that are being read, in the order of the parts."""
    try:
        idle = deque(pool * AHEAD)
        for part in cut:
            if not idle:
                worker = waiting.popleft()
                yield from worker.result(files)
                idle.append(worker)
            worker = idle.popleft()
            worker.send(part)
            waiting.append(worker)
        for worker in waiting:
            yield from worker.result(files)
    finally:
        for worker in pool:
            worker.stop()


@dataclass(frozen=True)
class _Worker:
    pid: int
    socket: socket.socket
    free: list[int] = field(default_factory=list)
    """Numbers of its pieces of shared memory whose tables nobody holds any more."""

    @classmethod
    def start(cls, files: Sequence[File], keep: Keep | None) -> "_Worker":
        ours, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            child.close()
            return cls(pid, ours)
        status = 1
        try:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.freeze()
            spare_pandas()
            _work(child, files, keep)
            status = 0
        finally:
            os._exit(status)

    def send(self, part: Part) -> None:
        free = self.free[:]
        del self.free[: len(free)]
        try:
            self.socket.send(pickle.dumps((part, free)))
        except ConnectionError:
            raise StoreError(_KILLED) from None

    def result(self, files: Sequence[File]) -> Iterator[RowBatch]:
        """The tables of the first part that was sent and not collected. Raises what its reader raised."""
        try:
            sizes, handles, _, _ = socket.recv_fds(self.socket, 64, 1)
        except ConnectionError:
            handles = []
        if not handles:
            raise StoreError(_KILLED)
        number, tables_size, size = map(int, sizes.split())
        with os.fdopen(handles[0], "rb") as file:
            shared = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        weakref.finalize(shared, self.free.append, number).atexit = False
        outcome: PartRead = pickle.loads(memoryview(shared)[tables_size:])
        yield from batches_of(outcome, pa.py_buffer(shared).slice(0, tables_size), files)

    def stop(self) -> None:
        self.socket.close()
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)


@dataclass
class PartRead:
    """What a worker says beside the tables of a part."""

    rows: list[list[tuple[int, int]]]
    """Of each table: numbers of files, and how many rows in turn are of each."""
    kept: list[list[Any] | None]
    notes: list[tuple[int, Notes]]
    error: Exception | None = None


def batches_of(outcome: PartRead, tables: pa.Buffer, files: Sequence[File]) -> Iterator[RowBatch]:
    """The tables of a part, of an Arrow stream. Raises what its reader raised, after the rows before."""
    for number, notes in outcome.notes:
        files[number].source.notes.add(notes)
    if outcome.rows:
        for batch, runs, kept in zip(pa.ipc.open_stream(tables), outcome.rows, outcome.kept, strict=True):
            sources = list(itertools.chain.from_iterable([files[at].source] * length for at, length in runs))
            yield RowBatch(pa.Table.from_batches([batch]), sources, kept or [None] * len(sources))
    if outcome.error:
        raise outcome.error


def _work(parent: socket.socket, files: Sequence[File], keep: Keep | None) -> None:
    shared: list[int] = []
    """Pieces of shared memory, written again once their tables are free: new pages cost more than copying."""
    free: list[int] = []
    while task := parent.recv(_TASK):
        part, freed = pickle.loads(task)
        free += freed
        if not free:
            free.append(len(shared))
            shared.append(os.memfd_create("rows"))
        number = free.pop()
        with open(shared[number], "wb", closefd=False) as file:
            file.seek(0)
            outcome = write_part(part, dict(enumerate(files)), keep, file)
            tables_size = file.tell()
            pickle.dump(outcome, file)
            file.flush()
            socket.send_fds(parent, [b"%d %d %d" % (number, tables_size, file.tell())], [shared[number]])


def write_part(part: Part, files: Mapping[int, File], keep: Keep | None, file: Any) -> PartRead:
    """Write the tables of a part as an Arrow stream. ``files``: those of the part, by their numbers."""
    sources = {number: files[number].source for number in range(part.first, part.first + part.files)}
    own = {
        number: source.part(part.span, Notes(source.notes.quarantine, source.notes.prompts))
        for number, source in sources.items()
    }
    numbers = {id(source): number for number, source in own.items()}
    outcome = PartRead([], [], [])
    try:
        rows = (
            (source, row)
            for number, source in own.items()
            for row in _guarded(source, files[number].format.blocks(source, keep))
        )
        with pa.ipc.new_stream(file, LENIENT_SCHEMA) as stream:
            for batch in batches(rows, keep):
                if not batch.table.num_rows:
                    continue
                stream.write_table(batch.table.combine_chunks())
                outcome.rows.append(_runs(batch.sources, numbers))
                outcome.kept.append(batch.kept if any(values is not None for values in batch.kept) else None)
    except Exception as error:
        outcome.error = error
    outcome.notes = [(number, source.notes) for number, source in own.items() if not source.notes.empty]
    return outcome


def _runs(sources: Sequence[Source], numbers: dict[int, int]) -> list[tuple[int, int]]:
    """The number of each source, and how many rows in turn are of it."""
    if len(numbers) == 1:
        return [(number, len(sources)) for number in numbers.values()]
    return [(numbers[source_id], len(list(run))) for source_id, run in itertools.groupby(map(id, sources))]
