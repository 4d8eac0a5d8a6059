"""Facets of the buffer: how its rows spread over twelve columns, all of them and those in the filter."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import polars as pl

from agentrl.flows.viewer.query.filters import quoted
from agentrl.flows.viewer.query.tables import Snapshot, both
from agentrl.flows.viewer.wire import Answer

FACETS = (
    *("stage", "env", "split", "level", "policy", "policy_version"),
    *("success", "reward", "termination", "n_steps", "n_tokens", "n_tool_errors"),
)
BINS = 20
CATEGORIES = 20
UNKNOWN = "unknown"

BarOf = tuple[str, float | None, float | None, str]
"""Label, lower and upper bound, and the filter that chooses this bar."""


class Bin(Answer):
    """One bar: ``all`` rows and those ``filtered``. ``low`` <= value < ``high`` for numbers (the last bin includes
    ``high``); None otherwise. ``where`` is the SQL expression that chooses this bar alone, quoted for the filter."""

    label: str
    low: float | None
    high: float | None
    all: int
    filtered: int
    where: str


class Facet(Answer):
    """``more`` counts the values that have no bar of their own (categories beyond the 20 most frequent)."""

    column: str
    kind: Literal["number", "category", "bool"]
    bins: list[Bin]
    more: int


class Facets(Answer):
    version: int
    total: int
    filtered: int
    facets: list[Facet]


@dataclass(frozen=True)
class Spread:
    """The rows of one column by bin. ``codes`` [rows] are the numbers of their bins; the last stands for values without
    a bar, which are ``more`` different ones."""

    column: str
    kind: Literal["number", "category", "bool"]
    codes: np.ndarray
    bins: tuple[BarOf, ...]
    all: np.ndarray
    more: int = 0

    def facet(self, mask: np.ndarray | None) -> Facet:
        chosen = self.all if mask is None else np.bincount(self.codes[mask], minlength=len(self.all))
        bins = [
            Bin(label=label, low=low, high=high, where=where, all=int(every), filtered=int(some))
            for (label, low, high, where), every, some in zip(self.bins, self.all, chosen, strict=False)
        ]
        return Facet(column=self.column, kind=self.kind, bins=bins, more=self.more)


def facets(snapshot: Snapshot, text: str, among: np.ndarray | None = None) -> Facets:
    """How all rows spread, and those in the filter that are ``among`` those of a mask."""
    mask = both(snapshot.matching(text), among)
    spread_list = snapshot.kept.get_or("facets", lambda: spreads(snapshot))
    assert isinstance(spread_list, list)
    total = len(spread_list[0].codes)
    return Facets(
        version=snapshot.version,
        total=total,
        filtered=total if mask is None else int(mask.sum()),
        facets=[spread.facet(mask) for spread in spread_list],
    )


def spreads(snapshot: Snapshot) -> list[Spread]:
    rows = snapshot.columns(FACETS)
    return [spread(rows[name]) for name in FACETS]


def spread(column: pl.Series) -> Spread:
    """The bins of a column over all of its rows."""
    if column.dtype == pl.Boolean:
        return _of_bools(column)
    return _of_numbers(column) if column.dtype.is_numeric() else _of_texts(column)


def _made(
    column: pl.Series,
    kind: Literal["number", "category", "bool"],
    codes: np.ndarray,
    bins: list[BarOf],
    more: int = 0,
) -> Spread:
    """A bar for rows without a value follows the others, if there are such rows."""
    if column.null_count():
        codes = np.where(column.is_null().to_numpy(), len(bins), np.where(codes >= len(bins), len(bins) + 1, codes))
        bins = [*bins, (UNKNOWN, None, None, f"{column.name} is null")]
    codes = codes.astype(np.min_scalar_type(len(bins) + 1))  # these are kept, and many
    return Spread(column.name, kind, codes, tuple(bins), np.bincount(codes, minlength=len(bins) + 1), more)


def _of_bools(column: pl.Series) -> Spread:
    codes = np.where(column.fill_null(False).to_numpy(), 0, 1)
    bins = [("true", None, None, column.name), ("false", None, None, f"not {column.name}")]
    return _made(column, "bool", codes, list(bins))


def _of_texts(column: pl.Series) -> Spread:
    """The most frequent values, and of equals the first by name."""
    counts = column.drop_nulls().value_counts(name="rows").sort("rows", column.name, descending=[True, False])
    shown = counts[column.name].head(CATEGORIES).to_list()
    numbers = pl.DataFrame({column.name: shown, "code": range(len(shown))}, {column.name: pl.String, "code": pl.Int32})
    codes = column.to_frame().join(numbers, on=column.name, how="left", maintain_order="left")["code"]
    bins = [(value or "(empty)", None, None, f"{column.name} = {quoted(value)}") for value in shown]
    more = max(0, len(counts) - len(shown))
    return _made(column, "category", codes.fill_null(len(shown)).to_numpy(), list(bins), more)


def _of_numbers(column: pl.Series) -> Spread:
    """A bin for each value of few whole numbers; else bins of one width, whose edges are round numbers."""
    values = column.cast(pl.Float64).fill_null(0.0).to_numpy()
    least, most = column.min(), column.max()
    if least is None or most is None:
        return _made(column, "number", np.zeros(len(column), np.int32), [])
    low, high = float(least), float(most)  # type: ignore[arg-type]
    whole = column.dtype.is_integer()
    width = 1.0 if whole and high - low < BINS else _round_up((high - low) / BINS or 1.0, whole)
    first = math.floor(low / width)
    count = max(1, math.floor(high / width) - first + 1)
    if not whole and count > 1 and (first + count - 1) * width >= high:
        count -= 1  # the greatest value closes the last bin instead of opening one of its own
    edges = [float(f"{(first + number) * width:.10g}") for number in range(count + 1)]  # as the filter has them
    codes = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, count - 1)
    bins: list[BarOf] = []
    for number, (start, end) in enumerate(pairwise(edges)):
        closes = "<=" if number == count - 1 and not whole else "<"
        label = f"{start:g}" if whole and width == 1 else f"{start:g} to {end - 1 if whole else end:g}"
        where = f"{column.name} >= {start:.10g} and {column.name} {closes} {end:.10g}"
        where = f"{column.name} = {start:.10g}" if whole and width == 1 else where
        bins.append((label, start, end, where))
    return _made(column, "number", codes, bins)


def _round_up(width: float, whole: bool) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not less, and whole if asked for."""
    power = 10.0 ** math.floor(math.log10(width))
    steps = [step * power for step in (1, 2, 2.5, 5, 10)]
    return next(step for step in steps if step >= width * (1 - 1e-9) and not (whole and step % 1))
