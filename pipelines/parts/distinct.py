"""The rows of several selections, each once, and what they count."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from agentrl.pipelines.handles import Trajectories
from agentrl.schemas.trajectory import Trajectory


def distinct(selections: Sequence[Trajectories]) -> pa.Array:
    """The ids of selections in their order, each once."""
    return pc.unique(
        pa.chunked_array(chunk for selection in selections for chunk in selection.selection()["trajectory_id"].chunks)
    )


def rows_of(selections: Sequence[Trajectories]) -> Iterator[Trajectory]:
    """Whole rows of selections in their order, each once."""
    known = set[str]()
    for selection in selections:
        for row in selection.read():
            if row.trajectory_id not in known:
                known.add(row.trajectory_id)
                yield row


def weights_in(selections: Sequence[Trajectories], ids: pa.Array) -> list[float] | None:
    """What rows of selections count, [ids]: the sum of its weights where a selection has a row several times, and the
    largest of these where several selections have it; None: each counts 1."""
    if all(_plain(chosen.selection()) for chosen in selections):
        return None
    sums = [chosen.selection().group_by("trajectory_id").aggregate([("weight", "sum")]) for chosen in selections]
    largest = pa.concat_tables(sums).group_by("trajectory_id").aggregate([("weight_sum", "max")])
    rows = pc.index_in(ids, value_set=largest["trajectory_id"].combine_chunks())
    return largest["weight_sum_max"].combine_chunks().take(rows).to_pylist()


def _plain(chosen: pa.Table) -> bool:
    """Whether each row is there once, with the weight 1; most are, and there may be millions."""
    of_one = pc.all(pc.equal(chosen["weight"], 1)).as_py()
    return of_one is not False and pc.count_distinct(chosen["trajectory_id"]).as_py() == len(chosen)


def weights_of(selections: Sequence[Trajectories]) -> dict[str, float]:
    """What each row of selections counts, by its id: see :func:`weights_in`."""
    ids = distinct(selections)
    weights = weights_in(selections, ids) or [1.0] * len(ids)
    return dict(zip(ids.to_pylist(), weights, strict=True))
