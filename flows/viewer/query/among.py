"""Parts of the buffer that no filter can name: what an artifact chose, and what one of its rules dropped."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query import selections
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.wire import RefusedError
from agentrl.schemas.manifest import Kind, Manifest

NAMED = 20
"""Artifacts that an error names."""


@dataclass(frozen=True)
class Subset:
    """``mask`` is whether each row of the buffer is in it, [rows]; ``absent`` counts rows that this version of the
    buffer does not have."""

    mask: np.ndarray
    absent: int


def part(artifacts: Artifacts, snapshot: Snapshot, artifact: str, rule: str | None) -> Subset:
    """The rows that an artifact (STAGE/FINGERPRINT) chose, or those that its ``rule`` dropped. Raises RefusedError if
    it is not known, or recorded none."""
    manifest = artifacts.named(artifact)
    if manifest is None:
        known = [label(manifest) for manifest in artifacts.all() if any(_selections(manifest))][:NAMED]
        raise RefusedError(f"there is no artifact {artifact[:100]!r}", field="among", allowed=known, status=404)
    key = f"among {manifest.ingredients.stage}/{manifest.fingerprint}/{rule or ''}"
    subset = snapshot.kept.get_or(key, lambda: _part(snapshot, _ids(artifacts, manifest, snapshot, rule)))
    assert isinstance(subset, Subset)
    return subset


def _part(snapshot: Snapshot, ids: pa.ChunkedArray) -> Subset:
    chosen = pl.Series("ids", pc.unique(ids), dtype=pl.String)
    mask = snapshot.columns(["trajectory_id"])["trajectory_id"].is_in(chosen.implode()).to_numpy()
    return Subset(mask, len(chosen) - int(mask.sum()))


def _selections(manifest: Manifest) -> Iterator[str]:
    return (output.path for output in manifest.outputs.values() if output.kind is Kind.TRAJECTORIES)


def _ids(artifacts: Artifacts, manifest: Manifest, snapshot: Snapshot, rule: str | None) -> pa.ChunkedArray:
    name = label(manifest)
    try:
        if rule is None:
            if not any(_selections(manifest)):
                raise RefusedError(f"{name} ({manifest.ingredients.uses}) chose no rows", field="among", status=404)
            return selections.chosen(artifacts, manifest)
        dropped = selections.dropped(artifacts, manifest, snapshot)
    except (OSError, StoreError):
        raise RefusedError(f"{name} was freed since it was listed", field="among", status=404) from None
    if dropped is None:
        raise RefusedError(f"{name} did not record which rows it dropped", field="among", status=404)
    rules = dropped["rule"].unique().to_list()
    if rule not in rules:
        raise RefusedError(f"no rule {rule[:100]!r} dropped a row", field="rule", allowed=rules, status=404)
    return pa.chunked_array([dropped.filter(pl.col("rule") == rule)["trajectory_id"].to_arrow().cast(pa.string())])
