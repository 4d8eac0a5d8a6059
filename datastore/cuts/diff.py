"""What differs between two cuts: which rows are in one of them alone, and by which rule the other left them out."""

import json
from dataclasses import dataclass
from typing import Any

import polars as pl

from agentrl.datastore.cuts.folder import CutFolder

NOT_GIVEN = "was not among the rows that it was cut from"


@dataclass(frozen=True)
class CutDiff:
    """``rows`` has ``trajectory_id``, ``change`` (``in``: the second cut has it and the first not; ``out``: the other
    way round; ``changed``: both have it, with other content) and ``rule``, by which the one that lacks it dropped it.
    ``why`` says what differs between the manifests, a line for each."""

    rows: pl.DataFrame
    why: list[str]

    def counts(self) -> pl.DataFrame:
        """``change``, ``rule`` and ``rows``: how many rows each rule brought in or out."""
        return self.rows.group_by("change", "rule").agg(pl.len().alias("rows")).sort("change", "rule", nulls_last=True)


def diff(first: CutFolder, second: CutFolder) -> CutDiff:
    """What the second cut has that the first has not, and the other way round."""
    a, b = first.rows(), second.rows()
    changed = a.join(b, on="trajectory_id", suffix="_now").filter(pl.col("digest") != pl.col("digest_now"))
    parts = [
        _lacking(b, a, first).with_columns(pl.lit("in").alias("change")),
        _lacking(a, b, second).with_columns(pl.lit("out").alias("change")),
        changed.select("trajectory_id", pl.lit(None, pl.String).alias("rule"), pl.lit("changed").alias("change")),
    ]
    rows = pl.concat(parts).select("trajectory_id", "change", "rule").collect()
    return CutDiff(rows.sort("change", "trajectory_id"), _why(first, second))


def _lacking(rows: pl.LazyFrame, others: pl.LazyFrame, lacks: CutFolder) -> pl.LazyFrame:
    """The ids of ``rows`` that are not among ``others``, with the rule by which the cut that ``lacks`` them dropped
    them."""
    missing = rows.join(others, on="trajectory_id", how="anti").select("trajectory_id")
    return missing.join(lacks.dropped(), on="trajectory_id", how="left").with_columns(
        pl.col("rule").fill_null(NOT_GIVEN)
    )


def _why(first: CutFolder, second: CutFolder) -> list[str]:
    before, after = (cut.manifest.model_dump(mode="json") for cut in (first, second))
    for manifest in (before, after):
        (manifest.get("heldout") or {}).pop("version", None)  # that of the table is said below
    lines = [
        f"{name} {_short(before[name])} -> {_short(after[name])}"
        for name in ("seed", "split", "embedder", "origin", "licences", "evaluation_sets", "heldout")
        if before.get(name) != after.get(name)
    ]
    for name in ("id", "version"):
        if before["table"][name] != after["table"][name]:
            lines.append(f"table {name} {before['table'][name]} -> {after['table'][name]}")
    old, new = ([json.dumps(rule, sort_keys=True) for rule in manifest["rules"]] for manifest in (before, after))
    lines += [f"rule gone: {rule}" for rule in old if rule not in new]
    lines += [f"rule new: {rule}" for rule in new if rule not in old]
    if old != new and sorted(old) == sorted(new):
        lines.append("rules apply in another order")
    return lines


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 100 else f"{text[:97]}..."
