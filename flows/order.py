"""The order in which the stages of a run start, and running them without Prefect."""

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from agentrl.flows.session import RunSession, Stopped
from agentrl.pipelines.file.machines import gpus_here
from agentrl.pipelines.plan.plan import PlannedStage
from agentrl.pipelines.run.worker import StageError


class Started(Protocol):
    """A stage that was started: a future of Prefect's or of the standard library's."""

    def add_done_callback(self, fn: Callable[[Any], Any], /) -> object: ...


F = TypeVar("F", bound=Started)


def start_in_order(session: RunSession, jobs: int, start: Callable[[PlannedStage, list[F]], F]) -> None:
    """Start each stage as soon as what it reads is there, at most ``jobs`` at once, and wait for all.

    ``start`` is given the step and what it returned for the steps that this one reads. No stage starts once the run is
    ending.
    """
    waiting = {step.name: step for step in session.plan.to_run}
    started: dict[str, F] = {}
    ended: queue.Queue[str] = queue.Queue()
    done: set[str] = set()
    while (waiting and not session.stopping.is_set()) or len(done) < len(started):
        at_work = started.keys() - done
        ready = [s for s in waiting.values() if not (waiting.keys() | at_work) & set(s.node.upstream)]
        for step in ready[: 0 if session.stopping.is_set() else jobs - len(at_work)]:
            del waiting[step.name]
            upstream = [started[name] for name in step.node.upstream if name in started]
            started[step.name] = future = start(step, upstream)
            future.add_done_callback(partial(_put, ended, step.name))
        done.add(ended.get())


def _put(ended: "queue.Queue[str]", name: str, _: object) -> None:
    ended.put(name)


def run_here(session: RunSession, jobs: int) -> None:
    """All stages in threads of this process: no retries, time limits, slots or pools.

    A failure ends up in ``session.failure``; stages that wait are not started. On any other exception (Ctrl-C) the
    stages at work are ended.
    """

    def run_one(name: str) -> None:
        try:
            with suppress(Stopped):
                session.run_stage(name)
        except StageError as error:
            session.fail(error)
        except BaseException:
            session.stopping.set()
            raise

    with ThreadPoolExecutor(jobs, thread_name_prefix="stage") as pool:
        futures: list[Future[None]] = []

        def start(step: PlannedStage, _: list[Future[None]]) -> Future[None]:
            if not gpus_here(step.node.execution, step.node.config):
                session.begin(step.name)
            futures.append(pool.submit(run_one, step.name))
            return futures[-1]

        try:
            session.prepare()
            start_in_order(session, jobs, start)
        except BaseException:
            session.stop()
            raise
    for future in futures:
        future.result()
