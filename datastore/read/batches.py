"""Training batches from a selection of rows, in a seeded order that any reader can resume and that covers every row.

The order of an epoch is a permutation of the selection drawn from (seed, epoch) alone. Reader ``rank`` of ``world``
takes every ``world``-th batch of that one sequence. So all readers together see each row exactly once per epoch,
however many they are, and a position is two numbers: epoch and batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.read.lookup import id_array

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.datastore.read.lookup import Ids

TOKEN_COLUMNS = ("trajectory_id", "input_ids", "action_mask", "logprobs")


@dataclass(frozen=True)
class Position:
    """The next batch to read: its epoch, and its number in the epoch's sequence over all readers."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class BufferBatch:
    """Rows of one batch. ``next`` is where to resume after it; ``epoch`` and ``number`` say which batch it is."""

    rows: pa.Table
    epoch: int
    number: int
    next: Position


class BufferBatches:
    """Batches of a selection. Iterate it, keep ``batch.next`` with the checkpoint, and pass it back as ``start``."""

    def __init__(
        self,
        buffer: "TrajectoryBuffer",
        ids: "Ids",
        batch_rows: int,
        *,
        seed: int = 0,
        epochs: int = 1,
        columns: Sequence[str] = TOKEN_COLUMNS,
        rank: int = 0,
        world: int = 1,
        start: Position | None = None,
    ) -> None:
        if batch_rows < 1 or epochs < 0 or world < 1 or not 0 <= rank < world:
            raise ValueError(
                f"batch_rows {batch_rows}, epochs {epochs}, rank {rank}, world {world}: batch_rows and world are at "
                "least 1, epochs at least 0, and rank is below world"
            )
        names = id_array(ids)
        if pc.count_distinct(names).as_py() != len(names):
            raise ValueError("the selection holds an id twice; each row is given once per epoch, use weights instead")
        self.buffer = buffer
        self.ids = names.take(pc.sort_indices(names))  # so that the order depends only on the selection's content
        self.batch_rows = batch_rows
        self.seed = seed
        self.epochs = epochs
        self.columns = list(columns)
        self.rank = rank
        self.world = world
        self.start = start or Position()

    @property
    def per_epoch(self) -> int:
        """Batches of one epoch, over all readers; the last one may be short."""
        return -(-len(self.ids) // self.batch_rows)

    def order(self, epoch: int) -> pa.Array:
        """Ids in the order of one epoch."""
        return self.ids.take(pa.array(np.random.default_rng([self.seed, epoch]).permutation(len(self.ids))))

    def __iter__(self) -> Iterator[BufferBatch]:
        return self.share(0, 1)

    def share(self, worker: int, workers: int) -> Iterator[BufferBatch]:
        """Every ``workers``-th batch of this reader, counted from ``start``. Workers that are asked in turn, the first
        one first, so give the reader's batches in their order from any start."""
        position, own = self.start, 0
        for epoch in range(position.epoch, self.epochs):
            order = self.order(epoch)
            for number in range(position.batch, self.per_epoch):
                if number % self.world == self.rank:
                    if own % workers == worker:
                        ids = order.slice(number * self.batch_rows, self.batch_rows)
                        rows = self.buffer.read(ids, self.columns)
                        yield BufferBatch(rows, epoch, number, Position(epoch, number + 1))
                    own += 1
            position = replace(position, batch=0)
