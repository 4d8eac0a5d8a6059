"""What the doctor looks at: the rollouts, metrics and evaluations of a run's stages, from the store."""

from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.doctor import examine
from agentrl.doctor.bands import Band, bands
from agentrl.doctor.case import HEAVY, LIGHT, Case, Finding
from agentrl.pipelines.parts.selected import plainly_drawn
from agentrl.schemas.manifest import Kind, Manifest
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import CONTROL, INFRASTRUCTURE, RETRIED

SAMPLE = 512
"""Rollouts of a stage whose messages and tokens are read, evenly spread over all."""


RECOMPUTED = 16
"""Rollouts of a stage whose log-probs are computed again."""

SMALL_BYTES = 2 * 2**30
"""Bytes. Models up to this size are loaded for that by default."""


def diagnose(store: str, run: dict[str, Any], recompute: bool = False) -> dict[str, list[Finding]]:
    """Findings of each stage of a run that sampled or trained, by its name; without a finding the list is empty.

    Log-probs are computed again if the model that sampled is small and on this disk; with ``recompute``, of any model.
    """
    catalog, buffer = Catalog(store), TrajectoryBuffer(store)
    manifests = {
        name: manifest
        for name, stage in run["stages"].items()
        if stage.get("fingerprint") and (manifest := catalog.manifest(name, stage["fingerprint"])) is not None
    }
    heldout = _heldout(catalog, list(manifests.values()))
    findings_of = {}
    for name, manifest in manifests.items():
        case = _case(catalog, buffer, manifest, heldout.get(manifest.fingerprint), recompute)
        case = replace(case, control=_controlled(catalog, manifest))
        if case.rollouts or case.metrics or case.failed:
            findings_of[name] = examine(case)
    return findings_of


def _controlled(catalog: Catalog, manifest: Manifest) -> bool:
    """Whether a stage is no evaluation of a policy that was trained from another one, or has the control for it."""
    if manifest.ingredients.uses != "evaluate.policy" or "control" in manifest.metrics:
        return True
    models = manifest.ingredients.inputs.get("model", [])
    trained = [catalog.manifest(model.stage, model.fingerprint) for model in models]
    return not any(maker and maker.ingredients.inputs.get("model") for maker in trained)


def _case(
    catalog: Catalog, buffer: TrajectoryBuffer, manifest: Manifest, heldout: tuple[int, int] | None, recompute: bool
) -> Case:
    rollouts: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    sample: list[dict[str, Any]] = []
    if any(output.kind is Kind.TRAJECTORIES for output in manifest.outputs.values()):
        ids = buffer.ids(manifest.row_fingerprint)
        columns = [*LIGHT, "tags", "source", "policy_version", "sampling"]
        rows = buffer.read(ids, columns).to_pylist() if ids else []
        # Rollouts that were not sampled at temperature 1 say nothing about training.
        rollouts = [
            row for row in rows if row["source"] == "model" and not {"greedy", "dev", CONTROL} & set(row["tags"] or [])
        ]
        failed = [row for row in rollouts if row["termination"] in INFRASTRUCTURE and RETRIED not in row["tags"]]
        rollouts = [row for row in rollouts if row["reward"] is not None and row["success"] is not None]
        every = max(1, len(rollouts) // SAMPLE)
        looked_at = [row["trajectory_id"] for row in rollouts[::every]]
        sample = buffer.read(looked_at, HEAVY).to_pylist() if looked_at else []
    metrics = _read(catalog, manifest, "metrics")
    updates, algorithm = _method(manifest)
    plain = {row["trajectory_id"] for row in rollouts if row["policy_version"] == 0 and plainly_drawn(row["sampling"])}
    checked = [row for row in sample if row["trajectory_id"] in plain and row["input_ids"]][:RECOMPUTED]
    recomputed = _logprobs(catalog, manifest, checked, recompute)
    return Case(rollouts, sample, metrics, heldout, updates, algorithm, recomputed, failed=failed)


def bands_of(manifest: Manifest, metrics: list[dict[str, Any]]) -> list[Band]:
    """Where the doctor calls metrics of a training stage sick."""
    updates, algorithm = _method(manifest)
    return bands(Case(metrics=metrics, updates=updates, algorithm=algorithm))


def _method(manifest: Manifest) -> tuple[int, str]:
    """The updates of an iteration, and the type of what the stage minimises."""
    config = manifest.ingredients.config
    chosen = config.get("algorithm") or config.get("objective") or {}
    return int(config.get("updates") or 1), chosen.get("type", "")


def _logprobs(
    catalog: Catalog, manifest: Manifest, rows: list[dict[str, Any]], recompute: bool
) -> dict[str, list[float]]:
    """Log-probs of rollouts under the model that the stage was given, by id; none if it is gone or too large."""
    models = manifest.ingredients.inputs.get("model", [])
    upstream = catalog.manifest(models[0].stage, models[0].fingerprint) if len(models) == 1 and rows else None
    if upstream is None:
        return {}
    if not (recompute or isinstance(catalog.storage, LocalStorage)):
        return {}  # nothing is downloaded by default
    folder = catalog.local(upstream, upstream.outputs[models[0].output].path)
    if not recompute and sum(file.stat().st_size for file in folder.rglob("*")) > SMALL_BYTES:
        return {}
    from agentrl.models.policy import Policy
    from agentrl.training.rows import TrainingRows
    from agentrl.training.scoring import batch_logprobs

    made = [
        TrainingRow(
            row_id=row["trajectory_id"],
            unit=number,
            input_ids=row["input_ids"],
            mask=row["action_mask"],
            weights=[0.0] * len(row["input_ids"]),
        )
        for number, row in enumerate(rows)
    ]
    policy = Policy.load(folder)
    if precision := (manifest.ingredients.config.get("optimizer") or {}).get("precision"):
        policy.prepare(precision)  # as the stage did before it sampled
    logprobs = batch_logprobs(policy, TrainingRows.of(made))
    return {row.row_id: values.tolist() for row, values in zip(made, logprobs, strict=True)}


def _read(catalog: Catalog, manifest: Manifest, output: str) -> list[dict[str, Any]]:
    record = manifest.outputs.get(output)
    if record is None or record.kind is not Kind.TABLE:
        return []
    return pq.read_table(catalog.local(manifest, record.path)).to_pylist()


def _heldout(catalog: Catalog, manifests: list[Manifest]) -> dict[str, tuple[int, int]]:
    """(successes, tasks) at temperature 1 of each evaluated policy, by the fingerprint of the stage that trained it."""
    heldout = {}
    for manifest in manifests:
        for model in manifest.ingredients.inputs.get("model", []):
            for row in _read(catalog, manifest, "results"):
                if row.get("decoding") == "sampled" and row.get("level") == -1 and not row.get("env"):
                    heldout[model.fingerprint] = (int(row["successes"]), int(row.get("attempts") or row["tasks"]))
    return heldout
