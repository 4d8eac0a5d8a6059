"""Which stages and steps learned from a row, and which rows a step learned from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.schemas.manifest import InputRecord, Kind, Manifest
from agentrl.training.epochs import shuffled, starts_of

STEP_SCHEMA = pa.schema(
    [
        pa.field("trajectory_id", pa.string(), nullable=False),
        pa.field("pair_id", pa.string()),
        pa.field("label", pa.int32(), nullable=False),
        pa.field("weight", pa.float64(), nullable=False),
        pa.field("trained", pa.bool_(), nullable=False),
    ]
)
"""Rows of a step. ``label`` is 1 for the preferred side of a pair or a success, -1 for the other side or a failure, 0
if there is neither. ``weight`` is the mean over trained tokens of what they count: online the advantage. ``trained`` is
false for rollouts of an online step that it left out, such as those of groups without a spread."""


@dataclass(frozen=True)
class TrainedOn:
    """An artifact that was trained on a row, and the ``steps`` that were, as its metrics number them: optimiser steps,
    online iterations. ``pairs`` are those that the row is a side of. ``models`` are its outputs that learned from it,
    as rows that they sample name them."""

    stage: str
    fingerprint: str
    uses: str
    run_id: str
    steps: list[int]
    pairs: list[str]
    models: list[str]


def learned_by(catalog: Catalog, trajectory_id: str) -> list[TrainedOn]:
    """All training artifacts of the store that learned from a row, the newest first. Each one's ids are looked
    through."""
    trained_on = []
    for manifest in catalog.all():
        if not manifest.ingredients.uses.startswith("train."):
            continue
        pairs = _pairs_of(catalog, manifest, trajectory_id)
        steps = _steps_of(catalog, manifest, pairs or [trajectory_id])
        if steps:
            trained_on.append((manifest, pairs, steps))
    trained_on.sort(key=lambda manifest_and_use: manifest_and_use[0].created_at, reverse=True)
    return [
        TrainedOn(
            stage=manifest.ingredients.stage,
            fingerprint=manifest.fingerprint,
            uses=manifest.ingredients.uses,
            run_id=manifest.run_id,
            steps=steps,
            pairs=pairs,
            models=[
                f"{manifest.ingredients.stage}/{manifest.fingerprint[:8]}"
                for output in manifest.outputs.values()
                if output.kind is Kind.MODEL
            ],
        )
        for manifest, pairs, steps in trained_on
    ]


def rows_of_step(catalog: Catalog, manifest: Manifest, step: int) -> pa.Table:
    """The rows that a step of a training artifact learned from, in their order, with :data:`STEP_SCHEMA`. ``step`` is
    as the metrics number it.

    Raises LookupError if the artifact is of no training stage, or the step was never taken.
    """
    if _is_online(manifest):
        table = _read(catalog, manifest, "steps", ["step", "trajectory_id", "advantage", "trained"])
        chosen = table.filter(pc.equal(table["step"], step))
        if not chosen.num_rows:
            raise _never_taken(manifest, step, table["step"].to_numpy().max(initial=-1) + 1)
        ids, weights, trained = (chosen[name].to_pylist() for name in ("trajectory_id", "advantage", "trained"))
        labels = _labels(catalog, manifest, step)
        return _step_table(ids, [None] * len(ids), [labels.get(row_id, 0) for row_id in ids], weights, trained)
    positions = next(islice(_steps(catalog, manifest), step, None), None) if step >= 0 else None
    if positions is None:
        raise _never_taken(manifest, step, int(manifest.ingredients.config.get("steps", 0)))
    order, _ = _order(catalog, manifest)
    with _opened(catalog, manifest, "rows") as file:
        rows = _taken(file, order[positions], ["row_id", "label", "mask", "weights"])
    ids, labels = rows["row_id"].to_pylist(), rows["label"].to_pylist()
    weights = [_mean(*values_and_mask) for values_and_mask in zip(rows["weights"], rows["mask"], strict=True)]
    if "pairs" not in manifest.ingredients.inputs:
        return _step_table(ids, [None] * len(ids), labels, weights, [True] * len(ids))
    sides = {
        (pair, label): name
        for table in _pairs(catalog, manifest)
        for label, side in ((1, "chosen_id"), (-1, "rejected_id"))
        for pair, name in zip(table["pair_id"].to_pylist(), table[side].to_pylist(), strict=True)
    }
    names = [sides[pair, label] for pair, label in zip(ids, labels, strict=True)]
    return _step_table(names, ids, labels, weights, [True] * len(ids))


def _step_table(ids: Sequence[str], pairs: Sequence[str | None], *columns: Sequence[Any]) -> pa.Table:
    return pa.table(dict(zip(STEP_SCHEMA.names, (ids, pairs, *columns), strict=True)), schema=STEP_SCHEMA)


def _never_taken(manifest: Manifest, step: int, steps: int) -> LookupError:
    stage = manifest.ingredients.stage
    if not steps:
        return LookupError(f"{stage} is of stage {manifest.ingredients.uses}, which trains nothing")
    return LookupError(f"step {step} of {stage}/{manifest.fingerprint[:8]} was never taken; steps are 0 to {steps - 1}")


def _is_online(manifest: Manifest) -> bool:
    return "steps" in manifest.outputs and "batches" in manifest.outputs


# -- which steps


def _steps_of(catalog: Catalog, manifest: Manifest, row_ids: Sequence[str]) -> list[int]:
    """The steps that trained on one of these training rows, sorted."""
    wanted = pa.array(row_ids, pa.string())
    if _is_online(manifest):
        table = _read(catalog, manifest, "batches", ["iteration", "row_id"])
        rows_of_table = table.filter(pc.is_in(table["row_id"], value_set=wanted))
        return sorted(set(rows_of_table["iteration"].to_pylist()))
    if "rows" not in manifest.outputs:
        return []
    order, columns = _order(catalog, manifest)
    here = pc.is_in(columns["row_id"], value_set=wanted).to_numpy()[order]
    if not here.any():
        return []
    return [number for number, positions in enumerate(_steps(catalog, manifest)) if here[positions].any()]


def _steps(catalog: Catalog, manifest: Manifest) -> Iterator[np.ndarray]:
    """The positions of the rows of each optimiser step of a stage that trained on data at rest."""
    config = manifest.ingredients.config
    if "rows" not in manifest.outputs or "batch" not in config:
        return iter(())
    order, columns = _order(catalog, manifest)
    starts = starts_of(columns["unit"].to_numpy()[order])
    return islice(shuffled(starts, config["batch"], manifest.ingredients.seed), config["steps"])


def _order(catalog: Catalog, manifest: Manifest) -> tuple[np.ndarray, pa.Table]:
    """For each position the place of its row in the file, see :meth:`agentrl.training.rows.TrainingRows.open`, and the
    units and ids of the rows in the file."""
    columns = _read(catalog, manifest, "rows", ["unit", "row_id"])
    return np.argsort(columns["unit"].to_numpy(), kind="stable"), columns


def _labels(catalog: Catalog, manifest: Manifest, iteration: int) -> dict[str, int]:
    table = _read(catalog, manifest, "batches", ["iteration", "row_id", "label"])
    rows_of_step = table.filter(pc.equal(table["iteration"], iteration))
    return dict(zip(rows_of_step["row_id"].to_pylist(), rows_of_step["label"].to_pylist(), strict=True))


# -- pairs


def _pairs(catalog: Catalog, manifest: Manifest) -> Iterator[pa.Table]:
    """The ids of the pairs that a stage read, as far as they are still there."""
    for record in manifest.ingredients.inputs.get("pairs", []):
        if made := _made(catalog, record):
            yield _read(catalog, made, record.output, ["pair_id", "chosen_id", "rejected_id"])


def _made(catalog: Catalog, record: InputRecord) -> Manifest | None:
    return catalog.manifest(record.stage, record.fingerprint)


def _pairs_of(catalog: Catalog, manifest: Manifest, trajectory_id: str) -> list[str]:
    """The pairs that a stage read and a row is a side of."""
    pair_ids: list[str] = []
    for table in _pairs(catalog, manifest):
        mask = pc.or_(pc.equal(table["chosen_id"], trajectory_id), pc.equal(table["rejected_id"], trajectory_id))
        pair_ids += table.filter(mask)["pair_id"].to_pylist()
    return pair_ids


# -- files of artifacts, of which only what is asked for is read


def _opened(catalog: Catalog, manifest: Manifest, output: str) -> pq.ParquetFile:
    return pq.ParquetFile(catalog.open(manifest, manifest.outputs[output].path))


def _read(catalog: Catalog, manifest: Manifest, output: str, columns: list[str]) -> pa.Table:
    with _opened(catalog, manifest, output) as file:
        return file.read(columns)


def _taken(file: pq.ParquetFile, places: np.ndarray, columns: list[str]) -> pa.Table:
    """The rows at these places of a file, in the order asked, from the row groups that hold them."""
    sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    starts = np.cumsum([0, *sizes])
    groups = np.unique(np.searchsorted(starts, places, side="right") - 1)
    read = np.concatenate([np.arange(starts[group], starts[group + 1]) for group in groups.tolist()])
    return file.read_row_groups(groups.tolist(), columns).take(pa.array(np.searchsorted(read, places)))


def _mean(weights: pa.ListScalar, mask: pa.ListScalar) -> float:
    chosen = weights.values.to_numpy(zero_copy_only=False)[mask.values.to_numpy(zero_copy_only=False)]
    return float(chosen.mean()) if len(chosen) else 0.0
