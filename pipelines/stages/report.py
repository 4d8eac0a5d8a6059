"""The stage that tells what a pipeline achieved: Markdown for a terminal or a pull request, and one HTML page."""

import io
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from agentrl.chat.hermes import format_assistant
from agentrl.pipelines.handles import Report, Table, Trajectories
from agentrl.pipelines.parts.measures import FAILURES
from agentrl.pipelines.printable import markdown, markdown_code, printable
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.pipelines.stages.tags import by_tag
from agentrl.schemas.trajectory import CONTROL, Role
from agentrl.statistics.excluded import said_of_excluded

if TYPE_CHECKING:
    from agentrl.pipelines.results.gains import Gain

TEMPLATES = Path(__file__).parent.parent / "templates"
AGAIN, GIVEN_UP = ("retried",), ("env_errors", "infra_errors")
"""Metrics of evaluations: attempts that were made again, and episodes whose last attempt failed too."""

BLUE, ORANGE, GREY = "#2563eb", "#ea580c", "#94a3b8"


class ReportConfig(StageConfig):
    title: str = Field("Training report", description="heading of the page")
    examples: int = Field(2, ge=0, description="trajectories shown of each selection given as examples")


@stage("report.training", version=2, requires={"matplotlib": "report"})
def training_report(
    context: Context,
    config: ReportConfig,
    evaluations: list[Table],
    metrics: list[Table] = [],  # noqa: B006  (an input that may be left out)
    examples: list[Trajectories] = [],  # noqa: B006
    attempts: list[Trajectories] = [],  # noqa: B006
    tags: list[Table] = [],  # noqa: B006
) -> Report:
    """Success on the evaluated tasks stage by stage with intervals, by level, training curves and example trajectories.

    ``evaluations`` are results of ``evaluate.policy``, ``metrics`` those of training stages. ``attempts`` are rollouts
    of evaluations: those whose policies were made in the same way are compared in a table, with what varies between
    their configs, seeds pooled, and paired differences on the same tasks. ``tags`` are results of ``evaluate.tags``.
    """
    results = _results(evaluations)
    overall = [row for row in results if row["level"] == -1]
    names = [row["policy"] for row in overall if row["decoding"] == "sampled"]
    curves = {table.stage: table.table().to_pylist() for table in metrics}
    words = _gains(context, evaluations)
    shown = [
        {"stage": selection.stage, "trajectory": row, "turns": [_turn(message) for message in row.messages]}
        for selection in examples
        for row in context.buffer.get_many(selection.ids()[: config.examples])
    ]
    content = {
        "title": config.title,
        "fingerprint": context.fingerprint[:8],
        "seed": context.seed,
        "rows": [
            _row(overall, name, words.get(table.fingerprint)) for name, table in zip(names, evaluations, strict=True)
        ],
        "gains": list(map(str, words.values())),
        "examples": shown,
        "details": _details([row for row in overall if row["decoding"] == "sampled"]),
        "coverage": _coverage(context, metrics, curves),
        "warnings": _worse(context, evaluations),
        "failed": _failed(context, evaluations, overall),
        "sweeps": _sweeps(context, attempts),
        "by_tag": by_tag([row for table in tags for row in table.table().to_pylist()]),
        "plots": {
            "success": _success_plot(overall, names),
            "levels": _level_plot(results, names),
            **{name: _curve_plot(name, rows) for name, rows in curves.items()},
        },
    }
    return context.report(_rendered(content))


def _results(evaluations: list[Table]) -> list[dict[str, Any]]:
    """The results of all evaluations, each of which calls its policy by a name of its own: a policy may be evaluated on
    several splits, or on several sets of tasks of one split."""
    read = []
    for table in evaluations:
        rows = table.table().to_pylist()
        # the others are of one of several environments, or of tasks that a temperature was chosen on
        read.append([row for row in rows if not row.get("env") and row["decoding"] != "dev"])
    first = read[0][0]
    names = []
    for row, *_ in read:
        about = row["split"] if row["split"] != first["split"] else ""
        if not about and row["tasks"] != first["tasks"]:
            about = f"{row['tasks']} {row['split']}"
        names.append(", ".join(filter(None, [row["policy"], about])))
    often = Counter(names)
    for rows, name, table in zip(read, names, evaluations, strict=True):
        for row in rows:
            row["policy"] = f"{name} ({table.stage})" if often[name] > 1 else name
    return [row for rows in read for row in rows]


