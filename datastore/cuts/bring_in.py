"""Bringing a cut of another store into this one: its rows under their own ids, its tasks and its tokenizers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts import tokenizers
from agentrl.datastore.cuts.annotations import take_annotations
from agentrl.datastore.cuts.folder import CutFolder
from agentrl.datastore.cuts.verify import TASKS, TOKENIZERS, exported_cut, is_exact, rows_of, verify_export
from agentrl.datastore.errors import NoBufferError, StoreError
from agentrl.schemas.task import TASK_SCHEMA

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer


@dataclass(frozen=True)
class BroughtIn:
    """The cut, how many of its rows were appended, and how many were there already with equal content; how many
    annotations of its rows were added, and how many did not fit and were set aside."""

    cut: CutFolder
    appended: int
    known: int
    annotations: int = 0
    refused: int = 0


def import_cut(
    buffer: "TrajectoryBuffer", folder: Path, fingerprint: str, run_id: str, progress: Callable[[int, int], None]
) -> BroughtIn:
    """Append the rows of an exported cut that are not there, in one commit that is made once for a ``fingerprint``.

    Raises StoreError if the folder is no exported cut, if a file or row of it is not what the cut says, if it does not
    hold the rows as they are, if it holds more than the cut, or if a row of this store has the id of one of them and
    other content.
    """
    cut = exported_cut(folder)
    if not is_exact(folder):
        raise StoreError(
            f"{folder} does not hold the rows as they are, but in a format that loses some of them; export the cut "
            "with `--format parquet`"
        )
    checked = verify_export(folder)
    if not checked.ok:
        raise StoreError(f"{folder} is not the cut that was exported: {'; '.join(checked.problems())}")
    known = _known(buffer, cut)
    appended = len(cut.ids()) - len(known)
    if appended:
        rows = _new(folder, cut.ids(), known, progress)
        buffer.append(rows, stage="cut", fingerprint=fingerprint, run_id=run_id)
    if (folder / TASKS).is_file():
        buffer.keep_tasks(pq.read_table(folder / TASKS).cast(TASK_SCHEMA))
    for path in sorted((folder / TOKENIZERS).glob("*.json")):
        tokenizers.keep(buffer.storage, path.stem, path.read_text)
    labels = take_annotations(buffer, folder)
    if labels is None:
        return BroughtIn(cut, appended, len(known))
    return BroughtIn(cut, appended, len(known), labels.rows, len(labels.refused))


def _known(buffer: "TrajectoryBuffer", cut: CutFolder) -> pa.Array:
    """The ids of the cut that the buffer has, all with the content that the cut says."""
    try:
        there = buffer.scan().select("trajectory_id").join(cut.rows(), on="trajectory_id", how="semi").collect()
    except NoBufferError:
        return pa.array([], pa.string())
    ids = there["trajectory_id"].sort().to_arrow().cast(pa.string())
    parts = [pa.chunked_array([], pa.binary())] if not len(ids) else list(buffer.digests(ids))
    digests = pa.chunked_array([chunk for part in parts for chunk in part.chunks], pa.binary())
    now = pl.DataFrame({"trajectory_id": ids, "now": digests})
    other = now.lazy().join(cut.rows(), on="trajectory_id").filter(pl.col("now") != pl.col("digest")).collect()
    if other.height:
        raise StoreError(
            f"{other.height} rows of this store have ids of rows of the cut, and other content, such as "
            f"{other['trajectory_id'][0]}; import the cut into a store of its own"
        )
    return ids


def _new(folder: Path, ids: pa.Array, known: pa.Array, progress: Callable[[int, int], None]) -> Iterator[pa.Table]:
    """The rows of the cut, which lie in its order, without those that are known."""
    done = 0
    for rows in rows_of(folder):
        names = rows["trajectory_id"]
        of_cut = pc.is_in(names, value_set=ids.slice(done, len(rows)))
        done += len(rows)
        progress(done, len(ids))
        if len(new := rows.filter(pc.and_(of_cut, pc.invert(pc.is_in(names, value_set=known))))):
            yield new
