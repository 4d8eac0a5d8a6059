"""The ``agentrl`` command. Each command imports what it needs when it is called, so that ``--help`` answers at once."""

import importlib
import json
import sys
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON")]


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=True)


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

    try:
        app(prog_name="agentrl")
    except StoreError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(CANCELLED)


if __name__ == "__main__":
    main()
