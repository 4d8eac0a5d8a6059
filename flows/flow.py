"""Prefect's part of a run: order, retries with back-off, time limits, slots, and the record of it in its server.

What is re-used is decided by our catalog before the flow starts, so Prefect's own caching and results stay off.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any, cast

import httpx
from prefect import flow
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.events.worker import EventsWorker
from prefect.futures import PrefectFuture
from prefect.logging.handlers import APILogWorker
from prefect.runtime import task_run
from prefect.states import State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task, exponential_backoff

from agentrl.flows.order import start_in_order
from agentrl.flows.server import PrefectServerError, unreachable
from agentrl.flows.session import RunSession, Stopped
from agentrl.flows.slots import Slots
from agentrl.pipelines.plan.plan import PlannedStage
from agentrl.pipelines.run.execute import Outcome
from agentrl.pipelines.run.worker import StageError
from agentrl.schemas.manifest import Kind

Elsewhere = Callable[[RunSession, PlannedStage], Outcome]
"""Runs a stage in the work pool that its ``execution`` names, and waits for it."""

FLUSH_S = 5.0

LONG_S = 5.0
"""Seconds. A stage that takes longer gets a progress artifact, which is updated at this interval."""


def quiet() -> None:
    """Keep Prefect's log lines for its server and off the terminal, where the display is."""
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if "Console" in type(handler).__name__:
                logger.removeHandler(handler)
        logger.propagate = False
    logging.getLogger("prefect.task_runs").addFilter(_is_true)


def _is_true(record: logging.LogRecord) -> bool:
    """Prefect warns that a time limit cannot interrupt what blocks in a thread. Here the thread only waits for the
    process of the stage, which is ended whatever it is doing."""
    return "cannot interrupt blocking operations" not in str(record.msg)


class _ProgressArtifact:
    """Shows a long stage's progress in Prefect. The stage neither waits for its server nor fails with it."""

    def __init__(self, session: RunSession, name: str) -> None:
        self.session = session
        self.name = name
        self.id: Any = None
        self.last = time.monotonic()
        self.sending: threading.Thread | None = None
        self.failed = False

    def __call__(self, done: int, total: int | None) -> None:
        at_work = self.sending and self.sending.is_alive()
        if not total or at_work or time.monotonic() - self.last < LONG_S:
            return
        self.last = time.monotonic()
        percent = min(100.0, 100.0 * done / total)
        context = copy_context()  # it names the task run that the artifact is of
        self.sending = threading.Thread(target=context.run, args=(self._send, percent), daemon=True, name="progress")
        self.sending.start()

    def _send(self, percent: float) -> None:
        try:
            if self.id is None:
                key = _key(self.session.plan.pipeline.name, self.name)
                description = f"Stage {self.name} of run {self.session.run_id}"
                self.id = create_progress_artifact(percent, key=key, description=description)
            else:
                update_progress_artifact(self.id, percent)
        except Exception as error:
            if not self.failed:
                _say_not_shown(self.session, f"progress of {self.name}", error)
            self.failed = True


def _say_not_shown(session: RunSession, what: str, error: Exception) -> None:
    session.display.note(f"warning: Prefect's server does not show the {what}: {error!r}")


def _key(*parts: str) -> str:
    """Artifact keys are lower-case letters, digits and dashes."""
    return "-".join("".join(c if c.isalnum() else "-" for c in part.lower()) for part in parts)


def _task(
    session: RunSession, step: PlannedStage, slots: Slots, pool: str | None, elsewhere: Elsewhere
) -> Task[[], None]:
    """The Prefect task of one stage. ``pool`` is where this flow runs.

    It has no tags: before a task with tags starts, Prefect asks its server for slots of them, and waits.
    """
    execution = step.node.execution

    def run_stage() -> None:
        session.listeners[step.name] = _ProgressArtifact(session, step.name)
        tries_left = execution.retries - (task_run.run_count or 1) + 1
        with slots.held(step):
            if execution.pool in (None, pool):
                session.run_stage(step.name, tries_left=tries_left)
            else:
                session.run_stage(step.name, lambda: elsewhere(session, step), tries_left)

    def failed(_task: Any, _run: Any, state: State[Any]) -> None:
        """After the last try, and before the next stage is started."""
        error = state.result(raise_on_failure=False)
        if not isinstance(error, Stopped):
            session.fail(_as_stage_error(session, step, error))

    return Task(
        run_stage,
        name=step.node.stage.name,
        task_run_name=step.name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=execution.retries,
        retry_delay_seconds=exponential_backoff(execution.retry_delay_s) if execution.retries else 0,
        retry_condition_fn=lambda _task, _run, _state: not session.stopping.is_set(),
        timeout_seconds=execution.timeout_s,
        on_failure=[failed],
    )


