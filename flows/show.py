"""How plans, runs and artifacts are printed."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.display import metrics_text, seconds
from agentrl.pipelines.plan.placement import Placed, Placement
from agentrl.pipelines.plan.plan import Plan, Status
from agentrl.pipelines.results.coverage import COLUMNS, covered
from agentrl.pipelines.results.gains import gain_of
from agentrl.pipelines.results.gc import Garbage
from agentrl.pipelines.results.lineage import Lineage
from agentrl.pipelines.run.runs import Run, local_time, shards_of, summary
from agentrl.schemas.manifest import Kind, Manifest

NAMED = 5
"""Shards that are slow or set aside, which a status names."""
COLOURS = {Status.CACHED: "green", Status.RUN: "yellow", Status.BLOCKED: "red", Status.SKIPPED: "dim"}


def print_plan(console: Console, plan: Plan) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("stage", "uses", "status", "reason"):
        table.add_column(column, overflow="fold", no_wrap=column in ("stage", "uses"))
    for step in plan.steps.values():
        status = Text(str(step.status), style=COLOURS[step.status])
        table.add_row(step.name, step.node.stage.name, status, "; ".join(step.reasons))
    console.print(table)
    counts = ", ".join(f"{len(plan.having(status))} {status}" for status in Status if plan.having(status))
    console.print(f"{plan.pipeline.name}: {counts}; store {plan.store}", markup=False, highlight=False, soft_wrap=True)


def print_stages(console: Console, stages: list[dict[str, Any]]) -> None:
    """The stages of a file that was read without running code."""
    table = _table("stage", "uses", "reads", "code that a plan runs")
    for stage in stages:
        reads = "; ".join(f"{name}: {', '.join(edges)}" for name, edges in stage["reads"].items())
        table.add_row(stage["stage"], stage["uses"], reads, ", ".join(stage["code"]))
    console.print(table)
    count = len({file for stage in stages for file in stage["code"]})
    console.print(f"{len(stages)} stages, {count} files of your own; nothing was run, and configs were not checked")


def print_placement(console: Console, placement: Placement) -> None:
    table = _table("stage", "process", "count", "GPUs each", "GiB each", "of which")
    for row in map(Placed.to_json, placement.rows):
        count = f"{row['processes']} on {row['nodes']}" if row["nodes"] > 1 else str(row["processes"])
        parts = [f"{name} {size}" for name, size in row["parts_gib"].items()]
        parts += [f"(machine: {row['host_gib']})"] if row["host_gib"] else []
        more = "; ".join([", ".join(parts), *row["remarks"]])
        where = str(row["gpus_each"]) if row["gpus_each"] else "none"
        table.add_row(row["stage"], row["role"], count, where, str(row["gib"]), more)
    console.print(table)
    for text in placement.unknown:
        console.print(f"not known: {text}", markup=False, highlight=False)
    for text in placement.problems:
        console.print(f"cannot fit: {text}", markup=False, highlight=False)


def status_rows(plan: Plan, runs: list[Run]) -> list[dict[str, Any]]:
    """One row for each stage of a pipeline: its state, since when it is cached, how long it took in seconds, its
    metrics, how far it is, or why it would run."""
    working = {name: run["stages"][name] for run in runs if run["state"] == "running" for name in _running(run)}
    rows = []
    for step in plan.steps.values():
        manifest = step.manifest
        text = metrics_text(manifest.metrics) if manifest else "; ".join(step.reasons)
        rows.append(
            {
                "stage": step.name,
                "state": "running" if step.name in working else "cached" if manifest else "out of date",
                "since": manifest.created_at if manifest else None,
                "duration_s": manifest.duration_s if manifest else None,
                "metrics or reason": _how_far(working.get(step.name, {})) or text,
            }
        )
    return rows


def _how_far(stage: Mapping[str, Any]) -> str:
    """How far a stage that runs is, by the record of its run: what is done, of how much, which shards these are, and
    a line for each that is slow or was set aside."""
    progress = stage.get("progress")
    if not progress:
        return ""
    of = f" of {progress['total']}" if progress["total"] else ""
    shards = shards_of(stage)
    named = [each for each in shards.tries if each.state in ("slow", "set aside")] if shards else []
    lines = [f"{progress['done']}{of}{f' shards: {shards}' if shards else ''}"]
    return "\n".join([*lines, *(f"{each.state}: {each}" for each in named[:NAMED])])


def print_status(console: Console, plan: Plan, runs: list[Run]) -> None:
    table = _table("stage", "state", "since", "took", "metrics or reason")
    for row in status_rows(plan, runs):
        since = local_time(row["since"].isoformat()) if row["since"] else ""
        took = seconds(row["duration_s"]) if row["duration_s"] is not None else ""
        table.add_row(row["stage"], row["state"], since, took, row["metrics or reason"])
    console.print(table)
    last = f"last run: {runs[0]['run_id']}, {runs[0]['state']}" if runs else "no run"
    console.print(f"{last}; store {plan.store}", markup=False, highlight=False, soft_wrap=True)


def _running(run: Run) -> list[str]:
    return [name for name, stage in run["stages"].items() if stage["status"] == "running"]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_runs(console: Console, runs: list[Run]) -> None:
    table = _table("run", "pipeline", "state", "started", "took", "stages")
    for run in map(summary, runs):
        counts = ", ".join(f"{count} {status}" for status, count in run["stages"].items())
        took = seconds(run["duration_s"]) if run["duration_s"] is not None else ""
        started = local_time(run["started_at"])
        table.add_row(run["run_id"], run["pipeline"], run["state"], started, took, counts)
    console.print(table if runs else "no runs in this store yet")


def print_run(console: Console, run: Run) -> None:
    took = f" in {seconds(run['duration_s'])}" if run.get("duration_s") is not None else ""
    console.print(f"run {run['run_id']} of {run['pipeline']}: {run['state']}{took}", markup=False, highlight=False)
    console.print(f"{local_time(run['started_at'])}  {run['command']}", markup=False, highlight=False)
    table = _table("stage", "status", "took", "fingerprint", "reason, metrics, failure")
    for name, stage in run["stages"].items():
        took = seconds(stage["duration_s"]) if stage.get("duration_s") is not None else ""
        parts = ["; ".join(stage["reasons"]), metrics_text(stage.get("metrics") or {}), stage.get("cause") or ""]
        if stage.get("cause"):
            parts.append(f"log: {stage['log']}")
        text = "\n".join(part for part in parts if part)
        table.add_row(name, stage["status"], took, stage["fingerprint"][:8], text)
    console.print(table)


def print_artifact(console: Console, manifest: Manifest, catalog: Catalog) -> None:
    ingredients = manifest.ingredients
    console.print(
        f"{ingredients.stage}/{manifest.fingerprint}  ({ingredients.uses} version {ingredients.uses_version})"
    )
    console.print(f"made by run {manifest.run_id} in {seconds(manifest.duration_s)}", markup=False, highlight=False)
    table = _table("output", "kind", "rows", "digest", "path")
    for name, output in manifest.outputs.items():
        path = str(catalog.local(manifest, output.path))
        rows = "" if output.rows is None else str(output.rows)
        table.add_row(name, output.kind, rows, output.digest[:8], path)
    console.print(table)
    if manifest.metrics:
        console.print(metrics_text(manifest.metrics), markup=False, highlight=False)
    if "success_low" in manifest.metrics and (gained := gain_of(catalog, manifest)):
        console.print(str(gained), markup=False, highlight=False, soft_wrap=True)
    if lines := covered(catalog, manifest):
        console.print("coverage: each ticket was trained on once", markup=False, highlight=False)
        table = _table(*COLUMNS)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    if levels := funnel_of(catalog, manifest):
        console.print("funnel: what each rule left", markup=False, highlight=False)
        table = _table("rule", "before", "after", "dropped", "for example")
        for level in levels:
            numbers = (level["before"], level["after"], level["before"] - level["after"])
            table.add_row(level["rule"], *map(str, numbers), ", ".join(level["dropped_examples"]))
        console.print(table)
    for warning in manifest.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def funnel_of(catalog: Catalog, manifest: Manifest) -> list[dict[str, Any]]:
    """The funnel of a curation, a row for each rule: ``rule``, ``before``, ``after``, ``dropped_examples``. None if the
    artifact is of something else."""
    import pyarrow.parquet as pq

    output = manifest.outputs.get("funnel")
    if output is None or output.kind is not Kind.TABLE:
        return []
    table = pq.read_table(catalog.local(manifest, output.path))
    columns = ("rule", "before", "after", "dropped_examples")
    return table.to_pylist() if set(columns) <= {*table.column_names} else []


def print_diff(console: Console, a: Run, b: Run, differing: dict[str, dict[str, Any]]) -> None:
    if not differing:
        console.print(f"runs {a['run_id']} and {b['run_id']} have the same artifacts", highlight=False)
    for name, changes in differing.items():
        console.print(Text(name, style="bold"))
        lines = [f"only in {changes['only_in']}"] if "only_in" in changes else list(changes["ingredients"])
        for what in ("metrics", "rows"):
            for key, (before, after) in changes.get(what, {}).items():
                lines.append(f"{what} {key}: {_number(before)} -> {_number(after)}")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_lineage(console: Console, root: Lineage) -> None:
    """Lineage as a tree. An artifact that is read a second time is shown without what is below it. Lines are never
    cut."""
    lines = [_node_text(root)]
    shown: set[str] = set()
    todo = [("", _children(root))]
    while todo:
        prefix, children = todo[-1]
        if not children:
            todo.pop()
            continue
        name, below = children.pop(0)
        lines.append(prefix + ("├── " if children else "└── ") + name)
        if below and below.label in shown and below.inputs:
            lines[-1] += " (above)"
        elif below:
            shown.add(below.label)
            todo.append((prefix + ("│   " if children else "    "), _children(below)))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _children(node: Lineage) -> list[tuple[str, Lineage | None]]:
    outside = node.manifest.ingredients.externals if node.manifest else ()
    read: list[tuple[str, Lineage | None]] = [(_node_text(child, f"{name} = "), child) for name, child in node.inputs]
    return [*read, *((f"{what} (outside)", None) for what in outside)]


def _node_text(node: Lineage, prefix: str = "") -> str:
    about = f"{node.manifest.ingredients.uses}, run {node.manifest.run_id}" if node.manifest else "removed since"
    return f"{prefix}{node.label}  ({about})"


def print_garbage(console: Console, garbage: Garbage, dry_run: bool) -> None:
    for manifest in garbage.artifacts:
        console.print(f"artifact {manifest.ingredients.stage}/{manifest.fingerprint[:8]}", highlight=False)
    for folder in garbage.folders:
        console.print(f"leftover {folder}", markup=False, highlight=False)
    for attempt in garbage.attempts:
        console.print(f"attempt  {attempt}", markup=False, highlight=False)
    for run_id in garbage.live:
        console.print(f"live log of run {run_id}", markup=False, highlight=False)
    verb = "would free" if dry_run else "freed"
    left = len(garbage.folders) + len(garbage.attempts) + len(garbage.live)
    console.print(f"{verb} {len(garbage.artifacts)} artifacts and {left} leftovers; {garbage.kept} artifacts stay")


def json_schema(what: str) -> dict[str, Any]:
    """Of the pipeline file, a table's row, the manifest, or the config of a stage. Raises LookupError."""
    from agentrl.pipelines.file import library
    from agentrl.schemas.manifest import Manifest
    from agentrl.schemas.pair import Pair
    from agentrl.schemas.pipeline import PipelineSpec
    from agentrl.schemas.task import Task
    from agentrl.schemas.trajectory import Trajectory

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
