"""Commands on pipeline files: run, plan, validate, status, schedule, and what the library holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.flows.commands._common import BAD_INPUT, bad_pipeline, checked, fail, planned
from agentrl.flows.options import Json, PipelineOptions, PlanOptions, Profile, Settings, StoreOfFile, command
from agentrl.flows.terminal import console, say, say_json

if TYPE_CHECKING:
    from agentrl.pipelines.plan.plan import Plan

app = typer.Typer()


@command(app)
def run(
    source: PipelineOptions,
    choice: PlanOptions,
    store: StoreOfFile = None,
    jobs: Annotated[int, typer.Option(min=1, help="Stages that may run at once")] = 1,
    prefect: Annotated[
        bool | None,
        typer.Option("--prefect/--no-prefect", help="Default: if a stage needs it (retries, limits, slots, pools)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run what is not cached. If there is nothing to do, say so and start nothing."""
    plan, catalog = planned(source, store, choice, as_json)
    from agentrl.flows.run import run_plan

    raise typer.Exit(run_plan(plan, catalog, jobs=jobs, prefect=prefect, as_json=as_json))


@command(app)
def plan(
    source: PipelineOptions,
    choice: PlanOptions,
    store: StoreOfFile = None,
    placement: Annotated[bool, typer.Option(help="Also processes, GPUs and memory; refuse what cannot fit")] = False,
    trace: Annotated[
        bool,
        typer.Option(help="--placement with the memory of a training step that is run on tensors without values"),
    ] = False,
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Read files only: list the stages, and the code of yours that a plan runs")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what a run would do, stage by stage, and why."""
    if no_code:
        _list(source, as_json)
        return
    placement = placement or trace
    made, _ = planned(source, store, choice, as_json, runs_here=not placement)
    if placement:
        raise typer.Exit(_place(made, trace, as_json))
    from agentrl.flows.run import choose_engine

    engine = choose_engine(made, None)
    if as_json:
        say_json({**made.to_json(), "engine": "prefect" if engine.prefect else "none"})
        return
    from agentrl.flows.show import print_plan

    print_plan(console(), made)
    if engine.prefect and made.to_run:
        say(f"a run starts Prefect ({engine.reason})")


def _list(source: PipelineOptions, as_json: bool) -> None:
    from agentrl.flows.own_code import without_code
    from agentrl.pipelines.file.problems import SpecError

    try:
        stages = without_code(source.file, source.profile, source.settings or [])
    except SpecError as error:
        raise bad_pipeline(error, as_json) from None
    if as_json:
        say_json(stages)
        return
    from agentrl.flows.show import print_stages

    print_stages(console(), stages)


def _place(made: "Plan", trace: bool, as_json: bool) -> int:
    """Print what runs where, and whether it fits. Returns the exit code."""
    from agentrl.flows.show import print_placement
    from agentrl.pipelines.plan.placement import place

    placement = place(made.pipeline, trace)
    if as_json:
        rows = [row.to_json() for row in placement.rows]
        say_json({**made.to_json(), "placement": rows, "problems": placement.problems, "unknown": placement.unknown})
    else:
        print_placement(console(), placement)
    return BAD_INPUT if placement.problems else 0


@command(app)
def validate(source: PipelineOptions, store: StoreOfFile = None, as_json: Json = False) -> None:
    """Check a pipeline file and the store as a plan does, and report every problem. What a run on this machine lacks
    is said too, and what only the run can know; the exit code is 0 then."""
    from agentrl.pipelines.plan.proved import cannot_know

    made, missing = checked(source, store, as_json)
    pipeline = made.pipeline
    unknown = cannot_know(made)
    if as_json:
        names = {"pipeline": pipeline.name, "stages": list(pipeline.nodes), "store": made.store}
        say_json({"ok": True, "problems": [], **names, "missing_here": missing, "unknown": unknown})
        return
    say(f"{pipeline.path}: pipeline {pipeline.name} is valid, {len(pipeline.nodes)} stages")
    for reason in missing:
        say(f"a run here is refused: {reason}")
    for text in unknown:
        say(f"not known here: {text}")


@command(app)
def status(source: PipelineOptions, store: StoreOfFile = None, as_json: Json = False) -> None:
    """Show the state of a pipeline: what is cached since when, what is at work now, how its last run ended."""
    made, catalog = planned(source, store, PlanOptions(), as_json)
    from agentrl.flows.show import print_status
    from agentrl.pipelines.run.runs import all_runs

    runs = all_runs(catalog, made.pipeline.name)
    if as_json:
        say_json({**made.to_json(), "runs": runs[:5]})
    else:
        print_status(console(), made, runs)


@command(app)
def schedule(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file or name; or list, pause, resume, delete")],
    name: Annotated[str | None, typer.Argument(help="Of a schedule: PIPELINE or PIPELINE/NAME")] = None,
    cron: Annotated[str | None, typer.Option(help='When, e.g. "0 2 * * *"')] = None,
    timezone: Annotated[str | None, typer.Option(help="Of the schedule, e.g. Europe/Berlin; default UTC")] = None,
    pool: Annotated[str | None, typer.Option(help="Work pool; default: agentrl, created as a process pool")] = None,
    store: StoreOfFile = None,
    profile: Profile = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Run a pipeline on a schedule: FILE --cron "0 2 * * *"; or list, pause, resume, delete NAME."""
    from agentrl.flows import schedules

    if file in schedules.VERBS:
        raise typer.Exit(schedules.manage(file, name, as_json))
    if not cron:
        raise fail('error: say when, e.g. --cron "0 2 * * *"')
    made, _ = planned(PipelineOptions(file, profile, settings), store, PlanOptions(), as_json)
    raise typer.Exit(schedules.create(made, name or profile or "default", cron, timezone, pool, as_json))


@command(app)
def schema(
    what: Annotated[str, typer.Argument(help="pipeline, task, trajectory, pair or manifest, or a stage: train.sft")],
    as_json: Json = False,
) -> None:
    """Print a JSON Schema, for editors and other programs; it is JSON with and without --json."""
    from agentrl.flows.show import json_schema

    try:
        say_json(json_schema(what))
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None


@command(app)
def stages(
    name: Annotated[str | None, typer.Argument(help="A stage: of the library (train.sft), or module:function")] = None,
    as_json: Json = False,
) -> None:
    """List the stages of the library; with a name: its inputs, outputs, config and an example."""
    from agentrl.flows.stages import described, listed, print_described, print_listed

    if name is None:
        listing = listed()
        say_json(listing) if as_json else print_listed(console(), listing)
        return
    try:
        description = described(name)
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None
    say_json(description) if as_json else print_described(console(), description)
