"""Options of an import that apply to all its rows: environment, split, policy, and what counts as reward and
success."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datastore.errors import StoreError
from datastore.formats.rows import batched, number
from schemas.trajectory import Trajectory

CHECKED_ROWS = 512


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


def labelled(rows: Iterable[tuple[Trajectory, Any]], labels: Labels) -> Iterator[Trajectory]:
    """Rows, each given with the record that it came from, with the reward and the success that the labels ask for."""
    if labels.reward is not None:
        rows = ((_rewarded(row, record, labels.reward), record) for row, record in rows)
    plain = (row for row, _ in rows)
    return plain if labels.success is None else _judged(plain, labels.success)


def _rewarded(row: Trajectory, record: Any, name: str) -> Trajectory:
    """The row with a component, or a field of the record by its dotted path, as its reward."""
    value = next((part.value for part in row.reward_components if part.name == name), None)
    if value is None:
        for key in name.split("."):
            record = record.get(key) if isinstance(record, dict) else None
        value = number(record)
    return row.model_copy(update={"reward": value})


def _judged(rows: Iterable[Trajectory], expression: str) -> Iterator[Trajectory]:
    """Rows whose success is what a SQL expression over their scalars and components says."""
    import polars as pl

    try:
        judge = pl.sql_expr(expression)
    except pl.exceptions.PolarsError as error:
        raise StoreError(f"--success {expression!r} is no SQL expression: {error}") from None
    scalars: tuple[str, ...] = (
        "reward",
        "env",
        "split",
        "policy",
        "agent",
        "termination",
        "n_steps",
        "n_tokens",
        "n_tool_calls",
    )
    scalars += ("n_tool_errors", "level", "sample_index")
    wanted = judge.meta.root_names()
    for part in batched(rows, CHECKED_ROWS):
        parts = [{one.name: one.value for one in row.reward_components} for row in part]
        names = [*scalars, *(name for name in wanted if name not in scalars and any(name in one for one in parts))]
        frame = pl.DataFrame(
            {
                name: [getattr(row, name) for row in part] if name in scalars else [one.get(name) for one in parts]
                for name in names
            },
            strict=False,
        )
        try:
            verdicts = frame.select(judge.cast(pl.Boolean).alias("success"))["success"].to_list()
        except pl.exceptions.PolarsError as error:
            reason = str(error).splitlines()[0]
            raise StoreError(f"--success {expression!r}: {reason}; names are {', '.join(frame.columns)}") from None
        if len(verdicts) == 1:
            verdicts *= len(part)
        for row, verdict in zip(part, verdicts, strict=True):
            yield row.model_copy(update={"success": verdict})
