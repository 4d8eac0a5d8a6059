"""What is in a version of the buffer, in numbers."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

if TYPE_CHECKING:
    from agentrl.datastore.buffer import TrajectoryBuffer


def totals(buffer: "TrajectoryBuffer", version: int | datetime | None) -> dict[str, Any]:
    """See :meth:`TrajectoryBuffer.stats`."""
    table = buffer.table(version)
    by_stage = (
        buffer.scan(table.version())
        .group_by("pipeline", "stage", "env")
        .agg(
            pl.len().alias("rows"),
            pl.col("task_id").n_unique().alias("tasks"),
            pl.col("success").null_count().cast(pl.Int64).alias("unscored"),
            pl.col("success").mean(),
            pl.col("reward").mean(),
            pl.col("n_steps").mean().alias("steps"),
            pl.col("n_tokens").sum().cast(pl.Int64).alias("tokens"),
            pl.col("created_at").max().alias("newest"),
        )
        .sort("newest")
        .collect()
    )
    files = pl.DataFrame(pa.table(table.get_add_actions(flatten=True)))
    return {
        "stages": by_stage.to_dicts(),
        "rows": int(by_stage["rows"].sum()),
        "tokens": int(by_stage["tokens"].sum()),
        "files": files.height,
        "bytes": int(files["size_bytes"].sum()),
        "version": table.version(),
    }


def changes(buffer: "TrajectoryBuffer", old: int | datetime, new: int | datetime | None) -> pl.DataFrame:
    """See :meth:`TrajectoryBuffer.diff`."""
    keys = ["stage", "fingerprint"]
    before, after = (buffer.scan(v).select("trajectory_id", *keys).collect() for v in (old, new))
    added = after.join(before, on="trajectory_id", how="anti").group_by(keys).agg(pl.len().alias("added"))
    removed = before.join(after, on="trajectory_id", how="anti").group_by(keys).agg(pl.len().alias("removed"))
    both = added.join(removed, on=keys, how="full", coalesce=True)
    return both.with_columns(pl.col("added", "removed").fill_null(0).cast(pl.Int64)).sort(keys)
