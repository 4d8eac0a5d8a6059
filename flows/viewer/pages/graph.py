"""The stage graph of a pipeline: what a plan says of it, and where each stage is drawn."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer
from agentrl.pipelines.file.document import library_files
from agentrl.pipelines.run.runs import Run
from agentrl.pipelines.secrets import redacted

Stage = Mapping[str, Any]
"""One stage of ``agentrl plan --json``."""


class StageInput(Answer):
    """An edge of the graph: the stage that is read. ``reason`` says why this edge makes the stage run; None if it does
    not."""

    stage: str
    reason: str | None


class StageBox(Answer):
    """A stage of the pipeline. ``status`` is that of the plan (cached, run, blocked, skipped), ``running``, or how the
    stage ended in the newest run if it is to run again (failed, killed, cancelled); ``reason`` then says why. ``x`` is
    the column and ``y`` the row in the drawing, from 0. ``artifact`` is STAGE/FINGERPRINT if it is there."""

    id: str
    stage: str
    uses: str
    artifact: str | None
    status: Literal["cached", "run", "blocked", "skipped", "running", "failed", "killed", "cancelled"]
    reason: str
    fingerprint: str
    seconds: float | None
    inputs: list[StageInput]
    x: int
    y: int


@dataclass(frozen=True)
class Drawn:
    """What ``agentrl plan`` said of a pipeline, or why it could not."""

    stages: Sequence[Stage] = ()
    problem: str | None = None


def planned(reader: StoreReader, run: Run, wait: float, settings: Sequence[str] = ()) -> Drawn | None:
    """The plan of a run's pipeline as it is now, with other ``settings``; None if there is none after ``wait``
    seconds. The user's code is imported by a process of its own."""
    arguments, problem = plan_arguments(run, reader.catalog, reader.store)
    if problem:
        return Drawn(problem=problem)
    told = reader.plans.of([*arguments, *(f"--set={setting}" for setting in settings)], wait)
    if told is None:
        return None
    if told.problem:
        return Drawn(problem=f"the plan could not be made: {told.problem}")
    if problems := told.answer.get("problems"):
        reasons = "; ".join(str(problem.get("message", problem)) for problem in problems[:3])
        return Drawn(problem=f"the pipeline cannot be planned any more: {reasons}")
    return Drawn(stages=told.answer["stages"])


def plan_arguments(run: Run, catalog: Catalog, store: str) -> tuple[list[str], str | None]:
    """The arguments of `agentrl plan` for a run's pipeline, and why it is not planned, if so.

    A plan imports the user's classes, and a store may come from others. So a file is planned only if it is in the
    library, or below the folder where the viewer was started and not in the store.
    """
    try:
        words = shlex.split(str(run.get("command", "")))
    except ValueError:
        words = []
    file = Path(str(run.get("file", "")))
    reference = words[2] if words[:2] == ["agentrl", "run"] and len(words) > 2 else ""
    if reference not in library_files():
        try:
            here, own = Path.cwd().resolve(), file.resolve()
        except (OSError, ValueError):  # no path at all
            return [], f"the run names no pipeline file: {str(file)[:80]!r}"
        inside = isinstance(catalog.storage, LocalStorage) and own.is_relative_to(catalog.storage.root.resolve())
        if not own.is_relative_to(here) or inside or not own.is_file():
            reason = (
                f"{file} is not in this folder: to see its plan, start `agentrl view` in the folder of the pipeline"
            )
            return [], reason
        reference = str(own)
    more: list[str] = []
    for option, value in pairwise(words):
        if option in ("--profile", "--set"):
            more += [f"{option}={value}"]
    return ["plan", reference, *more, "--store", store, "--json"], None


_STATUS = {"ran": "cached", "reused": "cached", "cached": "cached", "blocked": "blocked", "skipped": "skipped"}


