"""What curation dropped, by rule."""

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datastore.errors import StoreError
from datastore.writer import SCALARS
from flows.viewer.artifacts import Artifacts, label
from flows.viewer.refused import RefusedError
from flows.viewer.tables import Snapshot, page_of
from flows.viewer.wire_compare import Funnel, FunnelLevel, Funnels
from schemas.manifest import Manifest

FUNNELS = 20


def _with_funnels(artifacts: Artifacts) -> dict[str, Manifest]:
    """By their names, newest first."""
    return {label(one): one for one in artifacts.all() if "funnel" in one.outputs}


def _read(artifacts: Artifacts, manifest: Manifest, output: str) -> pa.Table:
    return pq.read_table(artifacts.catalog.open(manifest, manifest.outputs[output].path))


def funnels(artifacts: Artifacts, snapshot: Snapshot | None) -> Funnels:
    """The funnels of the store. Without a snapshot there are no outcomes of dropped rows."""
    found = []
    for name, manifest in list(_with_funnels(artifacts).items())[:FUNNELS]:
        recorded = "dropped" in manifest.outputs and snapshot is not None
        try:
            levels = _read(artifacts, manifest, "funnel").to_pylist()
            outcomes = _outcomes(_read(artifacts, manifest, "dropped"), snapshot) if recorded and snapshot else {}
        except (OSError, StoreError):
            continue  # freed since the list was read
        found.append(
            Funnel(
                artifact=name,
                stage=manifest.ingredients.stage,
                when=manifest.created_at.isoformat(),
                recorded=recorded,
                levels=[_level(one, *outcomes.get(one["rule"], (0, 0))) for one in levels],
            )
        )
    return Funnels(funnels=found)


def _level(level: dict[str, object], successes: int, n: int) -> FunnelLevel:
    return FunnelLevel(
        rule=str(level["rule"]),
        before=int(str(level["before"])),
        after=int(str(level["after"])),
        successes=successes,
        n=n,
        mostly_successes=2 * successes > n,
    )


def _outcomes(dropped: pa.Table, snapshot: Snapshot) -> dict[str, tuple[int, int]]:
    """Successes, and rows with an outcome, of what each rule dropped."""
    known = snapshot.columns(["trajectory_id", "success"])
    both = pl.DataFrame(dropped).join(known, on="trajectory_id").group_by("rule")
    counted = both.agg(pl.col("success").sum().alias("successes"), pl.col("success").count().alias("n"))
    return {one["rule"]: (one["successes"], one["n"]) for one in counted.to_dicts()}


def dropped_page(
    artifacts: Artifacts, snapshot: Snapshot, artifact: str, rule: str, offset: int, limit: int
) -> tuple[pa.Table, int]:
    """A page of the rows that a rule dropped, and how many there are. Raises RefusedError if it is not known."""
    made = _with_funnels(artifacts)
    if artifact not in made or "dropped" not in made[artifact].outputs:
        said = f"{artifact[:100]!r} did not record which rows it dropped"
        raise RefusedError(said, field="artifact", allowed=list(made), status=404)
    dropped = _read(artifacts, made[artifact], "dropped")
    rules = pc.unique(dropped["rule"]).to_pylist()
    if rule not in rules:
        raise RefusedError(f"no rule {rule[:100]!r} dropped a row", field="rule", allowed=rules, status=404)
    ids = pl.Series(dropped.filter(pc.equal(dropped["rule"], rule))["trajectory_id"])
    all_ids = snapshot.columns(["trajectory_id"])["trajectory_id"]
    places = np.flatnonzero(all_ids.is_in(ids.implode()).to_numpy())
    return page_of(snapshot.columns(SCALARS)[places[offset : offset + limit]]), len(places)
