"""Run one planned stage: inputs from the catalog, the function, outputs into the catalog, the manifest last.

It needs no Prefect. :mod:`agentrl.pipelines.run.worker` calls it in another process; tests call it directly.
"""

import hashlib
import importlib
import platform
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pydantic import BaseModel

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.unfinished import abandoned_attempts
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import LeaseLostError, LockTimeoutError
from agentrl.datastore.shards.heard import heard
from agentrl.datastore.storage.digest import digest, parquet_digest
from agentrl.datastore.storage.lease import Check
from agentrl.pipelines.file import library
from agentrl.pipelines.file.external import PATH_OF, pinned
from agentrl.pipelines.handles import HANDLES, Handle, Trajectories
from agentrl.pipelines.plan.code import Sources, changed_code
from agentrl.pipelines.plan.fingerprint import outside_fields
from agentrl.pipelines.plan.plan import Plan, PlannedStage, differences, settle
from agentrl.pipelines.run.runs import all_runs, at_work_on, whom
from agentrl.pipelines.secrets import redacted
from agentrl.pipelines.stage import Context, Earlier, Progress, Stage, no_earlier, no_progress
from agentrl.placement.launcher import placed
from agentrl.schemas.installation import DISTRIBUTION
from agentrl.schemas.manifest import THREADS, Ingredients, InputRecord, Kind, Manifest, OutputRecord
from agentrl.schemas.pipeline import Execution

QUIET_S, LOOK_AGAIN_S = 1.0, 10.0
"""Seconds to wait for another run before a message says so, and seconds between two looks at which run it is."""


@dataclass(frozen=True)
class StageJob:
    """All that another process needs to run one stage. ``module`` and ``function`` say where it is declared,
    ``has_model`` whether it reads or makes a model."""

    store: str
    folders: tuple[Path, ...]
    module: str
    function: str
    config: BaseModel
    ingredients: Ingredients
    fingerprint: str
    run_id: str
    forced: bool = False
    sources: Sources | None = None
    execution: Execution = field(default_factory=Execution)
    has_model: bool = False

    @property
    def stage(self) -> str:
        return self.ingredients.stage


@dataclass(frozen=True)
class Outcome:
    """``reused``: another run published it meanwhile. ``reproduced``: whether a forced run gave the content that was
    there before. ``took_s``: seconds from inputs to publication, waiting for another run included."""

    manifest: Manifest
    took_s: float = 0.0
    reused: bool = False
    reproduced: bool | None = None


def job_of(step: PlannedStage, plan: Plan, run_id: str) -> StageJob:
    """The job that runs a step. All inputs of the step must be there, because its fingerprint depends on their
    content."""
    settle(step, plan, Catalog(plan.store))
    function = step.node.stage.function
    return StageJob(
        store=plan.store,
        folders=plan.pipeline.folders,
        module=function.__module__,
        function=function.__name__,
        config=step.node.config,
        ingredients=step.ingredients,
        fingerprint=step.fingerprint,
        run_id=run_id,
        forced=step.forced,
        sources=step.sources,
        execution=step.node.execution,
        has_model=has_model(step.node.stage),
    )


def has_model(stage: Stage) -> bool:
    """Whether it reads or makes a model, so that its process imports torch and transformers."""
    return Kind.MODEL in {*stage.outputs.values(), *(item.kind for item in stage.inputs.values())}


def no_wait(text: str) -> None:
    pass


def perform(job: StageJob, progress: Progress = no_progress, waits: Callable[[str], None] = no_wait) -> Outcome:
    """Run a stage and publish what it made, unless that is published already.

    If another process runs the same stage on the same store, this one waits for it; ``waits`` is called with a text
    that names the other one, and with the empty text when the wait is over. What the stage raises is raised here. Then
    nothing is published, the rows that it appended stay in the buffer, and its scratch folder is kept for the next try.
    """
    began = time.monotonic()
    library.search_in(job.folders)
    while True:
        try:
            return _perform(job, began, progress, waits)
        except LeaseLostError as error:  # the process that took over may have published; if not, it is made again
            warnings.warn(f"stage {job.stage} starts again: {error}", stacklevel=2)


