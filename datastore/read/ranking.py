"""The order of trajectories of a task, from best to worst."""

import polars as pl

RANK = (
    *(pl.col("reward").is_null(), pl.col("reward").neg()),
    *(pl.col("n_steps"), pl.col("n_tokens"), pl.col("trajectory_id")),
)
"""Best first: highest reward, then fewest steps, then fewest tokens; unscored rows last."""
