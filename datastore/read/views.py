"""The buffer as tables for SQL: ``trajectories``, ``steps`` and ``tool_calls``."""

import polars as pl

KEYS = ("trajectory_id", "task_id", "env", "split", "stage", "policy_version", "success", "reward")

_STEP = ((pl.col("role") == "assistant").cast(pl.Int32).cum_sum().over("trajectory_id") - 1).alias("step")
"""Number of the step that a message belongs to; -1 before the first assistant message."""


def _messages(trajectories: pl.LazyFrame) -> pl.LazyFrame:
    """One row per message: the keys, ``message`` (its number from 0) and the message's fields."""
    renamed = trajectories.select(*(pl.col(name) for name in KEYS if name != "reward"), "messages")
    return (
        renamed.with_columns(pl.int_ranges(pl.col("messages").list.len()).alias("message"))
        .explode("messages", "message", empty_as_null=False)
        .unnest("messages")
    )


def steps(trajectories: pl.LazyFrame) -> pl.LazyFrame:
    """One row per assistant message: ``step`` from 0, its text, and the observations that answer it, joined by lines.

    ``reward`` is the step's own, if the environment gives one. ``n_tokens`` is the length of what was sampled.
    """
    numbered = _messages(trajectories).with_columns(_STEP).filter(pl.col("step") >= 0)
    assistant, tool = pl.col("role") == "assistant", pl.col("role") == "tool"
    return (
        numbered.group_by(*(name for name in KEYS if name != "reward"), "step")
        .agg(
            pl.col("content").filter(assistant).first(),
            pl.col("reasoning").filter(assistant).first(),
            pl.col("tool_calls").filter(assistant).list.len().sum().cast(pl.Int32).alias("n_tool_calls"),
            pl.col("tool_calls").filter(assistant).first(),
            pl.col("content").filter(tool).str.join("\n").alias("observation"),
            pl.col("reward").filter(assistant).first(),
            (pl.col("token_end") - pl.col("token_start")).filter(assistant).first().alias("n_tokens"),
        )
        .sort("trajectory_id", "step")
    )


def tool_calls(trajectories: pl.LazyFrame) -> pl.LazyFrame:
    """One row per tool call: ``step``, ``call`` (its number in the step), ``name``, ``arguments`` (JSON) and the
    observation that answers it by id; null if none does."""
    messages = _messages(trajectories).with_columns(_STEP)
    calls = (
        messages.filter(pl.col("role") == "assistant")
        .select(*(name for name in KEYS if name != "reward"), "step", "tool_calls")
        .with_columns(pl.int_ranges(pl.col("tool_calls").list.len()).alias("call"))
        .explode("tool_calls", "call", empty_as_null=False)
        .unnest("tool_calls")
        .rename({"id": "call_id"})
    )
    answers = messages.filter(pl.col("role") == "tool", pl.col("tool_call_id").is_not_null()).select(
        "trajectory_id", "step", pl.col("tool_call_id").alias("call_id"), pl.col("content").alias("observation")
    )
    unique = answers.unique(["trajectory_id", "step", "call_id"], keep="first")
    joined = calls.join(unique, on=["trajectory_id", "step", "call_id"], how="left")
    return joined.sort("trajectory_id", "step", "call")


def views(trajectories: pl.LazyFrame) -> dict[str, pl.LazyFrame]:
    """The three views by name, each read only when a query names it."""
    return {"trajectories": trajectories, "steps": steps(trajectories), "tool_calls": tool_calls(trajectories)}
