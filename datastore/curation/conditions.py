"""SQL conditions and columns that rules and selections name, checked on no rows when a file is read: what is wrong with
them is found before anything runs."""

import polars as pl

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import sql
from agentrl.datastore.read.scalars import SCHEMA
from agentrl.datastore.read.views import views
from agentrl.datastore.search.words import parsed
from agentrl.datastore.table.writer import SCALARS
from agentrl.schemas.hints import did_you_mean


def tasks_of(rows: pl.LazyFrame) -> pl.LazyFrame:
    """What a ``group`` condition sees: one row per task, over its trajectories."""
    return rows.group_by("task_id").agg(
        pl.len().alias("n"),
        pl.col("success").mean().alias("pass_rate"),
        pl.col("reward").mean().alias("mean_reward"),
        pl.col("reward").max().alias("best_reward"),
        pl.col("reward").min().alias("worst_reward"),
        pl.col("reward").std(ddof=0).alias("reward_std"),
        pl.col("n_steps").mean().alias("mean_steps"),
        pl.col("env").first(),
        pl.col("level").first(),
    )


def check_rows(where: str) -> str:
    """``where``, a condition on the scalar columns. Raises StoreError if no row could be judged by it."""
    sql.collect({"rows": _no_rows()}, f"select * from rows where ({where})", find=_no_ids)
    return where


def check_tasks(where: str) -> str:
    """``where``, a condition on what :func:`tasks_of` gives. Raises StoreError if no task could be judged by it."""
    sql.collect({"rows": tasks_of(_no_rows())}, f"select * from rows where ({where})")
    return where


def check_trajectories(where: str) -> str:
    """``where``, a condition of a query over the buffer's views. Raises StoreError if it cannot be answered."""
    query = f"select trajectory_id from trajectories where ({where})"
    sql.collect(views(pl.LazyFrame(schema=SCHEMA)), query, find=_no_ids)
    return where


def check_column(name: str) -> str:
    """``name`` of a scalar column. Raises StoreError if a trajectory has none of this name."""
    if name not in SCALARS:
        hint = did_you_mean(name, SCALARS) or f"; columns are {', '.join(SCALARS)}"
        raise StoreError(f"a trajectory has no scalar column {name!r}{hint}")
    return name


def _no_ids(text: str) -> pl.Series:
    """That nothing is found. Raises StoreError if the text is no question."""
    parsed(text)
    return pl.Series([], dtype=pl.String)


def _no_rows() -> pl.LazyFrame:
    return pl.LazyFrame(schema={name: SCHEMA[name] for name in SCALARS})
