"""Options of an import that apply to all its rows: environment, split, policy, and what counts as reward and
success."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats.columns import with_column
from agentrl.datastore.formats.joined import SideFile
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.rows import number
from agentrl.datastore.formats.source import Source
from agentrl.schemas.hints import did_you_mean

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
    ``success`` is a SQL expression over ``reward``, the other scalar columns and the components by name; if it is null,
    the row is unscored. It may also name fields of the record by their dotted path. ``tokenizer`` is the fingerprint of
    the tokenizer that made the ids.
    """

    env: str | None = None
    split: str | None = None
    policy: str | None = None
    task_prefix: str | None = None
    reward: str | None = None
    success: str | None = None
    tokenizer: str | None = None
    join: str | None = None
    """Path of a file with rewards, verdicts, splits or tags, see ``joined``."""
    on: str | None = None
    """The key that its records and those of the import share: ``KEY``, or ``OURS=THEIRS``."""

    def ingredients(self) -> dict[str, str]:
        """What the rows of a file depend on beside its content."""
        settings = {name: value for name, value in asdict(self).items() if name not in ("join", "on")}
        if self.join is None:
            return settings
        return settings | {"join": Source(Path(self.join)).digest(), "on": self.on}


AS_SOURCE = Labels()
"""Everything as the source says it."""


def _at(record: Any, path: str) -> Any:
    """What a record has under a dotted path; None if it has nothing there."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record


@dataclass(frozen=True)
class Fields:
    """What of a record is kept until its row is labelled: the ``wanted`` fields, and the ``key`` of the join."""

    wanted: tuple[str, ...] = ()
    key: str | None = None

    def __call__(self, record: Any) -> dict[str, Any] | None:
        values = {name: value for name in self.wanted if isinstance(value := _at(record, name), int | float | str)}
        values = {name: value[:LONGEST] if isinstance(value, str) else value for name, value in values.items()}
        if self.key is not None and isinstance(key := _at(record, self.key), int | float | str):
            values[_KEY] = key
        return values or None


class Labelling:
    """Sets the columns of an import's rows that its labels and the file beside it name."""

    def __init__(self, labels: Labels, notes: Notes, beside: SideFile | None = None) -> None:
        self.labels, self.notes, self.beside = labels, notes, beside
        self.judge, self.names = None, list[str]()
        if labels.success is not None:
            try:
                self.judge = pl.sql_expr(labels.success)
            except pl.exceptions.PolarsError as error:
                raise StoreError(f"--success {labels.success!r} is no SQL expression: {error}") from None
            self.names = [name for name in dict.fromkeys(self.judge.meta.root_names()) if name not in SCALARS]
        self._unseen, self._components = set(self.names), dict[str, None]()
        self._reward_seen = labels.reward is None

    @property
    def fields(self) -> Fields:
        """What is to be kept of records."""
        wanted = [*([self.labels.reward] if self.labels.reward else []), *self.names]
        return Fields(tuple(wanted), self.beside.ours if self.beside else None)

    def apply(self, rows: pa.Table, kept: Sequence[dict[str, Any] | None]) -> pa.Table:
        """Rows with the columns that are asked for. ``kept`` is what :attr:`fields` gave of their records."""
        held = [values or {} for values in kept]
        if self.beside:
            rows = self.beside.add(rows, [values.get(_KEY) for values in held])
        if self.labels.reward is not None:
            rows = with_column(rows, "reward", [*map(self._reward, _components(rows), held)])
        return rows if self.judge is None else self._judged(rows, self.judge, held)

    def _reward(self, parts: dict[str, float], held: dict[str, Any]) -> float | None:
        name = self.labels.reward
        assert name is not None
        known = parts.get(name, number(held.get(name)))
        if known is None and held.get(name) is not None:
            self.notes.remark(f"{name} is no finite number: unscored")
        self._components |= dict.fromkeys(parts)
        self._reward_seen = self._reward_seen or known is not None
        return known

    def _judged(self, rows: pa.Table, judge: pl.Expr, held: Sequence[dict[str, Any]]) -> pa.Table:
        """Rows whose success is what a SQL expression over their scalars, their components and fields of their records
        says; null if one of them is."""
        frame, parts = pl.DataFrame(pl.from_arrow(rows.select(SCALARS))), _components(rows)
        for components in parts:
            self._components |= dict.fromkeys(components)
        for name in self.names:
            values = [part.get(name, values_of_row.get(name)) for part, values_of_row in zip(parts, held, strict=True)]
            if any(value is not None for value in values):
                self._unseen.discard(name)
            frame = frame.with_columns(self._column(name, values))
        verdicts = self._verdicts(frame, judge)
        return with_column(rows, "success", verdicts * len(parts) if len(verdicts) == 1 else verdicts)

    def _verdicts(self, frame: pl.DataFrame, judge: pl.Expr) -> list[bool | None]:
        """What the expression says, in which true is 1 if it does not take truth values as they are."""
        try:
            return frame.select(judge.cast(pl.Boolean).alias("success"))["success"].to_list()
        except pl.exceptions.PolarsError as error:
            truths = [name for name in self.names if frame.schema[name] == pl.Boolean]
            if truths:
                return self._verdicts(frame.with_columns(pl.col(truths).cast(pl.Float64)), judge)
            reason = str(error).splitlines()[0]
            raise StoreError(f"--success {self.labels.success!r}: {reason}") from None

    def _column(self, name: str, values: list[Any]) -> pl.Series:
        """Values of the kind that most of them have: truth values, finite numbers or texts. Others are counted, and
        null; true is 1 among numbers."""
        kinds: Counter[type] = Counter(type(value) for value in values if isinstance(value, bool | str))
        kinds[float] = sum(not isinstance(value, bool) and number(value) is not None for value in values)
        kind: type = max((bool, float, str), key=lambda kind_of_value: kinds[kind_of_value])
        taken = [(number(value) if kind is float else value if isinstance(value, kind) else None) for value in values]
        if odd := sum(value is not None and known is None for value, known in zip(values, taken, strict=True)):
            self.notes.remark(f"{name} is no {_SPOKEN[kind]}: success unknown", odd)
        return pl.Series(name, taken, _COLUMN[kind])

    def finish(self) -> None:
        """Raises StoreError if a name of the labels stands for nothing in any row, or no key of the join has a row."""
        missing = sorted(self._unseen)
        option = f"--success {self.labels.success!r}"
        if not self._reward_seen:
            missing, option = [str(self.labels.reward)], f"--reward {self.labels.reward}"
        if missing:
            there = ", ".join([*SCALARS, *self._components])
            hint = did_you_mean(missing[0], [*SCALARS, *self._components]) or ""
            raise StoreError(
                f"{option} names {', '.join(missing)}, which no record has, and which is no column and no reward "
                f"component{hint}; names are {there}, and fields of the records by their dotted paths"
            )
        if self.beside:
            self.beside.finish()


LONGEST = 1000
"""Characters that are kept of a text that ``--success`` names."""
_KEY = "\0key"
_SPOKEN: dict[type, str] = {float: "finite number", bool: "truth value", str: "text"}
_COLUMN: dict[type, Any] = {float: pl.Float64, bool: pl.Boolean, str: pl.String}


def _components(rows: pa.Table) -> list[dict[str, float]]:
    return [
        {component["name"]: component["value"] for component in parts}
        for parts in rows["reward_components"].to_pylist()
    ]
