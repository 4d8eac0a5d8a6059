"""What commands share: loading a pipeline, opening a store, and ending with an exit code.

Exit codes: 0 done; 1 the work failed, or a check found something; 2 what was asked cannot be done; 130 Ctrl-C.
"""

from typing import TYPE_CHECKING, Any

import typer

from agentrl.flows.options import PipelineOptions, PlanOptions
from agentrl.flows.terminal import say, say_json

if TYPE_CHECKING:
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.datastore.buffer import TrajectoryBuffer
    from agentrl.pipelines.file.load import ResolvedPipeline
    from agentrl.pipelines.file.problems import SpecError
    from agentrl.pipelines.plan.plan import Plan

FAILED = 1
BAD_INPUT = 2
CANCELLED = 130


def fail(message: str, code: int = BAD_INPUT) -> typer.Exit:
    """Print a message for the user on the standard error; raise what is returned."""
    say(message, stderr=True)
    return typer.Exit(code)


def on_secrets(value: str | None, *allowed: str) -> Any:
    """A choice of ``--secrets``, or exit code 2 if it is none of ``allowed`` or its detectors are not installed."""
    if value is None:
        return None
    from agentrl.schemas.installation import missing

    if value not in allowed:
        raise fail(f"error: --secrets {value}: allowed {'is' if len(allowed) == 1 else 'are'} {', '.join(allowed)}")
    if lack := missing("detect_secrets", "redact") or missing("phonenumbers", "redact"):
        raise fail(f"error: {lack}")
    return value


def load_pipeline(
    source: PipelineOptions, as_json: bool = False, store: str | None = None, runs_here: bool = True
) -> "ResolvedPipeline":
    """The pipeline, or exit code 2 with all its problems, and those of ``store`` if one is given."""
    from agentrl.pipelines.file.load import load
    from agentrl.pipelines.file.problems import SpecError
    from agentrl.pipelines.file.readiness import unusable

    problems = unusable(store) if store is not None else []
    try:
        pipeline = load(source.file, profile=source.profile, settings=source.settings or (), runs_here=runs_here)
    except SpecError as error:
        raise bad_pipeline(SpecError([*error.problems, *problems]), as_json) from None
    if problems:
        raise bad_pipeline(SpecError(problems), as_json)
    return pipeline


def bad_pipeline(error: "SpecError", as_json: bool) -> typer.Exit:
    """Print all problems of a pipeline. Returns the exit to raise, with code 2."""
    if as_json:
        say_json({"ok": False, "problems": [problem.to_json() for problem in error.problems]})
        return typer.Exit(BAD_INPUT)
    count = len(error.problems)
    first = "error: " + (str(error) if count == 1 else f"{count} problems, nothing was run")
    return fail("\n".join([first, *(f"  {problem}" for problem in error.problems if count > 1)]))


def planned(
    source: PipelineOptions, store: str | None, choice: PlanOptions, as_json: bool, runs_here: bool = True
) -> "tuple[Plan, Catalog]":
    """The plan of a pipeline and the catalog of the store, or exit code 2 with all problems. ``runs_here`` False asks
    for no optional packages."""
    return _planned(load_pipeline(source, as_json, runs_here=runs_here), store, choice, as_json)


def _planned(
    pipeline: "ResolvedPipeline", store: str | None, choice: PlanOptions, as_json: bool
) -> "tuple[Plan, Catalog]":
    from agentrl.pipelines.file.document import default_store
    from agentrl.pipelines.file.problems import SpecError
    from agentrl.pipelines.plan.plan import Selection as Stages
    from agentrl.pipelines.plan.plan import make_plan

    store = store or default_store(pipeline.path)
    catalog = open_catalog(store)
    stages = Stages(tuple(choice.only or ()), tuple(choice.first or ()), tuple(choice.until or ()), choice.force)
    try:
        return make_plan(pipeline, catalog, store, stages), catalog
    except SpecError as error:
        raise bad_pipeline(error, as_json) from None


def checked(source: PipelineOptions, store: str | None, as_json: bool) -> "tuple[Plan, list[str]]":
    """The plan of a pipeline, and why a run of it on this machine would be refused; or exit code 2 with all problems,
    those of the store included."""
    from agentrl.flows.run import choose_engine, obstacles
    from agentrl.pipelines.file.document import default_store, find
    from agentrl.pipelines.file.problems import SpecError

    try:
        store = store or default_store(find(source.file))
    except SpecError as error:
        raise bad_pipeline(error, as_json) from None
    made, _ = _planned(load_pipeline(source, as_json, store), store, PlanOptions(), as_json)
    return made, [reason.removeprefix("error: ") for reason in obstacles(made, choose_engine(made, None).prefect)]


def open_catalog(store: str) -> "Catalog":
    from agentrl.datastore.artifacts.catalog import Catalog

    return Catalog(store)


def open_buffer(store: str) -> "TrajectoryBuffer":
    from agentrl.datastore.buffer import TrajectoryBuffer

    return TrajectoryBuffer(store)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows as a table, or as JSON."""
    if as_json:
        say_json(rows)
        return
    from agentrl.flows.commands import _render
    from agentrl.flows.terminal import console

    _render.print_rows(console(), rows)
