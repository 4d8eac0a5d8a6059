"""The buffer as tables for SQL: ``trajectories``, ``steps``, ``tool_calls`` and ``annotations``."""

import re
from collections.abc import Callable

import polars as pl

from agentrl.datastore.annotations.current import current
from agentrl.datastore.annotations.table import STORED
from agentrl.datastore.errors import StoreError

KEYS = ("trajectory_id", "task_id", "env", "split", "stage", "policy_version", "success", "reward")

_STEP = ((pl.col("role") == "assistant").cast(pl.Int32).cum_sum().over("trajectory_id") - 1).alias("step")
"""Number of the step that a message belongs to; -1 before the first assistant message."""


_SAYS_ERROR = r'(?i)^\s*(error|traceback|exception|\{"error|failed)'
"""How the answers of most tools begin that report a failure."""

_ARGUMENT = re.compile(r"""\bargs\s*(?:\.\s*(?:"((?:[^"]|"")+)"|`([^`]+)`|(\w+))|->>?\s*'((?:[^']|'')+)')""")


def _messages(trajectories: pl.LazyFrame, *more: str) -> pl.LazyFrame:
    """One row per message: the keys, ``more`` columns, ``message`` (its number from 0), its ``seconds``, and its own
    fields."""
    count = pl.col("messages").list.len()
    unknown = pl.lit(None, pl.Float32).repeat_by(count)
    renamed = trajectories.select(
        *(pl.col(name) for name in KEYS if name != "reward"),
        *more,
        "messages",
        pl.int_ranges(count).alias("message"),
        pl.col("message_seconds").fill_null(unknown).alias("seconds"),
    )
    return renamed.explode("messages", "message", "seconds", empty_as_null=False).unnest("messages")


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
            pl.col("seconds").filter(assistant).first(),
        )
        .sort("trajectory_id", "step")
    )


def tool_calls(trajectories: pl.LazyFrame, keys: list[str] | None = None) -> pl.LazyFrame:
    """One row per tool call: ``step``, ``call`` (its number in the step), ``name``, ``arguments`` (JSON), the
    ``observation`` that answers it by id (null if none does), its length, and whether it is an ``error``. Of calls of
    one step with the same id, the first is answered by the first answer with that id, and so on.

    ``error`` is that of the message. In a row that knows it of some answers, the others are no errors if
    ``n_tool_errors`` counts no more than these. In a row that knows it of none, as older ones do, it is told by
    words if ``n_tool_errors`` is the number of its answers, or of those that begin as errors do. It is null
    otherwise. ``keys`` of arguments, or JSON paths that begin with ``$.`` or ``$[``, are the fields of a column
    ``args``, as text."""
    messages = _messages(trajectories, "n_tool_errors").with_columns(_STEP)
    nth = pl.int_range(pl.len()).over("trajectory_id", "step", "call_id").alias("nth")
    calls = (
        messages.filter(pl.col("role") == "assistant")
        .select(*(name for name in KEYS if name != "reward"), "step", "tool_calls")
        .with_columns(pl.int_ranges(pl.col("tool_calls").list.len()).alias("call"))
        .explode("tool_calls", "call", empty_as_null=False)
        .unnest("tool_calls")
        .rename({"id": "call_id"})
        .with_columns(nth)
    )
    says = pl.col("content").str.contains(_SAYS_ERROR)
    errors, of_row = pl.col("n_tool_errors"), "trajectory_id"
    answers = (
        messages.filter(pl.col("role") == "tool")
        .with_columns(
            pl.when(pl.col("error").is_not_null())
            .then(pl.col("error"))
            .when(pl.col("error").is_not_null().any().over(of_row))
            .then(pl.when(errors == pl.col("error").sum().over(of_row)).then(False))
            .when(errors == pl.len().over(of_row))
            .then(True)
            .when(errors == says.sum().over(of_row))
            .then(says)
            .alias("error")
        )
        .filter(pl.col("tool_call_id").is_not_null())
        .select(
            "trajectory_id",
            "step",
            pl.col("tool_call_id").alias("call_id"),
            pl.col("content").alias("observation"),
            pl.col("content").str.len_chars().cast(pl.Int64).alias("observation_length"),
            "seconds",
            "error",
        )
        .with_columns(nth)
    )
    joined = calls.join(answers, on=["trajectory_id", "step", "call_id", "nth"], how="left").drop("nth")
    ordered = joined.sort("trajectory_id", "step", "call")
    return ordered.with_columns(pl.struct(map(_argument, keys)).alias("args")) if keys else ordered


def _argument(key: str) -> pl.Expr:
    quote = "'" if '"' in key else '"'
    path = key if key.startswith(("$.", "$[")) else f"$[{quote}{key}{quote}]"
    return pl.col("arguments").str.json_path_match(path).alias(key)


def keys_of(query: str) -> list[str]:
    """The keys of arguments that a query names, as in ``args.who``, ``args."a key"`` and ``args ->> 'who'``. Raises
    StoreError if Polars' JSON paths cannot name one: it has a backslash, or both kinds of quotes."""
    keys = [
        quoted.replace('""', '"') or ticked or plain or text.replace("''", "'")
        for quoted, ticked, plain, text in _ARGUMENT.findall(query)
    ]
    if wrong := [key for key in keys if "\\" in key or {"'", '"'} <= set(key)]:
        raise StoreError(
            f"args: the key {wrong[0]!r} has a backslash or both kinds of quotes, and no path reaches it; "
            "select arguments, and read their JSON"
        )
    return list(dict.fromkeys(keys))


def names_annotations(query: str) -> bool:
    """Whether a query may read the view ``annotations``."""
    return re.search(r"\bannotations\b", query, re.IGNORECASE) is not None


def _no_annotations() -> pl.DataFrame:
    return pl.DataFrame(STORED.empty_table())


def views(
    trajectories: pl.LazyFrame, query: str = "", annotations: Callable[[], pl.DataFrame] = _no_annotations
) -> dict[str, pl.LazyFrame]:
    """The views by name, each read only when a query names it. The view ``tool_calls`` has the column ``args`` if
    ``query`` names keys of it; ``annotations`` are those of what ``annotations`` gives that count."""
    calls = tool_calls(trajectories, keys_of(query))
    given = annotations() if names_annotations(query) else _no_annotations()
    return {
        "trajectories": trajectories,
        "steps": steps(trajectories),
        "tool_calls": calls,
        "annotations": current(given).lazy(),
    }
