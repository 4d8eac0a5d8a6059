"""The first page: the stage graph and the runs."""

import json
from collections.abc import Sequence

from pydantic import Field

from agentrl.datastore.errors import NoBufferError
from agentrl.flows.viewer.pages import graph
from agentrl.flows.viewer.pages.graph import StageBox
from agentrl.flows.viewer.pages.run import STOPPED, RunLine, run_line
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Query, RefusedError
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.run.runs import Run, all_runs
from agentrl.pipelines.secrets import redacted
from agentrl.schemas.manifest import Kind

RUNS = 50
PLAN_S = 5.0
"""Seconds that a question for a plan waits for it."""


class OfPipeline(Query):
    pipeline: str | None = None


class NamedPipeline(Query):
    pipeline: str = Field(min_length=1)


class WhatIf(NamedPipeline):
    set: list[str] = Field([], max_length=16)


class Filled(Answer):
    """The pages that have something to show, by their paths."""

    paths: list[str]


class Overview(Answer):
    """``version`` is None, and ``rows`` 0, if nothing was ever appended. ``pipeline`` is the one that ``stages``
    shows, that of the newest run unless asked for another. If it is not planned, ``stages`` is what its newest run
    recorded and ``problem`` says why. ``runs`` are the newest of ``n_runs``. ``planning`` is true while the plan is
    being made: ask again in a second."""

    store: str
    version: int | None
    rows: int
    pipeline: str | None
    problem: str | None
    planning: bool
    stages: list[StageBox]
    runs: list[RunLine]
    n_runs: int
    pipelines: list[str]


class PlanAnswer(Answer):
    """What would run if these settings had these values; nothing is run. A setting is as `agentrl plan --set` takes it,
    or STAGE.KEY for ``stages.STAGE.with.KEY``. ``problem`` says why there is no plan. ``planning`` is true while it is
    being made: ask again in half a second."""

    pipeline: str
    settings: list[str]
    problem: str | None
    planning: bool
    stages: list[StageBox]


class Setting(Answer):
    """``name`` is STAGE.KEY, as /api/plan takes it; ``value`` is JSON."""

    name: str
    value: str


class KnownSettings(Answer):
    """What the stages of a pipeline's newest run were configured with, as far as their artifacts are there."""

    pipeline: str
    settings: list[Setting]


def tabs(reader: StoreReader, question: Query) -> Filled:
    """Pages that have something to show. What shows runs is there from the first one on, whatever came of it."""
    made_now = reader.artifacts.all()
    kinds = {output.kind for made in made_now for output in made.outputs.values()}
    ran, rows = bool(all_runs(reader.catalog)), reader.tables.buffer.version is not None
    filled = {
        "/": True,
        "/buffer": rows,
        "/calls": rows,
        "/evaluation": any(made.ingredients.uses.startswith("evaluate.") for made in made_now),
        "/pair": Kind.PAIRS in kinds,
        "/training": ran,
        "/doctor": ran,
        "/curation": Kind.TRAJECTORIES in kinds,
        "/labels": rows,
        "/runs": ran,
    }
    return Filled(paths=[path for path, is_filled in filled.items() if is_filled])


def overview(reader: StoreReader, question: OfPipeline) -> Overview:
    """Raises RefusedError if no run is of the pipeline."""
    catalog, pipeline = reader.catalog, question.pipeline
    runs = all_runs(catalog)
    names = list(dict.fromkeys(str(run.get("pipeline", "")) for run in runs))
    shown = _newest(runs, pipeline)
    # no plan is made in less than a second, so the page does not wait: it shows what the run recorded, and asks again
    drawn = graph.planned(reader, shown, 0.0) if shown else graph.Drawn()
    stages = drawn.stages if drawn and drawn.stages else graph.recorded(shown, catalog) if shown else []
    own = shown.get("pipeline") if shown else None
    at_work = [run for run in runs if run["state"] == "running" and run.get("pipeline") == own]
    running = {name for run in at_work for name, stage in run["stages"].items() if stage["status"] == "running"}
    last = shown["stages"] if shown else {}
    ended = {name: stage for name, stage in last.items() if stage["status"] in STOPPED and name not in running}
    try:
        snapshot = reader.tables.at(None)
        version, rows = snapshot.version, snapshot.total
    except NoBufferError:
        version, rows = None, 0
    return Overview(
        store=reader.store,
        version=version,
        rows=rows,
        pipeline=own,
        problem=drawn.problem if drawn else None,
        planning=drawn is None,
        stages=graph.boxes(stages, frozenset(running), ended),
        runs=[run_line(run, catalog) for run in runs[:RUNS]],
        n_runs=len(runs),
        pipelines=names,
    )


def plan(reader: StoreReader, question: WhatIf) -> PlanAnswer:
    """What would run with other settings. Raises RefusedError if no run is of the pipeline."""
    pipeline, settings = question.pipeline, question.set
    run = _newest(all_runs(reader.catalog), pipeline)
    if wrong := [setting for setting in settings if "=" not in setting]:
        raise RefusedError(f"{wrong[0][:100]!r} is no setting", field="set", allowed=["STAGE.KEY=VALUE"])
    drawn: graph.Drawn | None = graph.Drawn()
    if run is not None:
        given = [_in_full(setting, run) for setting in settings]
        drawn = graph.planned(reader, run, PLAN_S, given)
    return PlanAnswer(
        pipeline=pipeline,
        settings=settings,
        problem=drawn.problem if drawn else None,
        planning=drawn is None,
        stages=graph.boxes(drawn.stages) if drawn else [],
    )


def settings(reader: StoreReader, question: NamedPipeline) -> KnownSettings:
    """What the stages of the pipeline's newest run were configured with. Raises RefusedError if no run is of it."""
    from agentrl.pipelines.results.measured import flat_config

    run, known = _newest(all_runs(reader.catalog), question.pipeline), []
    for stage, stage_run in run["stages"].items() if run else ():
        manifest = reader.catalog.manifest(stage, stage_run["fingerprint"]) if stage_run.get("fingerprint") else None
        config = flat_config(manifest.ingredients.config) if manifest else {}
        known += [Setting(name=f"{stage}.{key}", value=redacted(json.dumps(value))) for key, value in config.items()]
    return KnownSettings(pipeline=question.pipeline, settings=known)


def _in_full(setting: str, run: Run) -> str:
    """``dpo.beta=0.3`` as ``stages.dpo.with.beta=0.3``, if the run has a stage of this name."""
    stage, _, rest = setting.partition(".")
    return f"stages.{stage}.with.{rest}" if rest and stage in run["stages"] else setting


def _newest(runs: Sequence[Run], pipeline: str | None) -> Run | None:
    """The newest run of a pipeline, or of any. Raises RefusedError if there is none of this one."""
    names = list(dict.fromkeys(str(run.get("pipeline", "")) for run in runs))
    if pipeline and pipeline not in names:
        reason = f"no run is of pipeline {pipeline[:80]!r}{did_you_mean(pipeline, names)}"
        raise RefusedError(reason, field="pipeline", allowed=names, status=404)
    return next((run for run in runs if pipeline in (None, "", run.get("pipeline"))), None)
