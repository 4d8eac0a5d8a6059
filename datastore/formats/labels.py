"""Options of an import that apply to all its rows: environment, split, policy, and what counts as reward and
success."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.columns import with_column
from agentrl.datastore.formats.rows import number

SCALARS = (
    *("reward", "env", "split", "policy", "agent", "termination", "n_steps", "n_tokens", "n_tool_calls"),
    *("n_tool_errors", "level", "sample_index"),
    *("model", "prompt_tokens", "completion_tokens", "cost_usd", "source_id", "source_time"),
)
"""Columns that an expression for the success may name, beside the reward components."""


@dataclass(frozen=True)
class Labels:
    """Values for all rows of an import, which replace those of the source. None keeps the value of the source.

    ``reward`` names a component, or a field of the source's record by its dotted path; a row without it is unscored.
    ``success`` is a SQL expression over ``reward``, the other scalar columns and the components by name; if it is
    null, the row is unscored. ``tokenizer`` is the fingerprint of the tokenizer that made the ids.
    """

    env: str | None = None
    split: str | None = None
    policy: str | None = None
    task_prefix: str | None = None
    reward: str | None = None
    success: str | None = None
    tokenizer: str | None = None


AS_SOURCE = Labels()
"""Everything as the source says it."""


def named_reward(name: str | None, record: Any) -> float | None:
    """A number of the source's record by its dotted path; None if it has none."""
    for key in name.split(".") if name else ():
        record = record.get(key) if isinstance(record, dict) else None
    return number(record) if name else None


def labelled(rows: pa.Table, rewards: Sequence[float | None], labels: Labels) -> pa.Table:
    """Rows with the reward and the success that the labels ask for. ``rewards`` are those that :func:`named_reward`
    gives of the rows' records."""
    if labels.reward is not None:
        name = labels.reward
        found = (parts.get(name) for parts in _components(rows))
        rows = with_column(
            rows, "reward", [other if one is None else one for one, other in zip(found, rewards, strict=True)]
        )
    return rows if labels.success is None else _judged(rows, labels.success)


def _components(rows: pa.Table) -> list[dict[str, float]]:
    return [{one["name"]: one["value"] for one in parts} for parts in rows["reward_components"].to_pylist()]


def _judged(rows: pa.Table, expression: str) -> pa.Table:
    """Rows whose success is what a SQL expression over their scalars and components says."""
    try:
        judge = pl.sql_expr(expression)
    except pl.exceptions.PolarsError as error:
        raise StoreError(f"--success {expression!r} is no SQL expression: {error}") from None
    frame = pl.DataFrame(pl.from_arrow(rows.select(SCALARS)))
    parts = _components(rows)
    more = [name for name in judge.meta.root_names() if name not in SCALARS and any(name in one for one in parts)]
    frame = frame.with_columns(pl.Series(name, [one.get(name) for one in parts], pl.Float64) for name in more)
    try:
        verdicts = frame.select(judge.cast(pl.Boolean).alias("success"))["success"].to_list()
    except pl.exceptions.PolarsError as error:
        reason = str(error).splitlines()[0]
        raise StoreError(f"--success {expression!r}: {reason}; names are {', '.join(frame.columns)}") from None
    return with_column(rows, "success", verdicts * len(parts) if len(verdicts) == 1 else verdicts)