def _row(overall: list[dict[str, Any]], name: str, gain: "Gain | None") -> dict[str, Any]:
    """What is told of a policy: its results by decoding, and a word for what it gained over its predecessor."""
    ours = [row for row in overall if row["policy"] == name]
    results = {
        decoding: next((row for row in ours if row["decoding"] == decoding), None)
        for decoding in ("sampled", "greedy", CONTROL)
    }
    return {**results, "word": f"{gain.word} ({gain.than})" if gain else ""}


DETAILS = {
    "best_of_n": ("best of n", "{:.3f}"),
    "steps_over_optimum": ("steps over the optimum", "{:.2f}"),
    "recovered": ("recovered after a tool error", "{:.3f}"),
    "valid_calls": ("valid calls", "{:.3f}"),
    "violations_per_1000": ("violations per 1,000", "{:.1f}"),
    **{name: (f"failed by {name.replace('_', ' ')}", "{:.3f}") for name in FAILURES},
    "prompt_tokens": ("prompt tokens", "{:.0f}"),
    "completion_tokens": ("completion tokens", "{:.0f}"),
    "cost_usd": ("US dollars", "{:.4f}"),
    "latency_s": ("seconds", "{:.2f}"),
}
"""Measures of :mod:`agentrl.pipelines.parts.measures` -> their column and form."""


def _details(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The other measures at temperature 1, as a table: those that some policy has."""
    passes = sorted({name for row in rows for name in row if name.startswith("pass")}, key=lambda name: (name[4], name))
    forms = {name: (name, "{:.3f}") for name in passes} | DETAILS
    kept = {name: form for name, form in forms.items() if any(row.get(name) is not None for row in rows)}
    return {
        "columns": [column for column, _ in kept.values()],
        "rows": [
            [
                row["policy"],
                *(_cell(row, name, form) for name, (_, form) in kept.items()),
            ]
            for row in rows
        ],
    }


def _cell(row: dict[str, Any], name: str, form: str) -> str:
    """A measure, with its interval if it has one."""
    if row.get(name) is None:
        return ""
    low, high = row.get(f"low of {name}"), row.get(f"high of {name}")
    interval = "" if low is None or high is None else f" ({form.format(low)} - {form.format(high)})"
    return form.format(row[name]) + interval


def _coverage(context: Context, metrics: list[Table], curves: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What became of the tasks that online stages drew: a sentence for each stage, and a table by age. Each stage has
    checked it."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.results.coverage import COLUMNS, covered

    catalog, tables = Catalog(context.buffer.store), []
    for table in metrics:
        rows = curves[table.stage]
        tickets = sum(int(row.get("tickets") or 0) for row in rows)
        if not tickets:
            continue
        oldest = max(int(row["max_staleness"]) for row in rows)
        age = f"at most {oldest} version{'s' if oldest > 1 else ''} old" if oldest else "of the newest version"
        sentence = f"{table.stage} drew {tickets} tasks and trained on the rollouts of each of them once, {age}."
        manifest = catalog.manifest(table.stage, table.fingerprint)
        lines = covered(catalog, manifest) if manifest else []
        tables.append({"said": sentence, "columns": COLUMNS, "lines": lines})
    return tables


def _worse(context: Context, evaluations: list[Table]) -> list[str]:
    """What training made worse; each is a warning of the stage too."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.results.compare import regressions

    catalog = Catalog(context.buffer.store)
    manifests = [catalog.manifest(table.stage, table.fingerprint) for table in evaluations]
    losses = regressions(catalog, [manifest for manifest in manifests if manifest])
    for loss in losses:
        warnings.warn(loss, stacklevel=2)
    return losses


def _failed(context: Context, evaluations: list[Table], overall: list[dict[str, Any]]) -> list[str]:
    """What failed in evaluations by no doing of the policy: how often attempts were made again and given up, and which
    rates are doubtful; the latter are warnings of the stage too."""
    from agentrl.datastore.artifacts.catalog import Catalog

    catalog, told = Catalog(context.buffer.store), []
    for table in evaluations:
        manifest = catalog.manifest(table.stage, table.fingerprint)
        counts = manifest.metrics if manifest else {}
        again, given_up = (sum(int(counts.get(name) or 0) for name in names) for names in (AGAIN, GIVEN_UP))
        if again or given_up:
            attempts = int(counts.get("attempts") or 0)
            told.append(
                f"{table.stage}: of {attempts} attempts, {again} failed by no doing of the policy and were made again, "
                f"and {given_up} were given up; they are in no rate"
            )
    for row in overall:
        number = int(row.get("excluded") or 0)
        if doubt := said_of_excluded(number, number + int(row.get("attempts") or 0)):
            told.append(f"{row['policy']}, {row['decoding']}: {doubt}")
            warnings.warn(told[-1], stacklevel=2)
    return told


def _gains(context: Context, evaluations: list[Table]) -> "dict[str, Gain]":
    """What training gained over the control for sharpening, by the fingerprint of the evaluation that shows it."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.results.gains import gains

    catalog = Catalog(context.buffer.store)
    manifests = [catalog.manifest(table.stage, table.fingerprint) for table in evaluations]
    return gains(catalog, [manifest for manifest in manifests if manifest])


def _rendered(content: dict[str, Any]) -> dict[str, str]:
    """The files of a report, by name."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,  # markup that is safe stays
    )
    text = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True, undefined=StrictUndefined)
    text.filters |= {"plain": markdown, "code": markdown_code}
    return {
        "report.html": environment.get_template("report.html.j2").render(content),
        "report.md": text.get_template("report.md.j2").render(content),
    }


