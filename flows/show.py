"""How plans, runs and artifacts are printed."""

from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.plan import Plan, Status

COLOURS = {Status.CACHED: "green", Status.RUN: "yellow", Status.BLOCKED: "red", Status.SKIPPED: "dim"}


def print_plan(console: Console, plan: Plan) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "uses", "status", "reason"):
        table.add_column(column, overflow="fold", no_wrap=column in ("stage", "uses"))
    for step in plan.steps.values():
        status = f"[{COLOURS[step.status]}]{step.status}[/]"
        table.add_row(escape(step.name), escape(step.node.stage.name), status, escape("; ".join(step.reasons)))
    console.print(table)
    counts = ", ".join(f"{len(plan.having(status))} {status}" for status in Status if plan.having(status))
    console.print(f"{plan.pipeline.name}: {counts}", markup=False, highlight=False)


def json_schema(what: str) -> dict[str, Any]:
    """Of the pipeline file, a table's row, the manifest, or the config of a stage. Raises LookupError."""
    from pipelines import library
    from schemas.manifest import Manifest
    from schemas.pair import Pair
    from schemas.pipeline import PipelineSpec
    from schemas.task import Task
    from schemas.trajectory import Trajectory

    models: dict[str, type[BaseModel]] = {
        "pipeline": PipelineSpec,
        "task": Task,
        "trajectory": Trajectory,
        "pair": Pair,
        "manifest": Manifest,
    }
    model: type[BaseModel] = models[what] if what in models else library.resolve(what).config
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **model.model_json_schema(by_alias=True)}
