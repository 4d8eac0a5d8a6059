"""The ``agentrl`` command. Each command imports what it needs when it is called, so that ``--help`` answers at once."""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from datastore.catalog import Catalog
    from pipelines.load import Pipeline
    from pipelines.plan import Plan

COMMANDS = Path(__file__).parent / "commands"

BAD_INPUT = 2
CANCELLED = 130

PIPED_WIDTH = 160
"""Columns of tables that go to a file or another program."""


app = typer.Typer(
    name="agentrl",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="The offline data engine for agentic RL: plan, run and re-run pipelines over cached trajectories.",
)

File = Annotated[str, typer.Argument(help="A pipeline file, or the name of one in the library, e.g. quickstart")]
Store = Annotated[str, typer.Option(envvar="AGENTRL_STORE", help="Folder or s3://bucket/prefix")]
Profile = Annotated[str | None, typer.Option(help="A profile of the pipeline, e.g. cluster")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="stages.dpo.with.beta=0.3; may be repeated")]
Only = Annotated[list[str] | None, typer.Option(help="Only this stage, from cached inputs; may be repeated")]
From = Annotated[list[str] | None, typer.Option("--from", help="This stage and all after it")]
Until = Annotated[list[str] | None, typer.Option(help="This stage and all before it")]
Force = Annotated[bool, typer.Option("--force", help="Run what is selected though it is cached")]
Artifact = Annotated[str, typer.Argument(help="TAG, STAGE (its newest) or STAGE/FINGERPRINT")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    piped = not (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, soft_wrap=True, width=PIPED_WIDTH if piped else None)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def fail(message: str, code: int = BAD_INPUT) -> typer.Exit:
    """Print a message for the user on the standard error; raise what is returned."""
    typer.echo(message, err=True)
    return typer.Exit(code)


def load_pipeline(file: str, profile: str | None, settings: list[str] | None, as_json: bool = False) -> "Pipeline":
    """The pipeline, or exit code 2 with all its problems."""
    from pipelines.load import load
    from pipelines.problems import SpecError

    try:
        return load(file, profile=profile, settings=settings or ())
    except SpecError as error:
        raise bad_pipeline(error, as_json) from None


def bad_pipeline(error: Any, as_json: bool) -> typer.Exit:
    if as_json:
        print_json({"ok": False, "problems": [problem.to_json() for problem in error.problems]})
        return typer.Exit(BAD_INPUT)
    count = len(error.problems)
    return fail(
        "\n".join(
            ["error: " + (str(error) if count == 1 else f"{count} problems, nothing was run")]
            + ([f"  {problem}" for problem in error.problems] if count > 1 else [])
        )
    )


def open_catalog(store: str) -> "Catalog":
    from datastore.catalog import Catalog
    from datastore.errors import StoreError

    try:
        return Catalog(store)
    except StoreError as error:
        raise fail(f"error: {error}") from None


def planned(
    file: str,
    store: str,
    profile: str | None,
    settings: list[str] | None,
    only: list[str] | None,
    first: list[str] | None,
    until: list[str] | None,
    force: bool,
    as_json: bool,
) -> "tuple[Plan, Catalog]":
    from pipelines.plan import Selection, make_plan
    from pipelines.problems import SpecError

    pipeline = load_pipeline(file, profile, settings, as_json)
    catalog = open_catalog(store)
    selection = Selection(tuple(only or ()), tuple(first or ()), tuple(until or ()), force)
    try:
        return make_plan(pipeline, catalog, store, selection), catalog
    except SpecError as error:
        raise bad_pipeline(error, as_json) from None


@app.command()
def run(
    file: File,
    store: Store = "store",
    profile: Profile = None,
    settings: Settings = None,
    only: Only = None,
    first: From = None,
    until: Until = None,
    force: Force = False,
    jobs: Annotated[int, typer.Option(min=1, help="Stages that may run at once")] = 1,
    prefect: Annotated[bool, typer.Option("--prefect/--no-prefect", help="Without: no retries, limits, slots")] = True,
    as_json: Json = False,
) -> None:
    """Run what is not cached. With nothing to do it says so and starts nothing."""
    plan, catalog = planned(file, store, profile, settings, only, first, until, force, as_json)
    from flows.run import run_plan

    raise typer.Exit(run_plan(plan, catalog, jobs=jobs, prefect=prefect, as_json=as_json))


@app.command()
def plan(
    file: File,
    store: Store = "store",
    profile: Profile = None,
    settings: Settings = None,
    only: Only = None,
    first: From = None,
    until: Until = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say what a run would do, stage by stage, and why."""
    made, _ = planned(file, store, profile, settings, only, first, until, force, as_json)
    if as_json:
        print_json(made.to_json())
        return
    from flows.show import print_plan

    print_plan(console(), made)


@app.command()
def validate(file: File, profile: Profile = None, settings: Settings = None, as_json: Json = False) -> None:
    """Check a pipeline file and report every problem with its line."""
    pipeline = load_pipeline(file, profile, settings, as_json)
    if as_json:
        print_json({"ok": True, "problems": [], "pipeline": pipeline.name, "stages": list(pipeline.nodes)})
    else:
        typer.echo(f"{pipeline.path}: pipeline {pipeline.name} is valid, {len(pipeline.nodes)} stages")


@app.command()
def schema(
    what: Annotated[str, typer.Argument(help="pipeline, task, trajectory, pair or manifest, or a stage: train.sft")],
) -> None:
    """Print a JSON Schema, for editors and other programs."""
    from flows.show import json_schema

    try:
        print_json(json_schema(what))
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None


@app.command()
def status(
    file: File, store: Store = "store", profile: Profile = None, settings: Settings = None, as_json: Json = False
) -> None:
    """Say where a pipeline stands: what is cached since when, what is at work now, how its last run ended."""
    made, catalog = planned(file, store, profile, settings, None, None, None, False, as_json)
    from flows.show import print_status
    from pipelines.runs import all_runs

    runs = [run for run in all_runs(catalog) if run["pipeline"] == made.pipeline.name]
    if as_json:
        print_json({**made.to_json(), "runs": runs[:5]})
    else:
        print_status(console(), made, runs)


@app.command()
def runs(
    store: Store = "store",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many")] = 20,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    from flows.show import print_runs
    from pipelines.runs import all_runs, summary

    found = all_runs(open_catalog(store))[:limit]
    if as_json:
        print_json([summary(run) for run in found])
    else:
        print_runs(console(), found)


@app.command()
def show(
    what: Annotated[str, typer.Argument(help="A run (its id, or last), or an artifact: STAGE, STAGE/FINGERPRINT, TAG")],
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Show one run with durations, cache hits and failures, or one artifact."""
    from flows.show import print_artifact, print_run
    from pipelines.lineage import find_artifact
    from pipelines.runs import find_run

    catalog = open_catalog(store)
    try:
        if what == "last" or what[:1].isdigit():
            found = find_run(catalog, what)
            print_json(found) if as_json else print_run(console(), found)
        else:
            manifest = find_artifact(catalog, what)
            print_json(manifest.model_dump(mode="json")) if as_json else print_artifact(console(), manifest, catalog)
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None


@app.command()
def diff(run_a: str, run_b: str, store: Store = "store", as_json: Json = False) -> None:
    """Say what differs between two runs: config, code, inputs, metrics, row counts."""
    from flows.show import print_diff
    from pipelines.runs import diff_runs, find_run

    catalog = open_catalog(store)
    try:
        a, b = find_run(catalog, run_a), find_run(catalog, run_b)
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None
    found = diff_runs(catalog, a, b)
    if as_json:
        print_json({"a": a["run_id"], "b": b["run_id"], "stages": found})
    else:
        print_diff(console(), a, b, found)


@app.command()
def lineage(
    artifact: Artifact,
    store: Store = "store",
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flow chart")] = False,
    as_json: Json = False,
) -> None:
    """Show what an artifact was made from."""
    from flows.show import print_lineage
    from pipelines import lineage as lineages

    catalog = open_catalog(store)
    try:
        manifest = lineages.find_artifact(catalog, artifact)
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None
    root = lineages.lineage(catalog, manifest.ingredients.stage, manifest.fingerprint)
    if as_json:
        print_json(root.to_json())
    elif mermaid:
        typer.echo(lineages.mermaid(root))
    else:
        print_lineage(console(), root)


@app.command()
def tag(artifact: Artifact, name: str, store: Store = "store", as_json: Json = False) -> None:
    """Give an artifact a name; gc never frees it then."""
    from pipelines.lineage import find_artifact

    catalog = open_catalog(store)
    try:
        manifest = find_artifact(catalog, artifact)
    except LookupError as error:
        raise fail(f"error: {error.args[0]}") from None
    stage, fingerprint = manifest.ingredients.stage, manifest.fingerprint
    catalog.tag(name, stage, fingerprint)
    if as_json:
        print_json({"tag": name, "stage": stage, "fingerprint": fingerprint})
    else:
        typer.echo(f"{name} -> {stage}/{fingerprint[:8]}")


@app.command()
def gc(
    keep_runs: Annotated[int, typer.Option(min=0, help="Keep the artifacts of this many newest runs")],
    store: Store = "store",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be freed")] = False,
    as_json: Json = False,
) -> None:
    """Free artifacts that no kept run, tag or lineage needs. Rows of the buffer always stay."""
    from flows.show import print_garbage
    from pipelines.gc import collect, find_garbage

    garbage = (find_garbage if dry_run else collect)(open_catalog(store), keep_runs)
    if as_json:
        print_json({"dry_run": dry_run, **garbage.to_json()})
    else:
        print_garbage(console(), garbage, dry_run)


@app.command()
def schedule(
    what: Annotated[str, typer.Argument(help="A pipeline file or name; or list, pause, resume, delete")],
    name: Annotated[str | None, typer.Argument(help="Of a schedule: PIPELINE or PIPELINE/NAME")] = None,
    cron: Annotated[str | None, typer.Option(help='When, e.g. "0 2 * * *"')] = None,
    timezone: Annotated[str | None, typer.Option(help="Of the schedule, e.g. Europe/Berlin; default UTC")] = None,
    pool: Annotated[str | None, typer.Option(help="Work pool; default: agentrl, created as a process pool")] = None,
    store: Store = "store",
    profile: Profile = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Run a pipeline on a schedule: FILE --cron "0 2 * * *"; or list, pause, resume, delete NAME."""
    from flows import schedules

    if what in schedules.VERBS:
        raise typer.Exit(schedules.manage(what, name, as_json))
    if not cron:
        raise fail('error: say when, e.g. --cron "0 2 * * *"')
    made, _ = planned(
        file=what,
        store=store,
        profile=profile,
        settings=settings,
        only=None,
        first=None,
        until=None,
        force=False,
        as_json=as_json,
    )
    raise typer.Exit(schedules.create(made, name or profile or "default", cron, timezone, pool, as_json))


def _add_group(module: Path) -> None:
    """A command for one module of ``flows/commands``, which is imported only when it is called.

    Such a module holds a typer application ``app``; the first line of its docstring is its help.
    """

    def call(ctx: typer.Context) -> None:
        group = importlib.import_module(f"flows.commands.{module.stem}").app
        group(args=ctx.args, prog_name=f"agentrl {module.stem}")

    with module.open() as source:
        summary = source.readline().strip().strip('"')
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(module.stem, help=summary, add_help_option=False, context_settings=settings)(call)


for _module in sorted(COMMANDS.glob("[!_]*.py")):
    _add_group(_module)


def main() -> None:
    """Entry point of the ``agentrl`` script."""
    from datastore.errors import StoreError

    warnings.showwarning = lambda message, *_, **__: typer.echo(f"warning: {message}", err=True)
    try:
        app(prog_name="agentrl")
    except StoreError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(CANCELLED)


if __name__ == "__main__":
    main()
