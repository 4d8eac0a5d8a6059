"""Two runs side by side: config, code, inputs, metrics, and the rows that differ."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.query.artifacts import label
from agentrl.flows.viewer.query.tables import Snapshot
from agentrl.flows.viewer.refused import RefusedError
from agentrl.flows.viewer.wire.runs import (
    ChangedRows,
    RunName,
    RunsCompared,
    RunSide,
    StageDifference,
    TaskOutcomes,
    TwoValues,
)
from agentrl.pipelines.run.runs import Run, all_runs, diff_runs, find_run
from agentrl.schemas.manifest import Kind, Manifest

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader
    from agentrl.flows.viewer.wire.queries import TwoRuns

RUNS, TASKS, PROMPT = 200, 200, 300
TASK = ["env", "task_id", "prompt"]
"""Two runs may have drawn different tasks under one id."""


def runs_compared(reader: "StoreReader", question: "TwoRuns") -> RunsCompared:
    """Raises RefusedError if a run is not known. If nothing was ever appended, no rows are compared."""
    catalog, snapshot, a, b = reader.catalog, reader.snapshot_if_any(question.at), question.a, question.b
    runs = all_runs(catalog)
    after = _found(catalog, "b", b) if b else (runs[0] if runs else None)
    before = _found(catalog, "a", a) if a else _before(runs, after)
    both = before is not None and after is not None
    differing = diff_runs(catalog, before, after) if before and after else {}
    shared = [name for name in before["stages"] if name in after["stages"]] if before and after else []
    return RunsCompared(
        version=None if snapshot is None else snapshot.version,
        runs=[_name(run) for run in runs[:RUNS]],
        a=_side(before) if before else None,
        b=_side(after) if after else None,
        same=[name for name in shared if name not in differing] if both else [],
        stages=[_stage(name, difference, catalog, before, after, snapshot) for name, difference in differing.items()],
    )


def _found(catalog: Catalog, field: str, text: str) -> Run:
    try:
        return find_run(catalog, text)
    except LookupError as error:
        raise RefusedError(str(error.args[0]), field=field, status=404) from None


def _before(runs: list[Run], after: Run | None) -> Run | None:
    """The run of the same pipeline before another one."""
    if after is None:
        return None
    older = (run for run in runs if run["run_id"] < after["run_id"])
    return next((run for run in older if run.get("pipeline") == after.get("pipeline")), None)


def _name(run: Run) -> RunName:
    words = {key: str(run.get(name, "")) for key, name in (("pipeline", "pipeline"), ("when", "started_at"))}
    return RunName(run_id=run["run_id"], state=run["state"], **words)


def _side(run: Run) -> RunSide:
    seconds, command = run.get("duration_s"), str(run.get("command", ""))
    return RunSide(**_name(run).model_dump(), seconds=seconds, command=command)


def _stage(
    name: str, difference: dict[str, Any], catalog: Catalog, a: Run | None, b: Run | None, snapshot: Snapshot | None
) -> StageDifference:
    return StageDifference(
        stage=name,
        only_in=difference.get("only_in"),
        ingredients=difference.get("ingredients", []),
        metrics=_values(difference.get("metrics", {})),
        rows=_values(difference.get("rows", {})),
        changed=list(_changed(catalog, name, a, b, snapshot))
        if a and b and snapshot and "metrics" in difference
        else [],
    )


def _values(values_of: dict[str, list[Any]]) -> list[TwoValues]:
    return [TwoValues(name=name, a=a, b=b) for name, (a, b) in values_of.items()]


def _changed(catalog: Catalog, stage: str, a: Run, b: Run, snapshot: Snapshot) -> Iterator[ChangedRows]:
    """The selections of a stage in both runs."""
    manifests = [catalog.manifest(stage, run["stages"][stage]["fingerprint"]) for run in (a, b)]
    before, after = manifests
    if before is None or after is None:
        return
    for name, output in before.outputs.items():
        if output.kind is Kind.TRAJECTORIES and name in after.outputs:
            try:
                ids = [_ids(catalog, run, name) for run in (before, after)]
            except (OSError, StoreError):
                continue  # freed since the manifest was read
            if not ids[0].equals(ids[1]):
                yield _compared(name, before, after, ids[0], ids[1], snapshot)


def _ids(catalog: Catalog, manifest: Manifest, output: str) -> pl.Series:
    table = pq.read_table(catalog.open(manifest, manifest.outputs[output].path), columns=["trajectory_id"])
    return pl.DataFrame(table)["trajectory_id"]


def _compared(
    output: str, before: Manifest, after: Manifest, a: pl.Series, b: pl.Series, snapshot: Snapshot
) -> ChangedRows:
    rows = snapshot.columns(["trajectory_id", *TASK, "success", "segment"]).filter(pl.col("segment") == 0)
    sides = [_by_task(rows, ids, side) for ids, side in ((a, "a"), (b, "b"))]
    both = sides[0].join(sides[1], on=TASK)
    # 1 of 2 and 2 of 4 are one share; a task without an outcome differs from none
    differs = pl.col("a_solved") * pl.col("b_n") != pl.col("b_solved") * pl.col("a_n")
    differing = both.filter(differs).sort(TASK)
    return ChangedRows(
        output=output,
        a_artifact=label(before),
        b_artifact=label(after),
        a=len(a),
        b=len(b),
        shared=int(a.unique().is_in(b.unique().implode()).sum()),
        tasks=both.height,
        differing=differing.height,
        only_a=sides[0].height - both.height,
        only_b=sides[1].height - both.height,
        examples=[
            TaskOutcomes(**task | {"prompt": task["prompt"][:PROMPT]}) for task in differing.head(TASKS).to_dicts()
        ],
    )


def _by_task(rows: pl.DataFrame, ids: pl.Series, side: str) -> pl.DataFrame:
    """Tasks with ``{side}_solved`` and ``{side}_n`` attempts that have an outcome."""
    chosen = rows.filter(pl.col("trajectory_id").is_in(ids.unique().implode()))
    solved, n = pl.col("success").sum().alias(f"{side}_solved"), pl.col("success").count().alias(f"{side}_n")
    return chosen.group_by(TASK).agg(solved, n)
