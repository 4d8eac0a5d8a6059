"""Scoring that is divided: batches of whole groups, which workers read from the data files."""

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation.pieces import Piece, pieces_of, read
from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards.shard import finished
from agentrl.datastore.storage.delta_paths import FOLDER, data_files
from agentrl.datastore.storage.object_store import storage_of
from agentrl.pipelines.parts.stored_tasks import TaskKey
from agentrl.schemas.arrow import from_table
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Trajectory


def pieces_of_batches(buffer: TrajectoryBuffer, batches: Sequence[Sequence[str]]) -> list[list[Piece]]:
    """For each batch of ids the pieces of data files that hold its rows, numbered by their order in the batch."""
    ids = [name for batch in batches for name in batch]

    def of_version() -> list[Piece]:
        files = data_files(buffer.storage, FOLDER, buffer.table(buffer.version))
        return pieces_of(buffer.storage, files, pl.DataFrame({"trajectory_id": ids}))

    pieces = buffer.current(None, of_version)
    starts = np.cumsum([0, *map(len, batches)])
    batched: list[list[Piece]] = [[] for _ in batches]
    for piece in pieces:
        of_batch = np.searchsorted(starts, piece.numbers, "right") - 1
        for batch in np.unique(of_batch).tolist():
            chosen = of_batch == batch
            own = piece.numbers[chosen] - np.uint32(starts[batch])
            batched[batch].append(Piece(piece.file, piece.start, piece.end, piece.places[chosen], own))
    return batched


def rows_of(store: str, pieces: Sequence[Piece], ids: Sequence[str]) -> list[Trajectory]:
    """The rows of these ids, in their order, from pieces of data files; from the table, if a compaction and a vacuum
    removed the files since the work was divided."""
    storage, names = storage_of(store), TRAJECTORY_SCHEMA.names
    try:
        tables = [table for piece in pieces for table in read(storage, piece, names, piece.places)]
    except FileNotFoundError:
        with suppress(StoreError):
            return TrajectoryBuffer(store).get_many(ids)
        raise
    numbers = np.concatenate([piece.numbers for piece in pieces])
    return list(from_table(Trajectory, pa.concat_tables(tables).take(np.argsort(numbers))))


def keep_tasks(known: Mapping[TaskKey, Task], folder: Path) -> Path:
    """A file of all known tasks, whose name says what is in it."""
    data = pickle.dumps(dict(sorted(known.items())))
    path = folder / f"{xxh3_128_hexdigest(data)}.tasks"
    if not path.exists():
        with finished(path) as unfinished:
            unfinished.write_bytes(data)
    return path


@lru_cache(maxsize=1)
def kept_tasks(path: Path) -> dict[TaskKey, Task]:
    return pickle.loads(path.read_bytes())
