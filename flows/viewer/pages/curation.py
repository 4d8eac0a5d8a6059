"""What curation, selections and rejection dropped, by rule."""

import re
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query import selections
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, AtVersion
from agentrl.schemas.manifest import Manifest
from agentrl.statistics.intervals import wilson

FUNNELS = 20


OUTCOME = re.compile(r"\b(success|reward|unscored|failed|termination)\b")
"""Rules that say by which outcome they choose: that they drop successes is what they were asked for."""


class FunnelLevel(Answer):
    """A rule, the rows before and after it, and of those that it dropped how many succeeded among the ``n`` with an
    outcome, with Wilson's interval of their share (None if ``n`` is 0). ``worry``: those that it dropped had succeeded
    more often than those that it kept, by more than chance explains, and the rule does not speak of outcomes.
    /buffer?among=ARTIFACT&rule=RULE shows what it dropped."""

    rule: str
    before: int
    after: int
    successes: int
    n: int
    low: float | None
    high: float | None
    worry: bool


class Funnel(Answer):
    """``kept`` counts the rows that were chosen. ``recorded`` is false if nobody knows which rows were dropped: then
    the counts of outcomes are 0."""

    artifact: str
    stage: str
    uses: str
    when: str
    kept: int
    recorded: bool
    levels: list[FunnelLevel]


class Funnels(Answer):
    """Newest first; ``more`` older ones are left out. ``version`` is that of the buffer which told the outcomes, None
    if nothing was ever appended."""

    version: int | None
    more: int
    funnels: list[Funnel]


def funnels(reader: StoreReader, question: AtVersion) -> Funnels:
    """What each artifact that chooses rows dropped, by rule. If nothing was ever appended, rows have no outcomes."""
    artifacts, snapshot = reader.artifacts, reader.snapshot_if_any(question.at)
    listed: list[Funnel] = []
    more = 0
    for manifest in artifacts.all():
        try:
            if "funnel" not in manifest.outputs and not selections.narrows(artifacts, manifest):
                continue
            if len(listed) == FUNNELS:
                more += 1
                continue
            listed.append(_funnel(artifacts, manifest, snapshot))
        except (OSError, StoreError):
            continue  # freed since the list was read
    version = None if snapshot is None else snapshot.version
    return Funnels(version=version, more=more, funnels=listed)


def _funnel(artifacts: Artifacts, manifest: Manifest, snapshot: Snapshot | None) -> Funnel:
    dropped = selections.dropped(artifacts, manifest, snapshot)
    kept = selections.chosen(artifacts, manifest)
    recorded = dropped is not None and snapshot is not None
    levels: list[dict[str, Any]] = []
    if "funnel" in manifest.outputs:
        levels = pq.read_table(artifacts.catalog.open(manifest, manifest.outputs["funnel"].path)).to_pylist()
    rules = [level["rule"] for level in levels]
    first = int(str(levels[0]["before"])) if levels else len(pc.unique(kept))
    levels = [*_levels(dropped, rules, first), *levels]
    outcomes = _outcomes(dropped, kept, snapshot) if dropped is not None and snapshot is not None else {}
    shown = []
    for number, level in enumerate(levels):
        own, after = outcomes.get(level["rule"], (0, 0)), [outcomes.get(KEPT, (0, 0))]
        after += [outcomes.get(later["rule"], (0, 0)) for later in levels[number + 1 :]]
        shown.append(_level(level, *own, *map(sum, zip(*after, strict=True))))
    return Funnel(
        artifact=label(manifest),
        stage=manifest.ingredients.stage,
        uses=manifest.ingredients.uses,
        when=manifest.created_at.isoformat(),
        kept=len(pc.unique(kept)),
        recorded=recorded,
        levels=shown,
    )


def _levels(dropped: pl.DataFrame | None, recorded: list[object], left: int) -> list[dict[str, object]]:
    """The levels that a funnel did not record, the rule that dropped most first; ``left`` rows are left after them."""
    if dropped is None:
        return []
    counts = dropped.filter(~pl.col("rule").is_in(recorded))["rule"].value_counts(sort=True).rows()
    before = left + sum(number for _, number in counts)
    levels: list[dict[str, object]] = []
    for rule, number in counts:
        levels.append({"rule": rule, "before": before, "after": before - number})
        before -= number
    return levels


def _level(level: dict[str, object], successes: int, n: int, kept_successes: int, kept: int) -> FunnelLevel:
    low, high = wilson(successes, n) if n else (None, None)
    rule = str(level["rule"])
    return FunnelLevel(
        rule=rule,
        before=int(str(level["before"])),
        after=int(str(level["after"])),
        successes=successes,
        n=n,
        low=low,
        high=high,
        worry=not OUTCOME.search(rule) and _more_often(successes, n, kept_successes, kept),
    )


def _more_often(successes: int, n: int, kept_successes: int, kept: int) -> bool:
    """Whether what was dropped had succeeded more often than what was kept, by more than chance explains: their 95 %
    intervals do not meet."""
    return n > 0 and kept > 0 and wilson(successes, n)[0] > wilson(kept_successes, kept)[1]


KEPT = ""


def _outcomes(dropped: pl.DataFrame, kept: pa.ChunkedArray, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Successes, and rows with an outcome, of what each rule dropped, and under :data:`KEPT` of what was kept."""
    stayed = pl.DataFrame({"trajectory_id": pl.Series(pc.unique(kept), dtype=pl.String), "rule": KEPT})
    rows = pl.concat([dropped, stayed], how="vertical_relaxed")
    both = rows.join(snapshot.columns(["trajectory_id", "success"]), on="trajectory_id").group_by("rule")
    counted = both.agg(pl.col("success").sum().alias("successes"), pl.col("success").count().alias("n"))
    return {row["rule"]: (row["successes"], row["n"]) for row in counted.to_dicts()}