def recorded(run: Run, catalog: Catalog) -> list[Stage]:
    """The stages as a run recorded them, in the form of a plan. Edges are those of the artifacts that are there."""
    stages: list[Stage] = []
    for name, stage in run["stages"].items():
        manifest = catalog.manifest(name, stage["fingerprint"]) if stage.get("fingerprint") else None
        inputs = manifest.ingredients.inputs if manifest else {}
        stages.append(
            {
                "stage": name,
                "uses": manifest.ingredients.uses if manifest else str(stage.get("uses", "")),
                "status": _STATUS.get(stage["status"], "run") if manifest else "run",
                "reasons": stage.get("reasons", []) if manifest is None else [],
                "fingerprint": stage.get("fingerprint") or None,
                "inputs": {key: [f"{edge.stage}.{edge.output}" for edge in edges] for key, edges in inputs.items()},
                "duration_s": manifest.duration_s if manifest else stage.get("duration_s"),
            }
        )
    return stages


def boxes(
    stages: Sequence[Stage], running: frozenset[str] = frozenset(), ended: Mapping[str, Stage] | None = None
) -> list[StageBox]:
    """Stages with their places. ``running`` are at work now. ``ended`` is what the newest run recorded of those that it
    did not get done: they look so for as long as they are to run again."""
    reads = {stage["stage"]: _upstream(stage, stages) for stage in stages}
    places = layout(reads)
    return [
        StageBox(
            id=stage["stage"],
            stage=stage["stage"],
            uses=stage["uses"],
            artifact=_artifact(stage),
            **_state(stage, stage["stage"] in running, (ended or {}).get(stage["stage"])),
            fingerprint=stage["fingerprint"] or "",
            seconds=stage["duration_s"],
            inputs=[
                StageInput(stage=name, reason=_reason_of(name, stage["reasons"])) for name in reads[stage["stage"]]
            ],
            x=places[stage["stage"]][0],
            y=places[stage["stage"]][1],
        )
        for stage in stages
    ]


def _state(stage: Stage, running: bool, ended: Stage | None) -> dict[str, Any]:
    """Status and reason of a box."""
    again = ended if stage["status"] == "run" else None
    cause = [redacted(str(again["cause"]))] if again and again.get("cause") else []
    status = "running" if running else again["status"] if again else stage["status"]
    return {"status": status, "reason": "; ".join([*cause, *stage["reasons"]])}


def _artifact(stage: Stage) -> str | None:
    fingerprint = stage["fingerprint"] if stage["status"] == "cached" else None
    return f"{stage['stage']}/{fingerprint[:8]}" if fingerprint else None


def _upstream(stage: Stage, stages: Sequence[Stage]) -> list[str]:
    known = {stage_read["stage"] for stage_read in stages}
    edges = [edge.rpartition(".")[0] for each in stage["inputs"].values() for edge in each]
    return [name for name in dict.fromkeys(edges) if name in known]


def _reason_of(name: str, reasons: Sequence[str]) -> str | None:
    """The reason that an input gives, as plans word it: ``input NAME is made again``."""
    reasons_of_input = [reason for reason in reasons if reason.startswith(f"input {name} ")]
    return "; ".join(reasons_of_input) or None


def layout(reads: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, int]]:
    """Column and row of each stage. ``reads`` is what each reads, in an order in which they can run.

    The column is the longest way from a stage without inputs, so every edge points to the right. In a column, a stage
    stands at the mean row of what it reads (Sugiyama's barycentre heuristic, one sweep), which keeps edges short and
    mostly uncrossed.
    """
    columns: dict[str, int] = {}
    for name, above in reads.items():
        columns[name] = max((columns[stage_above] + 1 for stage_above in above if stage_above in columns), default=0)
    places: dict[str, tuple[int, int]] = {}
    for column in range(max(columns.values(), default=-1) + 1):
        members = [name for name, own in columns.items() if own == column]
        mean = {
            name: _mean([places[stage_above][1] for stage_above in reads[name] if stage_above in places])
            for name in members
        }
        taken = -1
        for name in sorted(members, key=lambda name: mean[name]):
            taken = max(taken + 1, round(mean[name]))
            places[name] = (column, taken)
    return places


def _mean(rows: Sequence[int]) -> float:
    return sum(rows) / len(rows) if rows else 0.0
