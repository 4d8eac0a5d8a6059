"""Two runs side by side: config, code, inputs, metrics, and the rows that differ."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import polars as pl
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.pages.compare import EVALUATION
from agentrl.flows.viewer.pages.run import RunName, name_of, run_named
from agentrl.flows.viewer.query.artifacts import label
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, AtVersion
from agentrl.pipelines.run.runs import Run, all_runs, diff_runs
from agentrl.schemas.manifest import Kind, Manifest

RUNS, TASKS, PROMPT = 200, 200, 300
TASK = ["env", "task_id", "prompt"]
"""Two runs may have drawn different tasks under one id."""


class TwoRuns(AtVersion):
    """Runs by their ids, or ``STORE:ID`` of another store that is shown beside this one."""

    a: str | None = None
    b: str | None = None


class RunSide(RunName):
    command: str


class TwoValues(Answer):
    """A metric, or the rows of an output, in both runs; None if one of them has it not."""

    name: str
    a: Any
    b: Any


class TaskOutcomes(Answer):
    """Attempts at a task in both runs, and how many of those with an outcome succeeded."""

    env: str
    task_id: str
    prompt: str
    a_solved: int
    a_n: int
    b_solved: int
    b_n: int


class ChangedRows(Answer):
    """The rows of a selection in both runs: ``a`` and ``b`` rows, of which ``shared`` are the same. ``a_artifact`` and
    ``b_artifact`` are STAGE/FINGERPRINT, as /buffer?among= takes them, with STORE: before them if they are of another
    store. ``tasks`` are attempted in both; ``differing``
    of them have another share of successes, and are listed first to last by task, at most 200. ``only_a`` and
    ``only_b`` tasks are attempted in one run alone."""

    output: str
    a_artifact: str
    b_artifact: str
    a: int
    b: int
    shared: int
    tasks: int
    differing: int
    only_a: int
    only_b: int
    examples: list[TaskOutcomes]


class StageDifference(Answer):
    """``only_in`` is the run that has the stage, None if both have it. ``ingredients`` are lines such as
    ``config beta 0.1 -> 0.3``, as `agentrl diff` has them. ``other_tasks``: it is an evaluation of other tasks in each
    run, so nothing of it is compared task by task, and ``changed`` is empty."""

    stage: str
    only_in: str | None
    ingredients: list[str]
    metrics: list[TwoValues]
    rows: list[TwoValues]
    other_tasks: bool
    changed: list[ChangedRows]


class RunsCompared(Answer):
    """``runs`` are the newest 200 of this store and of each beside it, newest first. Without ``b`` it is the newest run
    of this store, without ``a`` the run of the same pipeline before it; they are None if there is none. ``same`` are
    the stages that both runs made alike, ``stages`` the others. ``version`` is that of this store's buffer which told
    the outcomes, None if nothing was ever appended."""

    version: int | None
    runs: list[RunName]
    a: RunSide | None
    b: RunSide | None
    same: list[str]
    stages: list[StageDifference]


class Side(NamedTuple):
    """A run that is compared, its store, and how names of that store begin here: STORE:, or nothing."""

    run: Run
    reader: StoreReader
    prefix: str


def runs_compared(reader: StoreReader, question: TwoRuns) -> RunsCompared:
    """Raises RefusedError if a run is not known. If nothing was ever appended, no rows are compared."""
    runs = all_runs(reader.catalog)
    listed = [RunName(**name_of(run)) for run in runs[:RUNS]]
    for store, other in reader.others().items():
        listed += [RunName(**name_of(run, f"{store}:")) for run in all_runs(other.catalog)[:RUNS]]
    after = _named(reader, "b", question.b) if question.b else _own(reader, next(iter(runs), None))
    before = (
        _named(reader, "a", question.a) if question.a else _own(reader, _before(runs, after.run if after else None))
    )
    own = reader.snapshot_if_any(question.at)
    return RunsCompared(
        version=None if own is None else own.version,
        runs=listed,
        a=_side(before),
        b=_side(after),
        **(_differences(before, after, question.at) if before and after else {"same": [], "stages": []}),
    )


def _differences(before: Side, after: Side, at: str | None) -> dict[str, Any]:
    """The stages that both runs made alike, and the others."""
    differing = diff_runs(before.reader.catalog, before.run, after.run, after.reader.catalog)
    shared = [name for name in before.run["stages"] if name in after.run["stages"]]
    stages = [_stage(name, difference, before, after, at) for name, difference in differing.items()]
    return {"same": [name for name in shared if name not in differing], "stages": stages}


def _own(reader: StoreReader, run: Run | None) -> Side | None:
    return Side(run, reader, "") if run else None


def _named(reader: StoreReader, field: str, text: str) -> Side:
    store, prefix, name = reader.elsewhere(text)
    return Side(run_named(store.catalog, name, field), store, prefix)


def _before(runs: list[Run], after: Run | None) -> Run | None:
    """The run of the same pipeline before another one."""
    if after is None:
        return None
    older = (run for run in runs if run["run_id"] < after["run_id"])
    return next((run for run in older if run.get("pipeline") == after.get("pipeline")), None)


def _side(side: Side | None) -> RunSide | None:
    return RunSide(**name_of(side.run, side.prefix), command=str(side.run.get("command", ""))) if side else None


def _stage(name: str, difference: dict[str, Any], before: Side, after: Side, at: str | None) -> StageDifference:
    made = [_made(side, name) for side in (before, after)] if "metrics" in difference else [None, None]
    first, other = made
    other_tasks = first is not None and other is not None and _other_tasks(first, other)
    changed: list[ChangedRows] = []
    if first and other and not other_tasks:
        changed = list(_changed((before, first), (after, other), at))
    return StageDifference(
        stage=name,
        only_in=difference.get("only_in"),
        ingredients=difference.get("ingredients", []),
        metrics=_values(difference.get("metrics", {})),
        rows=_values(difference.get("rows", {})),
        other_tasks=other_tasks,
        changed=changed,
    )


def _made(side: Side, stage: str) -> Manifest | None:
    return side.reader.catalog.manifest(stage, side.run["stages"][stage]["fingerprint"])


def _other_tasks(a: Manifest, b: Manifest) -> bool:
    """Whether two manifests are evaluations of different sets of tasks."""
    sets = [{record.digest for record in made.ingredients.inputs.get("tasks", [])} for made in (a, b)]
    return a.ingredients.uses == b.ingredients.uses == EVALUATION and sets[0] != sets[1]


def _values(values_of: dict[str, list[Any]]) -> list[TwoValues]:
    return [TwoValues(name=name, a=a, b=b) for name, (a, b) in values_of.items()]


def _changed(before: tuple[Side, Manifest], after: tuple[Side, Manifest], at: str | None) -> Iterator[ChangedRows]:
    """The selections of a stage in both runs."""
    for name, output in before[1].outputs.items():
        if output.kind is Kind.TRAJECTORIES and name in after[1].outputs:
            try:
                ids = [_ids(side.reader.catalog, made, name) for side, made in (before, after)]
                if not ids[0].equals(ids[1]):
                    yield _compared(name, before, after, ids[0], ids[1], at)
            except (OSError, StoreError):
                continue  # freed since the manifest was read, or nothing was ever appended


def _ids(catalog: Catalog, manifest: Manifest, output: str) -> pl.Series:
    table = pq.read_table(catalog.open(manifest, manifest.outputs[output].path), columns=["trajectory_id"])
    return pl.DataFrame(table)["trajectory_id"]


def _compared(
    output: str, before: tuple[Side, Manifest], after: tuple[Side, Manifest], a: pl.Series, b: pl.Series, at: str | None
) -> ChangedRows:
    sides = [_by_task(before[0], a, "a", at), _by_task(after[0], b, "b", at)]
    both = sides[0].join(sides[1], on=TASK)
    # 1 of 2 and 2 of 4 are one share; a task without an outcome differs from none
    differs = pl.col("a_solved") * pl.col("b_n") != pl.col("b_solved") * pl.col("a_n")
    differing = both.filter(differs).sort(TASK)
    return ChangedRows(
        output=output,
        a_artifact=before[0].prefix + label(before[1]),
        b_artifact=after[0].prefix + label(after[1]),
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


def _by_task(of: Side, ids: pl.Series, side: str, at: str | None) -> pl.DataFrame:
    """Tasks with ``{side}_solved`` and ``{side}_n`` attempts that have an outcome. Of another store the newest version
    of the buffer counts."""
    rows = of.reader.tables.at(None if of.prefix else at).columns(["trajectory_id", *TASK, "success", "segment"])
    chosen = rows.filter(pl.col("segment") == 0, pl.col("trajectory_id").is_in(ids.unique().implode()))
    solved, n = pl.col("success").sum().alias(f"{side}_solved"), pl.col("success").count().alias(f"{side}_n")
    return chosen.group_by(TASK).agg(solved, n)
