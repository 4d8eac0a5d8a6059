"""Parts of the buffer that no filter can name: what an artifact chose, and what one of its rules dropped."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.refused import RefusedError
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
    subset = snapshot.kept.get_or(key, lambda: _part(snapshot, _ids(artifacts, manifest, rule)))
    assert isinstance(subset, Subset)
    return subset


def _part(snapshot: Snapshot, ids: pa.ChunkedArray) -> Subset:
    chosen = pl.Series("ids", pc.unique(ids), dtype=pl.String)
    mask = snapshot.columns(["trajectory_id"])["trajectory_id"].is_in(chosen.implode()).to_numpy()
    return Subset(mask, len(chosen) - int(mask.sum()))


def _selections(manifest: Manifest) -> Iterator[str]:
    return (output.path for output in manifest.outputs.values() if output.kind is Kind.TRAJECTORIES)


def _ids(artifacts: Artifacts, manifest: Manifest, rule: str | None) -> pa.ChunkedArray:
    name = label(manifest)
    try:
        if rule is None:
            ids = [_read(artifacts, manifest, path)["trajectory_id"] for path in _selections(manifest)]
            if not ids:
                raise RefusedError(f"{name} ({manifest.ingredients.uses}) chose no rows", field="among", status=404)
            return pa.chunked_array([chunk for ids_of_part in ids for chunk in ids_of_part.chunks], pa.string())
        if "dropped" not in manifest.outputs:
            raise RefusedError(f"{name} did not record which rows it dropped", field="among", status=404)
        dropped = _read(artifacts, manifest, manifest.outputs["dropped"].path)
    except (OSError, StoreError):
        raise RefusedError(f"{name} was freed since it was listed", field="among", status=404) from None
    rules = pc.unique(dropped["rule"]).to_pylist()
    if rule not in rules:
        raise RefusedError(f"no rule {rule[:100]!r} dropped a row", field="rule", allowed=rules, status=404)
    return dropped.filter(pc.equal(dropped["rule"], rule))["trajectory_id"]


def _read(artifacts: Artifacts, manifest: Manifest, path: str) -> pa.Table:
    return pq.read_table(artifacts.catalog.open(manifest, path))
