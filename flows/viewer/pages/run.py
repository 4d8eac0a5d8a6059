"""One run: its stages, how far each came, why it stopped, and the command that does the rest."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.live_metrics import live_stages
from agentrl.flows.viewer.query.artifacts import label
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, Query, RefusedError
from agentrl.pipelines.run.runs import Run, find_run, shards_of
from agentrl.pipelines.secrets import redacted
from agentrl.schemas.manifest import Manifest

STOPPED = ("failed", "killed", "cancelled")
"""How a stage, or a run, may end before it is done."""
LOG_LINES, LOG_BYTES = 20, 2**16


class RunQuery(Query):
    run: str = Field(min_length=1, max_length=300)


class RunName(Answer):
    """A run. ``when`` it began is ISO 8601, UTC; ``seconds`` is None while it runs. ``run_id`` is STORE:ID if it is of
    another store than the page."""

    run_id: str
    pipeline: str
    when: str
    seconds: float | None
    state: str


class RunLine(RunName):
    """``failed_stage`` is the stage at which it stopped, if it failed, was killed or was cancelled; ``cause`` says why,
    as far as that is known, and ``log_tail`` holds the last lines of its log. ``go_on`` is the command that does the
    rest, empty if nothing is left."""

    failed_stage: str | None
    cause: str
    log_tail: str
    go_on: str


class StageProgress(Answer):
    """How far a stage is: ``done`` of ``total`` (None if nobody knows how much there is to do), and the seconds that
    are left at the speed so far."""

    done: int
    total: int | None
    left_s: float | None


class StageShard(Answer):
    """A shard that is not done: ``waiting`` for a worker, ``running``, ``slow`` or ``set aside`` for its ``problem``;
    its worker (empty if there is none), and how long that was at it when the record was written."""

    shard: str
    state: str
    worker: str
    seconds: float | None
    problem: str


class StageShards(Answer):
    """What shards of a stage do besides those that are done, which its progress counts. ``text`` says their step and
    how many are in each state; ``shards`` are the first of them, those set aside first, and ``more`` is how many
    others there are."""

    text: str
    shards: list[StageShard]
    more: int


class StoppedRun(Answer):
    """A run that failed or was killed, after which no run of its pipeline was completed, and the stage at which it
    stopped."""

    run_id: str
    pipeline: str
    stage: str | None
    state: str


class RunStage(Answer):
    """A stage of a run. ``artifact`` is STAGE/FINGERPRINT if it is there; ``uses`` is empty if neither it nor the
    record says that. ``cause`` says why it failed, and ``warnings`` what it warned of. ``live`` is true if its metrics
    are written now, ``curves`` if the metrics of a stage without an artifact are there. ``progress`` is how far it is,
    or how far it came, and ``shards`` what its shards do, for stages that are divided and at work or were stopped.
    ``log`` is the file of its log on the viewer's machine, empty if there is none; ``log_tail`` has
    its last lines, for stages that are at work or were stopped."""

    stage: str
    uses: str
    status: str
    artifact: str | None
    reasons: list[str]
    cause: str
    warnings: list[str]
    started: str
    seconds: float | None
    live: bool
    curves: bool
    progress: StageProgress | None
    shards: StageShards | None
    log: str
    log_tail: str


class RunAnswer(RunName):
    """A run with its stages. ``gone`` says how it is known that a killed one ended. ``go_on`` is the command that does
    the rest of a run that was stopped, empty if nothing is left."""

    command: str
    host: str
    gone: str
    go_on: str
    stages: list[RunStage]


def name_of(run: Run, prefix: str = "") -> dict[str, Any]:
    """What a :class:`RunName` says. ``prefix`` names the store, if it is another one."""
    return {
        "run_id": prefix + run["run_id"],
        "pipeline": str(run.get("pipeline", "")),
        "when": str(run.get("started_at", "")),
        "seconds": run.get("duration_s"),
        "state": run["state"],
    }


def run_line(run: Run, catalog: Catalog) -> RunLine:
    stage = stopped_at(run)
    recorded = run["stages"].get(stage, {}) if stage else {}
    return RunLine(
        **name_of(run),
        failed_stage=stage,
        cause=redacted(str(recorded.get("cause", "") or run.get("gone", ""))),
        log_tail=log_tail(log_of(catalog, run["run_id"], stage)) if stage else "",
        go_on=go_on(run),
    )


def stopped_at(run: Run) -> str | None:
    """The stage at which a run stopped before it was done; None if there is none."""
    stopped = {name: stage["status"] for name, stage in run["stages"].items() if stage["status"] in STOPPED}
    return next((name for status in STOPPED for name, its in stopped.items() if its == status), None)


def go_on(run: Run) -> str:
    """The command that does the rest of a run that was stopped: the same one, since what is done is there. Empty if
    the run is at work or nothing is left."""
    return redacted(str(run.get("command", ""))) if run["state"] in STOPPED else ""


def not_run_again(runs: Iterable[Run]) -> Iterator[StoppedRun]:
    """Of ``runs``, newest first, those that failed or were killed and that no completed run of their pipeline follows.
    What was cancelled was stopped by somebody who knows it."""
    completed = set()
    for run in runs:
        pipeline = str(run.get("pipeline", ""))
        if run["state"] == "completed":
            completed.add(pipeline)
        elif run["state"] in ("failed", "killed") and pipeline not in completed:
            yield StoppedRun(run_id=run["run_id"], pipeline=pipeline, stage=stopped_at(run), state=run["state"])


def progress_of(stage: Mapping[str, Any]) -> StageProgress | None:
    """How far the record of a run says that a stage is; None if it does not say."""
    try:
        return StageProgress.model_validate(stage.get("progress"))
    except ValidationError:
        return None


def run_named(catalog: Catalog, text: str, field: str = "run") -> Run:
    """A run by its id, the beginning of it, or ``last``. Raises RefusedError that names ``field`` if there is none."""
    try:
        return find_run(catalog, text)
    except LookupError as error:
        raise RefusedError(str(error.args[0]), field=field, status=404) from None


def run(reader: StoreReader, question: RunQuery) -> RunAnswer:
    """Raises RefusedError if there is no such run."""
    catalog, artifacts = reader.catalog, reader.artifacts
    record = run_named(catalog, question.run)
    live = live_stages(catalog.storage, record["run_id"])
    made = {name: artifacts.find(name, stage.get("fingerprint") or "") for name, stage in record["stages"].items()}
    return RunAnswer(
        **name_of(record),
        command=redacted(str(record.get("command", ""))),
        host=str(record.get("host", "")),
        gone=str(record.get("gone", "")),
        go_on=go_on(record),
        stages=[_stage(catalog, record, name, made[name], name in live) for name in record["stages"]],
    )


def _stage(catalog: Catalog, run: Run, name: str, made: Manifest | None, has_log: bool) -> RunStage:
    stage = run["stages"][name]
    status = stage["status"]
    log = log_of(catalog, run["run_id"], name) if status in ("running", *STOPPED) else None
    return RunStage(
        stage=name,
        uses=made.ingredients.uses if made else str(stage.get("uses", "")),
        status=status,
        artifact=label(made) if made else None,
        reasons=[redacted(str(text)) for text in stage.get("reasons", [])],
        cause=redacted(str(stage.get("cause", ""))),
        warnings=[redacted(str(text)) for text in stage.get("warnings", [])],
        started=str(stage.get("started_at", "")),
        seconds=stage.get("duration_s"),
        live=has_log and status == "running" and run["state"] == "running",
        curves=has_log and status in STOPPED and made is None,
        progress=progress_of(stage),
        shards=_shards(stage) if status in ("running", *STOPPED) else None,
        log=str(log) if log else "",
        log_tail=log_tail(log),
    )


def _shards(stage: Mapping[str, Any]) -> StageShards | None:
    """What the record says of a stage's shards. The words of workers may hold what is secret."""
    now = shards_of(stage)
    if now is None:
        return None
    shards = [StageShard(**each.model_dump() | {"problem": redacted(each.problem)}) for each in now.tries]
    return StageShards(text=str(now), shards=shards, more=sum(now.counts.values()) - len(shards))


def log_of(catalog: Catalog, run_id: str, stage: str) -> Path | None:
    """The file of a stage's log; None if there is none on this machine. It is looked up in the folder of logs: what a
    record says of it is not believed, since a store may come from others."""
    from agentrl.flows.session import logs_folder  # which imports all that runs stages

    logs = logs_folder(catalog)
    folder = _child(logs, run_id)
    file = _child(folder, f"{stage}.log") if folder else None
    if file is None or not file.resolve().is_relative_to(logs.resolve()) or not file.is_file():
        return None
    return file


def log_tail(file: Path | None) -> str:
    """The last lines of a log; empty if there is none."""
    if file is None:
        return ""
    with file.open("rb") as source:
        source.seek(max(0, file.stat().st_size - LOG_BYTES))
        lines = source.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
    return redacted("\n".join(lines[-LOG_LINES:]))


def _child(folder: Path, name: str) -> Path | None:
    """The file or folder of this name that lies in a folder."""
    try:
        return next((child for child in folder.iterdir() if child.name == name), None)
    except OSError:
        return None
