"""Prefect's part of a run: order, retries with back-off, time limits, slots, and the record of it in its server.

What is re-used is decided by our catalog before the flow starts, so Prefect's own caching and results stay off.
"""

import logging
import queue
from contextlib import ExitStack, suppress
from typing import Any, cast

from prefect import flow
from prefect.cache_policies import NO_CACHE
from prefect.concurrency.sync import concurrency
from prefect.futures import PrefectFuture
from prefect.states import State
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import Task, exponential_backoff

from flows.session import Session, Stopped
from pipelines.plan import Step
from pipelines.worker import StageError

FLUSH_S = 5.0

_TAGS = 2
"""Prefect warns of dead-locks where a task has as many tags as there are threads."""


def quiet() -> None:
    """Keep Prefect's log lines for its server and off the terminal, where the display is."""
    for name in ("prefect", "prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if "Console" in type(handler).__name__:
                logger.removeHandler(handler)
        logger.propagate = False


def _task(session: Session, step: Step) -> Task[[], None]:
    """The Prefect task of one stage."""
    execution = step.node.execution

    def run_stage() -> None:
        with ExitStack() as stack:
            if execution.concurrency:
                stack.enter_context(concurrency(list(execution.concurrency), occupy=1))
            session.run_stage(step.name)

    def failed(_task: Any, _run: Any, state: State[Any]) -> None:
        """After the last try, and before the next stage is started."""
        error = state.result(raise_on_failure=False)
        if not isinstance(error, Stopped):
            session.fail(_as_stage_error(session, step, error))

    return Task(
        run_stage,
        name=step.node.stage.name,
        task_run_name=step.name,
        tags=[session.plan.pipeline.name, step.node.stage.name],
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=execution.retries,
        retry_delay_seconds=exponential_backoff(execution.retry_delay_s) if execution.retries else 0,
        retry_condition_fn=lambda _task, _run, state: not isinstance(state.result(raise_on_failure=False), Stopped),
        timeout_seconds=execution.timeout_s,
        on_failure=[failed],
    )


def _as_stage_error(session: Session, step: Step, error: Any) -> StageError:
    if isinstance(error, StageError):
        return error
    limit = step.node.execution.timeout_s
    cause = f"did not end within timeout_s = {limit:g}" if isinstance(error, TimeoutError) and limit else repr(error)
    return StageError(step.name, cause, session.log(step.name))


def run_with_prefect(session: Session, jobs: int) -> None:
    """One flow run with one task run for each stage that is to run. ``jobs`` stages run at once at most.

    A failure ends up in ``session.failure``; stages that wait are not started.
    """
    quiet()
    pipeline = session.plan.pipeline

    @flow(
        name=pipeline.name,
        flow_run_name=session.run_id,
        description=pipeline.description or None,
        persist_result=False,
        validate_parameters=False,
        task_runner=cast(Any, ThreadPoolTaskRunner(max_workers=jobs + _TAGS)),
    )
    def run() -> None:
        run_stages(session, jobs)

    try:
        with suppress(StageError):
            run()
    finally:
        flush()


def run_stages(session: Session, jobs: int) -> None:
    """The body of a flow: each stage as soon as what it reads is there. Raises the first failure."""
    waiting = {step.name: step for step in session.plan.to_run}
    futures: dict[str, PrefectFuture[None]] = {}
    ended: queue.Queue[str] = queue.Queue()
    done: set[str] = set()
    while (waiting and not session.stopping.is_set()) or len(done) < len(futures):
        ready = [step for step in waiting.values() if not waiting.keys() & step.node.upstream]
        ready = [step for step in ready if all(name in done for name in step.node.upstream if name in futures)]
        for step in ready[: 0 if session.stopping.is_set() else jobs - (len(futures) - len(done))]:
            upstream = [futures[name] for name in step.node.upstream if name in futures]
            future: PrefectFuture[None] = cast(Any, _task(session, step)).submit(wait_for=upstream)
            futures[step.name] = future
            del waiting[step.name]
            future.add_done_callback(lambda _, name=step.name: ended.put(name))  # type: ignore[misc]
        done.add(ended.get())
    if session.failure:
        raise session.failure


def flush() -> None:
    """Send what Prefect holds back in this process, while its server is still there."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=FLUSH_S, at_exit=True)
