"""Training as it was and as it goes on: metrics by step, the rows of a step, and what changes now."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from functools import partial

import anyio
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.live_metrics import length, lines_after, live_stages
from agentrl.datastore.errors import StoreError
from agentrl.doctor.curves import ESS, KL
from agentrl.flows.viewer.pages.run import STOPPED, StageProgress, StoppedRun, not_run_again, progress_of
from agentrl.flows.viewer.query.artifacts import Artifacts, label
from agentrl.flows.viewer.query.tables import Tables, plain
from agentrl.flows.viewer.reader import StoreReader
from agentrl.flows.viewer.wire import Answer, AtVersion, Query, RefusedError
from agentrl.pipelines.diagnose import bands_of
from agentrl.pipelines.results.learned import rows_of_step
from agentrl.pipelines.run.runs import Run, all_runs
from agentrl.schemas.manifest import Manifest

PULSE_S = 0.5
"""Seconds between two looks at the store."""
RUNS, RUNS_S = 50, 10.0
"""How many runs are looked at, and seconds for which their records are believed."""
OF_ROWS = ("group_id", "reward", "success", "task_id", "env", "policy_version")
BOUNDED = ("reference_kl", "behaviour_kl", "sampler_kl", "clip_share", "success", "ess")
"""Metrics that the doctor bounds."""


class ArtifactQuery(Query):
    """``STORE:STAGE/FINGERPRINT`` is of another store that is shown beside this one."""

    artifact: str


class StagesQuery(Query):
    """``beside``: artifacts of the stores beside this one too."""

    beside: bool = False


class StepQuery(AtVersion):
    artifact: str
    step: int = Field(ge=0, lt=2**31)


class LinesQuery(Query):
    run_id: str
    stage: str
    cursor: int = Field(0, ge=0, lt=2**53)


class SickBand(Answer):
    """``metric`` counts as sick ``above`` the bound, or below it; ``counts`` is what is compared with it."""

    metric: str
    bound: float
    above: bool
    counts: str


class TrainingStage(Answer):
    """A training artifact, a stage that trains now, or one that ended without an artifact: then ``ended`` says how, as
    in ``killed``. ``artifact`` is STAGE/FINGERPRINT, None if there is none; then its metrics come from /api/live/lines.
    ``series`` are the columns of its metrics, ``bands`` the doctor's bounds on them; without an artifact those that do
    not depend on its config. ``when`` is ISO 8601."""

    artifact: str | None
    stage: str
    uses: str
    run_id: str
    when: str
    steps: int
    series: list[str]
    bands: list[SickBand]
    ended: str | None = None


class TrainingStages(Answer):
    """Newest first, those without an artifact before the others."""

    stages: list[TrainingStage]


class Pulse(Answer):
    """``version`` of the buffer; the state of the newest 50 runs by id, newest first; of those at work, by RUN/STAGE,
    the status of the stages, how far they are, and the bytes of the live logs. ``stopped`` are those of them that
    failed or were killed and not run again. A client asks for rows and lines after what it has."""

    version: int | None
    runs: dict[str, str]
    stages: dict[str, str]
    progress: dict[str, StageProgress]
    live: dict[str, int]
    stopped: list[StoppedRun]


class LiveAnswer(Answer):
    """Lines after a cursor (bytes), each the JSON of a step's metrics, and the cursor after them. If the log began
    again, ``restarted`` is true and so do the lines."""

    lines: list[str]
    cursor: int
    restarted: bool


ALWAYS = [
    SickBand(metric="reference_kl", bound=KL, above=True, counts="its highest value"),
    SickBand(metric="ess", bound=ESS, above=False, counts="the mean of all steps"),
]
"""Bounds that depend on no config."""


def stages(reader: StoreReader, question: StagesQuery) -> TrainingStages:
    """What trained, and what trains now."""
    catalog, artifacts = reader.catalog, reader.artifacts
    listed = [
        unfinished for run in all_runs(catalog)[:RUNS] for unfinished in _without_artifact(catalog, artifacts, run)
    ]
    for manifest in artifacts.all():
        if manifest.ingredients.uses.startswith("train.") and "metrics" in manifest.outputs:
            try:
                listed.append(reader.trained.get_or(manifest.fingerprint, partial(_at_rest, artifacts, manifest)))
            except (OSError, StoreError):
                continue  # freed since the list was read
    for name, other in reader.others().items() if question.beside else ():
        theirs = stages(other, question.model_copy(update={"beside": False})).stages
        named = [
            stage.model_copy(update={"artifact": f"{name}:{stage.artifact}"}) for stage in theirs if stage.artifact
        ]
        listed += named
    return TrainingStages(stages=listed)


def _at_rest(artifacts: Artifacts, manifest: Manifest) -> TrainingStage:
    with _metrics(artifacts, manifest) as file:
        names, steps = file.schema_arrow.names, file.metadata.num_rows
        known = file.read([name for name in names if name in BOUNDED]).to_pylist()
    return TrainingStage(
        artifact=label(manifest),
        stage=manifest.ingredients.stage,
        uses=manifest.ingredients.uses,
        run_id=manifest.run_id,
        when=manifest.created_at.isoformat(),
        steps=steps,
        series=[name for name in names if name != "step"],
        bands=[SickBand(**vars(band)) for band in bands_of(manifest, known)],
    )


def _without_artifact(catalog: Catalog, artifacts: Artifacts, run: Run) -> list[TrainingStage]:
    """Stages of a run that have a live log, and are at work or ended before they made an artifact."""
    working = {
        name: None if stage["status"] == "running" else str(stage["status"])
        for name, stage in run["stages"].items()
        if (stage["status"] == "running" and run["state"] == "running")
        or (stage["status"] in STOPPED and artifacts.find(name, stage.get("fingerprint") or "") is None)
    }
    if not working:
        return []
    live = live_stages(catalog.storage, run["run_id"])
    return [
        TrainingStage(
            artifact=None,
            stage=name,
            uses=str(run["stages"][name].get("uses", "")),
            run_id=run["run_id"],
            when=str(run["stages"][name].get("started_at", "")),
            steps=0,
            series=[],
            bands=ALWAYS,
            ended=ended,
        )
        for name, ended in working.items()
        if name in live
    ]


def _metrics(artifacts: Artifacts, manifest: Manifest) -> pq.ParquetFile:
    return pq.ParquetFile(artifacts.catalog.open(manifest, manifest.outputs["metrics"].path))


def trained(artifacts: Artifacts, artifact: str) -> Manifest:
    """The training artifact of this name. Raises RefusedError if there is none."""
    manifest = artifacts.named(artifact)
    if manifest is None or "metrics" not in manifest.outputs:
        known = [
            label(known_manifest)
            for known_manifest in artifacts.all()
            if known_manifest.ingredients.uses.startswith("train.")
        ]
        raise RefusedError(f"{artifact[:100]!r} trained nothing", field="artifact", allowed=known, status=404)
    return manifest


def metrics(reader: StoreReader, question: ArtifactQuery) -> pa.Table:
    """The metrics of a training artifact as it recorded them. Raises RefusedError if it has none."""
    reader, _, artifact = reader.elsewhere(question.artifact)
    with _metrics(reader.artifacts, trained(reader.artifacts, artifact)) as file:
        return file.read()


def rows_of(reader: StoreReader, question: StepQuery) -> tuple[pa.Table, dict[str, str]]:
    """The rows that a step learned from: ``weight`` is the mean over trained tokens, online the advantage; what stands
    in the buffer is null if the row is gone from it; ``staleness`` is how many versions of the weights later than they
    sampled it the row was trained on. Raises RefusedError if the step was never taken."""
    artifacts, snapshot = reader.artifacts, reader.tables.at(question.at)
    manifest = trained(artifacts, question.artifact)
    try:
        rows = pl.DataFrame(rows_of_step(reader.catalog, manifest, question.step))
    except LookupError as error:
        raise RefusedError(str(error.args[0]), field="step", status=404) from None
    about = snapshot.columns(["trajectory_id", *OF_ROWS])
    rows = rows.join(about, on="trajectory_id", how="left", maintain_order="left")
    version = _version_at(artifacts, manifest, question.step)
    rows = rows.with_columns((pl.lit(version, pl.Int32) - pl.col("policy_version")).alias("staleness"))
    return plain(rows), {"x-version": str(snapshot.version)}


def _version_at(artifacts: Artifacts, manifest: Manifest, step: int) -> int | None:
    """The version of the weights that a step changed; None if the stage did not record it."""
    if "coverage" not in manifest.outputs:
        return None
    with pq.ParquetFile(artifacts.catalog.open(manifest, manifest.outputs["coverage"].path)) as file:
        tickets = pl.DataFrame(file.read(["batch", "version", "staleness"])).filter(pl.col("batch") == step)
    return None if tickets.is_empty() else int(tickets["version"][0] + tickets["staleness"][0])


# now


def lines(reader: StoreReader, question: LinesQuery) -> LiveAnswer:
    """The lines of a live log after a cursor. Raises RefusedError if there is no such log."""
    run_id, stage, cursor = question.run_id, question.stage, question.cursor
    live = lines_after(reader.catalog.storage, run_id, stage, cursor)
    if live is None:
        raise RefusedError(f"run {run_id[:80]!r} has no live log of stage {stage[:80]!r}", field="stage", status=404)
    return LiveAnswer(lines=live.lines, cursor=live.cursor, restarted=live.cursor < cursor)


class Pulses:
    """What there is at this moment, looked at once for all who listen. Records of runs are read again only if one was
    written, or after some seconds: a run that was killed writes none."""

    def __init__(self, catalog: Catalog, tables: Tables) -> None:
        self.catalog = catalog
        self.tables = tables
        self._lock = threading.Lock()
        self._written: dict[str, datetime] = {}
        self._runs: list[Run] = []
        self._runs_until = self._until = 0.0
        self._pulse: Pulse | None = None

    def look(self) -> Pulse:
        with self._lock:
            if self._pulse is None or time.monotonic() > self._until:
                self._pulse = self._look()
                self._until = time.monotonic() + PULSE_S / 2
            return self._pulse

    def _look(self) -> Pulse:
        storage = self.catalog.storage
        written = dict(storage.beside("runs"))
        if written != self._written or time.monotonic() > self._runs_until:
            self._runs, self._written = all_runs(self.catalog)[:RUNS], written
            self._runs_until = time.monotonic() + RUNS_S
        working = [run for run in self._runs if run["state"] == "running"]
        live = {
            f"{run['run_id']}/{stage}": length(storage, run["run_id"], stage)
            for run in working
            for stage in live_stages(storage, run["run_id"])
        }
        states = {run["run_id"]: run["state"] for run in self._runs}
        at_work = {
            f"{run['run_id']}/{name}": stage_run["status"]
            for run in working
            for name, stage_run in run["stages"].items()
        }
        progress = {
            f"{run['run_id']}/{name}": told
            for run in working
            for name, stage_run in run["stages"].items()
            if stage_run["status"] == "running" and (told := progress_of(stage_run))
        }
        return Pulse(
            version=self.tables.buffer.version,
            runs=states,
            stages=at_work,
            progress=progress,
            live=live,
            stopped=list(not_run_again(self._runs)),
        )


async def events(reader: StoreReader, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """A pulse at once and whenever it differs from the last one, as server-sent events, until the server ends. A
    comment now and then keeps the connection open, and notices that the client is gone."""
    pulses = reader.pulses.get_or(None, lambda: Pulses(reader.catalog, reader.tables))
    last: Pulse | None = None
    pulse: Pulse | None
    quiet = 0.0
    while not ended():
        try:
            pulse = await anyio.to_thread.run_sync(pulses.look)
        except (OSError, StoreError):  # a store that is away may be back the next time
            pulse = last
        if pulse is not None and pulse != last:
            last, quiet = pulse, 0.0
            yield f"data: {pulse.model_dump_json()}\n\n".encode()
        elif quiet >= 10:
            quiet = 0.0
            yield b": still here\n\n"
        await asyncio.sleep(PULSE_S)
        quiet += PULSE_S
