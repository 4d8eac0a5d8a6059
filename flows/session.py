"""One run of a plan: its record in the catalog, its worker processes, its logs. What runs the stages (Prefect or
threads) only decides the order."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.flows.display import Display, Metrics, seconds
from agentrl.flows.gpus import reserved
from agentrl.pipelines.file.machines import gpus_here
from agentrl.pipelines.plan.plan import Plan, PlannedStage, Status
from agentrl.pipelines.run.execute import Outcome, StageJob, has_model, job_of
from agentrl.pipelines.run.runs import HEARTBEAT_S, this_process
from agentrl.pipelines.run.worker import StageError, Workers
from agentrl.pipelines.secrets import redacted
from agentrl.placement.base import LaunchError
from agentrl.schemas.manifest import Manifest
from agentrl.schemas.shards import ShardsNow

PROGRESS_S = 5.0
"""Seconds after which a run's record says how far its stages are, if they are further than it said."""


class Stopped(RuntimeError):  # noqa: N818
    """A stage was not started because the run is ending."""


def new_run_id() -> str:
    """Sorts by time: ``20260131-235959-1a2b``."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def logs_folder(catalog: Catalog) -> Path:
    """The folder of all logs. It is local even if the store is not."""
    storage = catalog.storage
    return (storage.root if isinstance(storage, LocalStorage) else storage.working_folder()) / "logs"


@dataclass
class RunSession:
    """State of one run. ``record`` is what ``runs/<run_id>.json`` holds."""

    plan: Plan
    catalog: Catalog
    display: Display
    run_id: str = field(default_factory=new_run_id)
    record: dict[str, Any] = field(default_factory=dict)
    failure: StageError | None = None
    engine: str = "none"
    engine_reason: str = ""
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.workers = Workers(self._progress, self.waits)
        self.stopping = threading.Event()
        self._over = threading.Event()
        self.listeners: dict[str, Callable[[int, int | None], None]] = {}
        self._lock = threading.Lock()
        self._said_of_dialects: set[str] = set()
        self._jobs: dict[str, StageJob] = {}
        self._began: dict[str, float] = {}
        self._first: dict[str, tuple[float, int]] = {}  # when a stage first said how far it is, and how far that was
        self._further = False
        self._start = time.monotonic()

    @property
    def engine_text(self) -> str:
        return f"{'with' if self.engine == 'prefect' else 'without'} Prefect ({self.engine_reason})"

    def log(self, name: str) -> Path:
        return (logs_folder(self.catalog) / self.run_id / f"{name}.log").absolute()

    def job(self, name: str) -> StageJob:
        if name not in self._jobs:
            self._jobs[name] = job_of(self.plan.steps[name], self.plan, self.run_id)
        return self._jobs[name]

    # record

    def _write(self, **changes: Any) -> None:
        with self._lock:
            if self._over.is_set() and "state" not in changes:
                return  # a heartbeat after the end
            self.record.update(changes)
            self.record["heartbeat_at"] = datetime.now(UTC)
            self.catalog.write_run(self.record)

    def _stage(self, name: str, **changes: Any) -> None:
        with self._lock:
            self.record["stages"][name].update(changes)
        self._write()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write the run's record, and at the end its state: completed, failed or cancelled."""
        plan = self.plan
        stages: dict[str, dict[str, Any]] = {
            step.name: {
                "uses": step.node.stage.name,
                "status": str(step.status),
                "fingerprint": step.fingerprint,
                "reasons": step.reasons,
            }
            for step in plan.steps.values()
        }
        for step in plan.to_run:
            stages[step.name]["slots"] = list(step.node.execution.concurrency)
        with self.catalog.lock_garbage():  # from here on, gc knows what this run needs
            self._refuse_if_freed()
            self._write(
                run_id=self.run_id,
                pipeline=plan.pipeline.name,
                file=str(plan.pipeline.path),
                command=plan.command(),
                **this_process(),
                engine=self.engine,
                engine_reason=self.engine_reason,
                state="running",
                started_at=datetime.now(UTC),
                stages=stages,
            )
        self._start = time.monotonic()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        expected = {step.name: self._last_duration(step) for step in plan.to_run}
        self.display.start(expected, len(plan.having(Status.CACHED)), self.engine_text)
        state = "cancelled"
        try:
            yield
            state = "failed" if self.failure else "completed"
        except Exception:
            state = "failed"
            raise
        finally:
            self.end(state)

    def _refuse_if_freed(self) -> None:
        """Raise StoreError if gc removed what the plan wants to use again."""
        cached = self.plan.having(Status.CACHED)
        if gone := [step.name for step in cached if self.catalog.manifest(step.name, step.fingerprint) is None]:
            raise StoreError(
                f"artifacts of {', '.join(gone)} were freed since the plan was made; run the command again"
            )

    def _beat(self) -> None:
        """Write the record again and again, so that other machines see that this run lives, and how far it is."""
        last = time.monotonic()
        while not self._over.wait(PROGRESS_S):
            if self._further or time.monotonic() - last >= HEARTBEAT_S - PROGRESS_S / 2:
                last, self._further = time.monotonic(), False
                with suppress(OSError, StoreError):  # if that lasts, the run itself fails at its next record
                    self._write()

    def end(self, state: str) -> None:
        """End what is at work and write the run's last state."""
        self.stop()
        self._over.set()
        self.display.stop()
        for name, stage in self.record["stages"].items():
            if stage["status"] in ("running", "waiting"):
                self._stage(name, status="cancelled")
        self._write(state=state, ended_at=datetime.now(UTC), duration_s=round(time.monotonic() - self._start, 3))

    def _last_duration(self, step: PlannedStage) -> float | None:
        earlier = self.catalog.manifests(step.name)
        return earlier[0].duration_s if earlier else None

    # stages

    def begin(self, name: str) -> None:
        """Start a stage that needs no GPU: before the engine, which takes seconds to start; or in the order of the
        plan, so that the first of several gets the process that has imported most."""
        execution = self.plan.steps[name].node.execution
        self._started(name)
        self.workers.begin(self.job(name), self.log(name), execution.env)

    def prepare(self) -> None:
        """Start a process for the first stage with a model, if others come before it that need none."""
        first = self.plan.to_run[0]
        step = next((step for step in self.plan.to_run if has_model(step.node.stage)), first)
        execution = step.node.execution
        if step is not first and not (execution.pool or gpus_here(execution, step.node.config)):
            self.workers.prepare(self.log(step.name), execution.env)

    def _started(self, name: str) -> float:
        """When this try of the stage started, on the monotonic clock."""
        if name not in self._began:
            self._began[name] = time.monotonic()
            self._first.pop(name, None)
            self.display.stage_started(name)
            known = {"fingerprint": self.job(name).fingerprint, "log": str(self.log(name)), "waits_for": None}
            self._stage(name, status="running", started_at=datetime.now(UTC), **known)
        return self._began[name]

    def _progress(self, name: str, done: int, total: int | None, metrics: Metrics) -> None:
        """Show how far a stage is, and keep it for the next time that the record is written."""
        now = time.monotonic()
        start, before = self._first.setdefault(name, (now, done))
        left = (now - start) / (done - before) * (total - done) if total and done > before else None
        with self._lock:
            if name in self.record.get("stages", {}):
                told = {"done": done, "total": total, "left_s": None if left is None else round(left, 1)}
                self.record["stages"][name]["progress"] = told
                if isinstance(shards := metrics.get("shards"), ShardsNow):
                    self.record["stages"][name]["shards"] = shards.model_dump(mode="json")
                self._further = True
        self.display.progress(name, done, total, metrics)

    def waits(self, name: str, text: str) -> None:
        """Record and show which run a stage waits for. The empty text means that it is at work again."""
        if text:
            self._stage(name, status="waiting", waits_for=text)
            self.display.note(f"{name}: {text}")
        else:
            self._stage(name, status="running", waits_for=None)

    def run_stage(self, name: str, work: Callable[[], Outcome] | None = None, tries_left: int = 0) -> Outcome:
        """Run one stage once, in a worker of this run unless ``work`` does it elsewhere.

        Raises StageError if it fails, Stopped if the run is ending.
        """
        if self.stopping.is_set():
            raise Stopped(name)
        started = self._started(name)
        try:
            outcome = work() if work else self._run_here(name)
        except BaseException as error:
            self._failed(name, error, time.monotonic() - started, tries_left)
            raise
        finally:
            del self._began[name]
        self._ended(name, outcome, outcome.took_s or time.monotonic() - started)
        return outcome

    def _run_here(self, name: str) -> Outcome:
        """Run one stage in a worker of this run, with the GPUs that it asks for."""
        node = self.plan.steps[name].node
        wanted = gpus_here(node.execution, node.config)
        try:
            with reserved(wanted, node.execution.env, self.stopping, partial(self.waits, name)) as env:
                if env is None:
                    raise Stopped(name)
                listener = self.listeners.get(name)
                return self.workers.run(
                    self.job(name), self.log(name), env, keep=not node.execution.gpus, listener=listener
                )
        except LaunchError as error:
            raise StageError(name, str(error), self.log(name)) from None

    def _failed(self, name: str, error: BaseException, took: float, tries_left: int) -> None:
        limit = self.plan.steps[name].node.execution.timeout_s
        cause = redacted(error.cause) if isinstance(error, StageError) else type(error).__name__
        if limit and took >= limit and not isinstance(error, StageError) and not self.stopping.is_set():
            cause = f"did not end within timeout_s = {limit:g}"
        status = "cancelled" if self.stopping.is_set() else "failed"
        tries = self.record["stages"][name].get("failed_tries", 0) + 1
        self._stage(name, status=status, cause=cause, failed_tries=tries, duration_s=round(took, 3))
        again = f"; {tries_left} more tries" if tries_left and status == "failed" else ""
        self.display.stage_ended(name, "cancelled" if status == "cancelled" else f"failed: {cause}{again}", ok=False)

    def _ended(self, name: str, outcome: Outcome, took: float) -> None:
        manifest = outcome.manifest
        self._stage(
            name,
            status="reused" if outcome.reused else "ran",
            duration_s=round(took, 3),
            metrics=manifest.metrics,
            warnings=manifest.warnings,
            rows={output: record.rows for output, record in manifest.outputs.items()},
            reproduced=outcome.reproduced,
        )
        as_before = self.plan.steps[name].may_be_reused
        reused = "re-used, what it reads came out as before" if as_before else "made by another run meanwhile"
        text = reused if outcome.reused else f"done in {seconds(took)}"
        if outcome.reproduced is not None:
            text += ", same content as before" if outcome.reproduced else ", content DIFFERS from before"
        self.display.stage_ended(name, text, ok=True)
        for warning in manifest.warnings:
            if warning.startswith("dialect "):  # of the tokenizer, which stages hand on
                if warning in self._said_of_dialects:
                    continue
                self._said_of_dialects.add(warning)
            self.display.note(f"warning: {name}: {warning}")

    def stop(self) -> None:
        """End the stages at work, and start no more."""
        self.stopping.set()
        self.workers.close()

    def fail(self, error: StageError) -> None:
        """Keep the first failure, and start no more stages."""
        with self._lock:
            self.failure = self.failure or error
        self.stopping.set()

    def manifests(self) -> dict[str, Manifest]:
        """Of every stage of the pipeline whose artifact is there now."""
        known = (step for step in self.plan.steps.values() if step.fingerprint)
        made = ((step.name, self.catalog.manifest(step.name, step.fingerprint)) for step in known)
        return {name: manifest for name, manifest in made if manifest}
