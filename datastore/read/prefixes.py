"""What the parents of a continuation sampled before it begins."""

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer

COLUMNS = ("parent_id", "fork_at", "action_mask")


def sampled(buffer: "TrajectoryBuffer", rows: pa.Table) -> pa.ListArray:
    """Which tokens a row, or one of its parents, sampled: the action masks of ``rows``, which have :data:`COLUMNS`,
    and before ``fork_at`` those of their parents.

    Raises UnknownTrajectoryError if the buffer does not have a parent.
    """
    own = rows["action_mask"].combine_chunks()
    starts = own.offsets.to_numpy()
    flags = own.values.to_numpy(zero_copy_only=False).copy()
    numbers, limits = np.arange(len(rows)), rows["fork_at"].to_numpy()
    while (limits > 0).any():
        forked = limits > 0
        numbers, limits = numbers[forked], limits[forked]
        parents = rows["parent_id"].combine_chunks().filter(pa.array(forked)).dictionary_encode()
        rows = buffer.read(parents.dictionary, COLUMNS).take(parents.indices)
        for number, limit, mask in zip(numbers, limits, rows["action_mask"].combine_chunks(), strict=True):
            flags[starts[number] : starts[number] + limit] |= np.array(mask.as_py()[:limit], bool)
        limits = np.minimum(limits, rows["fork_at"].to_numpy())
    return pa.ListArray.from_arrays(own.offsets, pa.array(flags), type=own.type)