def _perform(job: StageJob, began: float, progress: Progress, waits: Callable[[str], None]) -> Outcome:
    stage: Stage = getattr(importlib.import_module(job.module), job.function)
    catalog, buffer = Catalog(job.store), TrajectoryBuffer(job.store)
    with _held(catalog, job, waits) as check:
        before = catalog.manifest(job.stage, job.fingerprint)
        if before and not job.forced:
            return Outcome(before, time.monotonic() - began, reused=True)
        _take_code(job)
        inputs = {
            name: _input(stage.inputs[name].many, records, catalog, buffer)
            for name, records in job.ingredients.inputs.items()
        }
        for left in abandoned_attempts(catalog, job.stage, job.fingerprint, before):
            catalog.remove_attempt(left)
        folder = catalog.staging(job.stage, job.fingerprint)
        try:
            # what a killed run has left of a stage that was never published is not trusted if it is forced
            untrusted = job.forced and bool(buffer.ids(job.fingerprint))
            made_again = before.made_again + 1 if before else int(untrusted)
            manifest = _run(job, stage, inputs, folder, made_again, catalog, buffer, progress)
            published = catalog.publish(manifest, folder, instead_of=before, check=check)
        except BaseException:
            catalog.discard(job.stage, job.fingerprint, folder)
            raise
    took = time.monotonic() - began
    if published.attempt != folder.name:  # somebody published meanwhile
        return Outcome(published, took, reused=True)
    return Outcome(published, took, reproduced=same_content(before, published))


class CodeChangedError(RuntimeError):
    """The code of a stage is not what its fingerprint says."""


def _take_code(job: StageJob) -> None:
    """Import the user's modules that the stage reaches, unless their code was edited since the plan: what the stage
    makes would then stand under the fingerprint of other code. A later edit does not act on this stage any more."""
    if job.sources is None:
        return
    try:
        changed = changed_code(job.sources, job.folders, job.ingredients.code)
    except LookupError as error:
        raise CodeChangedError(f"code changed since the plan: {error.args[0]}; run again") from None
    if changed:
        raise CodeChangedError(
            f"code {', '.join(changed)} changed since the plan; run again, to go on with it as it is"
        )
    for name in job.sources.modules:
        with suppress(Exception):  # what fails here, and is used, fails again in the stage
            importlib.import_module(name)


@contextmanager
def _held(catalog: Catalog, job: StageJob, waits: Callable[[str], None]) -> Iterator[Check]:
    """Hold the artifact's name, and yield the check that it is still held."""
    waiting_for = ""
    with ExitStack() as stack:
        while True:
            try:
                timeout = LOOK_AGAIN_S if waiting_for else QUIET_S
                check = stack.enter_context(catalog.lock(job.stage, job.fingerprint, timeout=timeout))
                break
            except LockTimeoutError:
                if (text := _holder(catalog, job)) != waiting_for:
                    waits(waiting_for := text)
        if waiting_for:
            waits("")
        yield check


def _holder(catalog: Catalog, job: StageJob) -> str:
    run = at_work_on(all_runs(catalog), job.stage, job.fingerprint, but=job.run_id)
    if run:
        return "waits for " + whom(run, run["stages"][job.stage]["started_at"])
    return (
        f"waits for another process that holds locks/{job.stage}-{job.fingerprint}.lock; no run that is at work names "
        "this stage, so it may be the end of a run that was killed; `agentrl runs` lists the newest"
    )


def same_content(before: Manifest | None, now: Manifest) -> bool | None:
    """Whether a forced run gave the content that was there before. None if nothing was there."""
    if before is None:
        return None
    digests = [{name: output.digest for name, output in manifest.outputs.items()} for manifest in (before, now)]
    return digests[0] == digests[1]


def _run(
    job: StageJob,
    stage: Stage,
    inputs: Mapping[str, Any],
    folder: Path,
    made_again: int,
    catalog: Catalog,
    buffer: TrajectoryBuffer,
    progress: Progress,
) -> Manifest:
    context = Context(
        stage=job.stage,
        fingerprint=job.fingerprint,
        run_id=job.run_id,
        seed=job.ingredients.seed,
        buffer=buffer,
        folder=folder,
        scratch=catalog.scratch(job.stage, job.fingerprint),
        progress=progress,
        made_again=made_again,
        chosen=frozenset(job.ingredients.choices),
        unlike_in=no_earlier if job.forced else partial(_unlike_in, job, catalog, buffer),
        pipeline=job.ingredients.pipeline or None,
        engine=job.execution.engine,
    )
    _seed(job.ingredients)
    started = time.monotonic()
    messages: list[str] = []
    with heard(messages), placed(job.execution, context.scratch / "started"):
        handles = stage(context, pinned(job.config, job.ingredients.externals), **inputs)
    duration = time.monotonic() - started
    return Manifest(
        fingerprint=job.fingerprint,
        ingredients=job.ingredients,
        outputs={name: _record(handle, folder, buffer) for name, handle in handles.items()},
        run_id=job.run_id,
        made_again=made_again,
        warnings=[redacted(text) for text in dict.fromkeys(messages)],
        created_at=datetime.now(UTC),
        duration_s=round(duration, 3),
        buffer_version=buffer.version,
        metrics={k: redacted(v) if isinstance(v, str) else v for k, v in context.metrics.items()},
        environment=_environment(job.config),
    )


