"""Rows of the buffer as a torch data set that streams, each rank and each worker of a ``DataLoader`` its own share."""

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from agentrl.datastore.read.batches import BufferBatches, Position
from agentrl.datastore.read.lookup import Ids

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer


class TokenStream(IterableDataset[dict[str, Any]]):
    """One dictionary per batch: of each column a list with a value per row. Lists of numbers and of truth values
    (``input_ids``, ``action_mask``, ``logprobs``) are tensors ``[tokens]``; rows differ in length and nothing is
    padded.

    ``position`` is where to go on after the batch, as plain numbers: keep it with a checkpoint and give it to
    ``Store.stream``. It travels with the batch, so what a ``DataLoader`` has fetched beforehand is neither lost nor
    given twice. Use ``DataLoader(stream, batch_size=None, num_workers=n)``; its default order keeps that of the stream.
    """

    def __init__(self, batches: BufferBatches) -> None:
        self.batches = batches
        self.rows = selection_digest(batches.ids)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for batch in self.batches.share(worker, workers):
            position = {"epoch": batch.next.epoch, "batch": batch.next.batch, "rows": self.rows}
            yield {name: values(batch.rows[name]) for name in batch.rows.column_names} | {"position": position}


def token_stream(
    buffer: "TrajectoryBuffer",
    ids: Ids,
    batch_rows: int,
    *,
    rank: int | None = None,
    world: int | None = None,
    position: dict[str, Any] | None = None,
    **options: Any,
) -> TokenStream:
    """Batches of ``batch_rows`` rows in an order drawn from ``seed``; over all ranks each row is given once per epoch.
    ``rank`` and ``world`` are those of ``torch.distributed`` if it is initialised, else 0 and 1. ``position`` of a
    batch goes on after it, with as many ranks. Further options: ``columns``, ``epochs``.

    Raises ValueError if ``rank`` is not below ``world``, an id stands twice in ``ids``, or ``position`` was taken among
    other rows.
    """
    grouped = dist.is_available() and dist.is_initialized()
    batches = buffer.batches(
        ids,
        batch_rows,
        rank=rank if rank is not None else dist.get_rank() if grouped else 0,
        world=world if world is not None else dist.get_world_size() if grouped else 1,
        start=Position(position["epoch"], position["batch"]) if position else None,
        **options,
    )
    stream = TokenStream(batches)
    if position and position["rows"] != stream.rows:
        raise ValueError(
            "position was taken among other rows, so some would be given twice and others never: name the version of "
            "the table from the start (at=N), or begin without a position"
        )
    return stream


def selection_digest(ids: pa.Array) -> str:
    """The same for the same ids in the same order, here and on any machine."""
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(ids)], ids), "\n")
    return hashlib.blake2b(lines[0].as_buffer() or b"", digest_size=8).hexdigest()


def values(column: pa.ChunkedArray) -> list[Any]:
    """A value per row: a tensor ``[length]`` if the column holds lists of numbers or truth values."""
    if not (pa.types.is_list(column.type) and _is_plain(column.type.value_type)) or column.null_count:
        return column.to_pylist()
    lists = column.combine_chunks()
    flat = torch.from_numpy(np.array(lists.flatten().to_numpy(zero_copy_only=False)))
    lengths = np.diff(lists.offsets.to_numpy())
    return list(torch.split(flat, lengths.tolist()))


def _is_plain(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
