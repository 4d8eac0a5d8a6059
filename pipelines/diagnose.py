"""What the doctor looks at: the rollouts, metrics and evaluations of a run's stages, from the store."""

from typing import Any

import pyarrow.parquet as pq

from agentrl.doctor import HEAVY, LIGHT, Case, Finding, examine
from datastore.buffer import TrajectoryBuffer
from datastore.catalog import Catalog
from schemas.manifest import Kind, Manifest

SAMPLE = 512
"""Rollouts of a stage whose messages and tokens are read, evenly spread over all."""


def diagnose(store: str, run: dict[str, Any]) -> dict[str, list[Finding]]:
    """Findings of each stage of a run that sampled or trained, by its name; without a finding the list is empty."""
    catalog, buffer = Catalog(store), TrajectoryBuffer(store)
    manifests = {
        name: manifest
        for name, stage in run["stages"].items()
        if stage.get("fingerprint") and (manifest := catalog.manifest(name, stage["fingerprint"])) is not None
    }
    heldout = _heldout(catalog, list(manifests.values()))
    found = {}
    for name, manifest in manifests.items():
        case = _case(catalog, buffer, manifest, heldout.get(manifest.fingerprint))
        if case.rollouts or case.metrics:
            found[name] = examine(case)
    return found


def _case(catalog: Catalog, buffer: TrajectoryBuffer, manifest: Manifest, heldout: tuple[int, int] | None) -> Case:
    rollouts: list[dict[str, Any]] = []
    sample: list[dict[str, Any]] = []
    if any(output.kind is Kind.TRAJECTORIES for output in manifest.outputs.values()):
        ids = buffer.ids(manifest.fingerprint)
        rows = buffer.read(ids, [*LIGHT, "tags", "source"]).to_pylist() if ids else []
        # What was not sampled at temperature 1 as training sees it is no symptom of training.
        rollouts = [row for row in rows if row["source"] == "model" and "greedy" not in (row["tags"] or [])]
        every = max(1, len(rollouts) // SAMPLE)
        looked_at = [row["trajectory_id"] for row in rollouts[::every]]
        sample = buffer.read(looked_at, HEAVY).to_pylist() if looked_at else []
    metrics = _read(catalog, manifest, "metrics")
    updates = int(manifest.ingredients.config.get("updates") or 1)
    return Case(rollouts, sample, metrics, heldout, updates)


def _read(catalog: Catalog, manifest: Manifest, output: str) -> list[dict[str, Any]]:
    record = manifest.outputs.get(output)
    if record is None or record.kind is not Kind.TABLE:
        return []
    return pq.read_table(catalog.local(manifest.ingredients.stage, manifest.fingerprint, record.path)).to_pylist()


def _heldout(catalog: Catalog, manifests: list[Manifest]) -> dict[str, tuple[int, int]]:
    """(successes, tasks) at temperature 1 of each evaluated policy, by the fingerprint of the stage that trained it."""
    found = {}
    for manifest in manifests:
        for model in manifest.ingredients.inputs.get("model", []):
            for row in _read(catalog, manifest, "results"):
                if row.get("decoding") == "sampled" and row.get("level") == -1:
                    found[model.fingerprint] = (int(row["successes"]), int(row["tasks"]))
    return found
