"""What curation dropped, by rule."""

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.wire.compare import Funnel, FunnelLevel, Funnels
from agentrl.schemas.manifest import Manifest
from agentrl.statistics.intervals import wilson

FUNNELS = 20


def _with_funnels(artifacts: Artifacts) -> dict[str, Manifest]:
    """By their names, newest first."""
    return {label(manifest): manifest for manifest in artifacts.all() if "funnel" in manifest.outputs}


def _read(artifacts: Artifacts, manifest: Manifest, output: str) -> pa.Table:
    return pq.read_table(artifacts.catalog.open(manifest, manifest.outputs[output].path))


def funnels(artifacts: Artifacts, snapshot: Snapshot | None) -> Funnels:
    """The funnels of the store. Without a snapshot there are no outcomes of dropped rows."""
    listed = []
    made = _with_funnels(artifacts)
    for name, manifest in list(made.items())[:FUNNELS]:
        recorded = "dropped" in manifest.outputs and snapshot is not None
        try:
            levels = _read(artifacts, manifest, "funnel").to_pylist()
            outcomes = _outcomes(_read(artifacts, manifest, "dropped"), snapshot) if recorded and snapshot else {}
        except (OSError, StoreError):
            continue  # freed since the list was read
        listed.append(
            Funnel(
                artifact=name,
                stage=manifest.ingredients.stage,
                when=manifest.created_at.isoformat(),
                recorded=recorded,
                levels=[_level(level, *outcomes.get(level["rule"], (0, 0))) for level in levels],
            )
        )
    version = None if snapshot is None else snapshot.version
    return Funnels(version=version, more=max(0, len(made) - FUNNELS), funnels=listed)


def _level(level: dict[str, object], successes: int, n: int) -> FunnelLevel:
    low, high = wilson(successes, n) if n else (None, None)
    return FunnelLevel(
        rule=str(level["rule"]),
        before=int(str(level["before"])),
        after=int(str(level["after"])),
        successes=successes,
        n=n,
        low=low,
        high=high,
        mostly_successes=2 * successes > n,
    )


def _outcomes(dropped: pa.Table, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Successes, and rows with an outcome, of what each rule dropped."""
    known = snapshot.columns(["trajectory_id", "success"])
    both = pl.DataFrame(dropped).join(known, on="trajectory_id").group_by("rule")
    counted = both.agg(pl.col("success").sum().alias("successes"), pl.col("success").count().alias("n"))
    return {row["rule"]: (row["successes"], row["n"]) for row in counted.to_dicts()}