def _as_stage_error(session: RunSession, step: PlannedStage, error: Any) -> StageError:
    if isinstance(error, StageError):
        return error
    limit = step.node.execution.timeout_s
    cause = f"did not end within timeout_s = {limit:g}" if isinstance(error, TimeoutError) and limit else repr(error)
    return StageError(step.name, cause, session.log(step.name))


def run_with_prefect(session: RunSession, jobs: int, own_server: bool, elsewhere: Elsewhere) -> None:
    """One flow run with one task run for each stage that is to run. ``jobs`` stages run at once at most.

    A failure ends up in ``session.failure``; stages that wait are not started. A server that stops answering once the
    run has begun is reported and changes nothing else. Raises PrefectServerError if it does not answer before.
    """
    quiet()
    if not own_server and (why := unreachable()):
        raise PrefectServerError(f"{why}; start it, set PREFECT_API_URL to another, or run with --no-prefect")
    pipeline = session.plan.pipeline
    on_sigterm = signal.getsignal(signal.SIGTERM)
    over = False

    @flow(
        name=pipeline.name,
        flow_run_name=session.run_id,
        description=pipeline.description or None,
        persist_result=False,
        validate_parameters=False,
        task_runner=cast(Any, ThreadPoolTaskRunner(max_workers=jobs)),
    )
    def run() -> None:
        nonlocal over
        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, on_sigterm
            )  # Prefect's handler would tell its server first, which may take long
        try:
            run_stages(session, jobs, slots, elsewhere)
        finally:
            over = True

    try:
        slots = Slots(session, own_server)
        with suppress(StageError):
            run()
    except httpx.HTTPError as error:
        if not over:
            raise PrefectServerError(f"the Prefect server stopped answering before the run began: {error!r}") from error
        session.display.note(f"warning: Prefect's server does not know how this run ended: {error!r}")
    finally:
        flush()


def run_stages(session: RunSession, jobs: int, slots: Slots, elsewhere: Elsewhere, pool: str | None = None) -> None:
    """The body of a flow: each stage as soon as what it reads is there. Raises the first failure.

    On any other exception (a cancelled run, Ctrl-C) the stages at work are ended.
    """

    def start(step: PlannedStage, upstream: list[PrefectFuture[None]]) -> PrefectFuture[None]:
        return cast(Any, _task(session, step, slots, pool, elsewhere)).submit(wait_for=upstream)

    try:
        start_in_order(session, jobs, start)
    except BaseException:
        session.stop()
        raise
    finally:
        try:
            _leave_artifacts(session)
        except Exception as error:
            _say_not_shown(session, "table of the run", error)
    if session.failure:
        raise session.failure


def _leave_artifacts(session: RunSession) -> None:
    """Create a table of the run for Prefect's pages, and the report if a stage wrote one."""
    pipeline = session.plan.pipeline.name
    rows = [
        {
            "stage": name,
            "status": stage["status"],
            "seconds": stage.get("duration_s"),
            "rows": ", ".join(f"{k} {v}" for k, v in (stage.get("rows") or {}).items() if v is not None),
            "reason": stage.get("cause") or "; ".join(stage["reasons"]),
        }
        for name, stage in session.record["stages"].items()
    ]
    create_table_artifact(rows, key=_key(pipeline, "stages"), description=f"Run {session.run_id}")
    for name, manifest in session.manifests().items():
        for output in manifest.outputs.values():
            if output.kind is Kind.REPORT:
                folder = session.catalog.local(manifest, output.path)
                for page in sorted(folder.glob("*.md")):
                    text = page.read_text()
                    create_markdown_artifact(text, key=_key(pipeline, name), description=f"Run {session.run_id}")


def flush() -> None:
    """Send the logs and events that Prefect still holds in this process, before its server ends."""
    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=FLUSH_S, at_exit=True)
