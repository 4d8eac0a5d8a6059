"""What a stage was given of the buffer's rows, what it kept and what it dropped, by which rule.

Curation and selections record what their rules drop. What a selection's ``where`` leaves out, and what rejection
sampling does, is worked out here from their settings and the rows' outcomes.
"""

from collections.abc import Iterator

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.flows.viewer.query.artifacts import Artifacts
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.schemas.manifest import Kind, Manifest

REJECT = "trajectories.reject"
UNRECORDED = "not chosen; the stage does not record why"
UNSCORED, FAILED = "unscored", "failed"


def chosen(artifacts: Artifacts, manifest: Manifest) -> pa.ChunkedArray:
    """The ids of the rows that an artifact chose or made; none if it has no selection."""
    return _joined(_ids(artifacts, manifest, name) for name in manifest.outputs)


def given(artifacts: Artifacts, manifest: Manifest) -> pa.ChunkedArray:
    """The ids of the rows in the selections that an artifact was made from, as far as these are still there."""
    records = [record for each in manifest.ingredients.inputs.values() for record in each]
    read = ((artifacts.find(record.stage, record.fingerprint), record.output) for record in records)
    return _joined(_ids(artifacts, source, output) for source, output in read if source is not None)


def selects(manifest: Manifest) -> bool:
    """Whether an artifact has a selection, and is no training."""
    trains = manifest.ingredients.uses.startswith("train.")
    return not trains and any(output.kind is Kind.TRAJECTORIES for output in manifest.outputs.values())


def narrows(artifacts: Artifacts, manifest: Manifest) -> bool:
    """Whether an artifact chooses among the rows that it was given, and makes none."""
    return selects(manifest) and artifacts.narrowing.get_or(manifest.fingerprint, lambda: _narrows(artifacts, manifest))


def _narrows(artifacts: Artifacts, manifest: Manifest) -> bool:
    kept, all_given = chosen(artifacts, manifest), given(artifacts, manifest)
    if not len(kept) or not len(all_given):
        return False
    return bool(pc.all(pc.is_in(kept, value_set=all_given.combine_chunks())).as_py())


def dropped(artifacts: Artifacts, manifest: Manifest, snapshot: Snapshot | None) -> pl.DataFrame | None:
    """The rows that an artifact dropped, with the ``rule`` that did; None if it chooses nothing. Without a snapshot
    only what was recorded is known."""
    recorded = None
    if "dropped" in manifest.outputs:
        recorded = pl.DataFrame(_read(artifacts, manifest, "dropped").select(["trajectory_id", "rule"]))
    elif not narrows(artifacts, manifest):
        return None
    kept = pl.Series("kept", chosen(artifacts, manifest), dtype=pl.String)
    rows = pl.DataFrame({"trajectory_id": pl.Series(given(artifacts, manifest), dtype=pl.String).unique()})
    rows = rows.filter(~pl.col("trajectory_id").is_in(kept.implode()))
    if recorded is not None:
        others = rows.join(recorded, on="trajectory_id", how="anti").with_columns(rule=pl.lit(_asked(manifest)))
        return pl.concat([others, recorded], how="vertical_relaxed")
    config = manifest.ingredients.config
    if manifest.ingredients.uses != REJECT or config.get("scorer") or snapshot is None:
        return rows.with_columns(rule=pl.lit(UNRECORDED))
    known = snapshot.columns(["trajectory_id", "success", "reward"])
    rule = (
        pl.when(pl.col("success").is_null() | pl.col("reward").is_null())
        .then(pl.lit(UNSCORED))
        .when(~pl.col("success"))
        .then(pl.lit(FAILED))
        .otherwise(pl.lit(_beyond(config)))
    )
    return rows.join(known, on="trajectory_id", how="left").select("trajectory_id", rule.alias("rule"))


def _asked(manifest: Manifest) -> str:
    """What a selection asks of rows before its rules."""
    where = manifest.ingredients.config.get("where")
    return f"where {where}" if where else UNRECORDED


def _beyond(config: dict[str, object]) -> str:
    """Why rejection sampling leaves out a success."""
    agree = config.get("agree", 1)
    seldom = f", or made fewer than {agree} times" if agree != 1 else ""
    return f"not among the best {config.get('keep', 1)} of its task, or the same as one that is{seldom}"


def _ids(artifacts: Artifacts, manifest: Manifest, name: str) -> pa.ChunkedArray | None:
    output = manifest.outputs.get(name)
    if output is None or output.kind is not Kind.TRAJECTORIES:
        return None
    return _read(artifacts, manifest, name)["trajectory_id"]


def _read(artifacts: Artifacts, manifest: Manifest, name: str) -> pa.Table:
    return pq.read_table(artifacts.catalog.open(manifest, manifest.outputs[name].path))


def _joined(parts: Iterator[pa.ChunkedArray | None]) -> pa.ChunkedArray:
    return pa.chunked_array([chunk for part in parts if part is not None for chunk in part.chunks], pa.string())