def _sweeps(context: Context, attempts: list[Trajectories]) -> list[dict[str, Any]]:
    """A table for each set of evaluations whose policies were made in the same way: its columns, rows and verdicts."""
    from agentrl.datastore.artifacts.catalog import Catalog
    from agentrl.pipelines.results.compare import sweeps, with_gains
    from agentrl.pipelines.results.measured import measure

    catalog = Catalog(context.buffer.store)
    tables = []
    for comparison in sweeps([measure(catalog, selection) for selection in attempts]):
        content = with_gains(catalog, comparison).to_json()
        seeds = any(arm["seeds"] for arm in content["arms"])
        columns = [*comparison.keys, "seeds"] if seeds else comparison.keys
        rows = [{**arm, "cells": {**arm["settings"], "seeds": ", ".join(arm["seeds"])}} for arm in content["arms"]]
        verdicts = [contrast["verdict"] for contrast in content["differences"]]
        tables.append({"keys": comparison.keys, "columns": columns, "rows": rows, "verdicts": verdicts})
    return tables


def _turn(message: Any) -> dict[str, str]:
    return {
        "role": message.role.value,
        "text": format_assistant(message) if message.role is Role.ASSISTANT else message.content,
    }


def _svg(figure: Any) -> str:
    """The figure as SVG text that is the same on every run."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "agentrl", "svg.fonttype": "none"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight", transparent=True)
    return out.getvalue()[out.getvalue().index("<svg") :]


def _axes(title: str, ylabel: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.0))  # pyplot takes half a second to import, and keeps figures
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    return figure, axes


def _success_plot(overall: list[dict[str, Any]], names: list[str]) -> str:
    figure, axes = _axes("Success by stage, with 95 % intervals", "success")
    for decoding, color, shift in (("sampled", BLUE, -0.08), ("greedy", GREY, 0.0), (CONTROL, ORANGE, 0.08)):
        known = {r["policy"]: r for r in overall if r["decoding"] == decoding}
        if not all(name in known for name in names):
            continue  # the control was not run
        rows = [known[name] for name in names]
        errors = [[r["success"] - r["low"] for r in rows], [r["high"] - r["success"] for r in rows]]
        label = {"sampled": "temperature 1", CONTROL: "best temperature"}.get(decoding, decoding)
        places = [index + shift for index in range(len(rows))]
        axes.errorbar(places, [r["success"] for r in rows], errors, fmt="o-", color=color, capsize=3, label=label)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right")
    return _svg(figure)


def _level_plot(results: list[dict[str, Any]], names: list[str]) -> str:
    figure, axes = _axes("Success at temperature 1, by level of the task", "success")
    levels = sorted({row["level"] for row in results} - {-1})
    width = 0.8 / max(1, len(levels))
    for index, level in enumerate(levels):
        rows = {r["policy"]: r["success"] for r in results if r["level"] == level and r["decoding"] == "sampled"}
        offsets = [number + (index - (len(levels) - 1) / 2) * width for number in range(len(names))]
        axes.bar(offsets, [rows.get(name, 0.0) for name in names], width * 0.9, label=f"level {level}", alpha=0.85)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    axes.set_ylim(0, 1.02)
    if levels:
        axes.legend(frameon=False, loc="upper left", fontsize=8)
    return _svg(figure)


def _curve_plot(name: str, rows: list[dict[str, Any]]) -> str:
    key = "success" if "success" in rows[0] else "loss"
    figure, axes = _axes(f"{name}: {key} of each step", key)
    axes.plot([row["step"] for row in rows], [row[key] for row in rows], color=BLUE if key == "success" else ORANGE)
    axes.set_xlabel("optimiser step")
    return _svg(figure)
