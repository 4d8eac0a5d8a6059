"""Drawing training rows. Every sampler takes a frame of rows, is seeded, and gives ids with weights. Those that
need an outcome refuse unscored rows.

Each docstring says what the sampler does to the training distribution: what a loss averaged over its rows estimates.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from agentrl.datastore.errors import StoreError


@dataclass(frozen=True)
class Sample:
    """Ids in the order drawn, and a weight each."""

    ids: list[str]
    weights: list[float]


class _Sorted:
    """Rows in the order of their ids: a draw depends on the rows, not on the order they came in. Only the columns that
    are asked for are brought in order, since there may be millions of rows."""

    def __init__(self, rows: pl.DataFrame, n: int) -> None:
        if not 1 <= n <= rows.height:
            raise StoreError(f"n {n} is not between 1 and {rows.height}, the number of rows to draw from")
        self.height = rows.height
        self._rows = rows
        self._order = rows["trajectory_id"].arg_sort()

    def __getitem__(self, name: str) -> pl.Series:
        return self._rows[name].gather(self._order)

    def sample(self, places: np.ndarray, weights: np.ndarray | None = None) -> Sample:
        """The rows at these places in order."""
        ids = self._rows["trajectory_id"].gather(self._order.gather(places)).to_list()
        return Sample(ids, [1.0] * len(ids) if weights is None else weights.astype(float).tolist())


def _scored(rows: pl.DataFrame, column: str) -> None:
    if unscored := rows[column].null_count():
        raise StoreError(
            f"{unscored} of {rows.height} rows have no {column}: unscored is not failed; leave them out with "
            f"--where '{column} is not null', or draw by a strategy that needs no outcome, such as uniform"
        )


def uniform(rows: pl.DataFrame, n: int, seed: int = 0) -> Sample:
    """Without replacement, every row with the same chance. The distribution stays as it is in the buffer: tasks count
    as often as they were attempted."""
    chosen = _Sorted(rows, n)
    return chosen.sample(np.random.default_rng(seed).permutation(chosen.height)[:n])


def success_first(rows: pl.DataFrame, n: int, seed: int = 0) -> Sample:
    """Successes in random order, then failures. While successes last, the loss sees the policy conditioned on success
    (rejection sampling): easy tasks are over-represented by their pass rate."""
    chosen = _Sorted(rows, n)
    _scored(rows, "success")
    noise = np.random.default_rng(seed).random(chosen.height)
    return chosen.sample(np.lexsort([noise, ~chosen["success"].to_numpy()])[:n])


def prioritized(
    rows: pl.DataFrame,
    n: int,
    seed: int = 0,
    *,
    priority: str = "reward",
    alpha: float = 0.6,
    beta: float = 0.4,
    of: str = "rows",
) -> Sample:
    """With replacement, P(i) = p_i^alpha / sum p^alpha (Schaul et al. 2015, proportional variant) with
    p = |priority| + 1e-6. ``priority`` is a column, or :data:`SURPRISE`. ``of`` "groups" draws whole groups, of which p
    is the mean over their rows.

    The weights (N P(i))^-beta, divided by the largest of those drawn, undo the bias: completely if beta is 1, since the
    weighted mean then estimates the uniform one, and in part if beta is smaller.
    """
    if priority == SURPRISE:
        _scored(rows, "reward")
        rows = rows.with_columns(_surprise().alias(SURPRISE))
    if priority not in rows.columns:
        raise StoreError(f"there is no column {priority!r} to prioritise by; columns are {', '.join(rows.columns)}")
    _scored(rows, priority)
    if of == "groups":
        return _of_groups(rows, n, seed, priority, alpha, beta)
    chosen = _Sorted(rows, n)
    return chosen.sample(*_by_priority(chosen[priority], n, seed, alpha, beta))


def _by_priority(priorities: pl.Series, n: int, seed: int, alpha: float, beta: float) -> tuple[np.ndarray, np.ndarray]:
    """The places that are drawn, and their weights; each [n]."""
    values = (np.abs(priorities.cast(pl.Float64).to_numpy()) + 1e-6) ** alpha
    if not np.isfinite(values).all():
        raise StoreError(f"column {priorities.name!r} holds values that are not finite; filter them out first")
    probability = values / values.sum()
    drawn = np.random.default_rng(seed).choice(len(values), size=n, p=probability)
    weights = (len(values) * probability) ** -beta
    return drawn, weights[drawn] / weights[drawn].max()


def _of_groups(rows: pl.DataFrame, n: int, seed: int, priority: str, alpha: float, beta: float) -> Sample:
    """``n`` groups, each with all of its rows."""
    named = rows.sort("trajectory_id").group_by(GROUP.alias("group"), maintain_order=True)
    groups = named.agg("trajectory_id", pl.col(priority).cast(pl.Float64).abs().mean())
    if not 1 <= n <= groups.height:
        raise StoreError(f"n {n} is not between 1 and {groups.height}, the number of groups to draw from")
    places, weights = _by_priority(groups[priority], n, seed, alpha, beta)
    drawn = pl.DataFrame({"id": groups["trajectory_id"].gather(places), "weight": weights}).explode("id")
    return Sample(drawn["id"].to_list(), drawn["weight"].to_list())


GROUP = pl.coalesce("group_id", "task_id")
"""Rows that name no group are of that of their task."""

SURPRISE = "surprise"
"""Priority by how far a reward is from the mean of its group: what the advantage of a group is before it is scaled. The
name stands for it among the columns."""


def _surprise() -> pl.Expr:
    return (pl.col("reward") - pl.col("reward").mean().over(GROUP)).abs()


def recency(rows: pl.DataFrame, n: int, seed: int = 0, *, half_life: float = 1.0) -> Sample:
    """Without replacement; a row's chance halves with every ``half_life`` policy versions of age. Moves the
    distribution towards the newest policy, so importance ratios stay near 1; tasks that only old policies tried become
    rare."""
    chosen = _Sorted(rows, n)
    age = rows["policy_version"].max() - chosen["policy_version"].to_numpy().astype(float)
    # Efraimidis and Spirakis (2006): the n largest of log(u) / w are a weighted draw without replacement
    keys = np.log(np.random.default_rng(seed).random(rows.height)) * 2.0 ** np.minimum(age / half_life, 1000.0)
    return chosen.sample(np.argsort(-keys, kind="stable")[:n])


def diversity(rows: pl.DataFrame, n: int, seed: int = 0, *, by: str = "task_id") -> Sample:
    """Values of a column in turn, each in random order. Flattens the distribution over that column: tasks with few rows
    weigh as much as tasks with many."""
    chosen = _Sorted(rows, n)
    noise = np.random.default_rng(seed).random(chosen.height)
    values: np.ndarray = chosen[by].cast(pl.String).cast(pl.Categorical).to_physical().to_numpy().astype(np.int64)
    grouped = np.lexsort((noise, values))  # each value's rows together, in random order
    first = np.flatnonzero(np.diff(values[grouped], prepend=-1))
    turn = np.empty(chosen.height, np.uint32)
    turn[grouped] = np.arange(chosen.height) - np.repeat(first, np.diff(first, append=chosen.height))
    return chosen.sample(np.lexsort((noise, turn))[:n])


def curriculum(rows: pl.DataFrame, n: int, seed: int = 0, *, gate: float = 0.6) -> Sample:
    """Uniform over the levels that are open. The lowest level is open. The next one is open if the newest policy
    version that tried the level before it has a success rate of ``gate`` or more. Rows of closed levels have no chance
    at all; if the open ones have fewer than ``n``, all of theirs are drawn, and a warning says so."""
    _scored(rows, "success")
    newest = rows.filter(pl.col("policy_version") == pl.col("policy_version").max().over("level"))
    rates = dict(newest.group_by("level").agg(pl.col("success").mean()).sort("level").iter_rows())
    opened: list[int] = []
    for level in rates:
        if opened and rates[opened[-1]] < gate:
            break
        opened.append(level)
    allowed = rows.filter(pl.col("level").is_in(opened))
    if allowed.height < n:
        warnings.warn(
            f"curriculum draws {allowed.height} rows, not {n}: the levels that are open at gate {gate}, "
            f"{', '.join(map(str, opened))}, have no more",
            stacklevel=2,
        )
    return uniform(allowed, min(n, allowed.height), seed)


SAMPLERS: dict[str, Callable[..., Sample]] = {
    "uniform": uniform,
    "success_first": success_first,
    "prioritized": prioritized,
    "recency": recency,
    "diversity": diversity,
    "curriculum": curriculum,
}

COLUMNS: dict[str, tuple[str, ...]] = {
    "uniform": (),
    "success_first": ("success",),
    "prioritized": ("reward", "group_id", "task_id"),
    "recency": ("policy_version",),
    "diversity": ("task_id",),
    "curriculum": ("level", "success", "policy_version"),
}
"""What each sampler reads of a row beside its id."""
