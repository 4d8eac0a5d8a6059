"""The buffer's rows under the scores of one scorer."""

import polars as pl
import pyarrow as pa


def rescored(rows: pl.LazyFrame, scores: pa.Table | None) -> pl.LazyFrame:
    """Rows with the ``reward``, ``success`` and ``reward_components`` that ``scores`` (of one scorer, see
    :mod:`agentrl.schemas.score`) give them, in place of their own. A row without a score is unscored."""
    if scores is None:
        return rows
    names = rows.collect_schema().names()
    given = {"reward": "reward", "success": "success", "reward_components": "components"}
    new_scores = pl.DataFrame(scores.select(["trajectory_id", *given.values()])).rename(
        {"components": "reward_components"}
    )
    kept = rows.drop([name for name in given if name in names])
    return kept.join(new_scores.lazy(), on="trajectory_id", how="left").select(names)