def _unlike_in(job: StageJob, catalog: Catalog, buffer: TrajectoryBuffer, field: str) -> list[Earlier]:
    """The artifacts of a stage that differ from a job in this field of the config alone."""
    own, earlier = job.ingredients, []
    for manifest in catalog.manifests(job.stage):
        old = manifest.ingredients
        if field not in old.config or old.config[field] == own.config[field]:
            continue
        if not differences(old.model_copy(update={"config": {**old.config, field: own.config[field]}}), own):
            earlier.append(
                Earlier(
                    f"{job.stage}/{manifest.fingerprint[:8]}", old.config[field], _opener(manifest, catalog, buffer)
                )
            )
    return earlier


def _opener(manifest: Manifest, catalog: Catalog, buffer: TrajectoryBuffer) -> Callable[[str], Handle]:
    def opened(output: str) -> Handle:
        record = InputRecord(stage=manifest.ingredients.stage, output=output, fingerprint=manifest.fingerprint)
        return open_output(record, catalog, buffer)

    return opened


def _input(many: bool, records: list[InputRecord], catalog: Catalog, buffer: TrajectoryBuffer) -> Any:
    handles = [open_output(record, catalog, buffer) for record in records]
    return handles if many else handles[0]


def open_output(record: InputRecord, catalog: Catalog, buffer: TrajectoryBuffer) -> Handle:
    """A handle on a published output. Raises LookupError if it is gone."""
    manifest = catalog.manifest(record.stage, record.fingerprint)
    if manifest is None:
        raise LookupError(f"artifact {record.stage}/{record.fingerprint} is gone; run stage {record.stage} again")
    output = manifest.outputs[record.output]
    kind = HANDLES[output.kind]
    path = catalog.local(manifest, output.path)
    more = {"buffer": buffer} if kind is Trajectories else {}
    return kind(path, record.stage, record.output, record.fingerprint, **more)


def _record(handle: Handle, folder: Path, buffer: TrajectoryBuffer) -> OutputRecord:
    """Path, rows and digest of an output. A selection's digest covers the rows that it selects. Ids in tables count
    without the fingerprint in them, so that what is made again with equal content has an equal digest."""
    if not handle.path.is_relative_to(folder):
        raise ValueError(f"output {handle.output!r} lies at {handle.path}; write it below context.folder")
    if isinstance(handle, Trajectories):
        ids = handle.selection()["trajectory_id"]
        both = buffer.digest(ids) if len(ids) else "none"
        content = hashlib.blake2b((both + parquet_digest(handle.path, None)).encode(), digest_size=16).hexdigest()
    elif handle.path.suffix == ".parquet":
        content = parquet_digest(handle.path, None)
    else:
        content = digest(handle.path)
    rows = pq.read_metadata(handle.path).num_rows if handle.path.suffix == ".parquet" else None
    return OutputRecord(kind=Kind(handle.kind), path=str(handle.path.relative_to(folder)), rows=rows, digest=content)


def _seed(ingredients: Ingredients) -> None:
    """Seed the global generators, so that earlier stages of this process have no effect."""
    random.seed(ingredients.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(ingredients.seed % 2**32)
    if "torch" in ingredients.packages:
        import torch

        torch.manual_seed(ingredients.seed)
        torch.get_num_threads()  # this thread now has a number of its own, which engines in other threads do not change


def _environment(config: BaseModel) -> dict[str, str]:
    try:
        ours = version(DISTRIBUTION)
    except PackageNotFoundError:
        ours = "source"
    described = {"agentrl": ours, "python": platform.python_version(), "machine": platform.machine()}
    if "torch" in sys.modules:
        described[THREADS] = str(sys.modules["torch"].get_num_threads())
    return described | {f"{PATH_OF}{field}": path for field, path in outside_fields(config).items()}
