"""Slots for scarce resources, which stages name under ``execution.concurrency`` and hold while they run.

The Prefect server keeps the number of slots of each name; the default is one. A server that keeps running also knows
who holds them: a dead run loses its lease after ``LEASE_S`` seconds. The server of a single run knows nothing of other
runs, so with it a slot is a lock in the store, which is free as soon as its holder dies.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency

from agentrl.datastore.errors import LockTimeoutError
from agentrl.datastore.storage.lease import hold
from agentrl.flows.session import RunSession, Stopped
from agentrl.pipelines.plan.plan import PlannedStage
from agentrl.pipelines.run.runs import all_runs, whom

LEASE_S = 60.0
POLL_S = 0.3


class Slots:
    """The slots that stages of a plan name; those that the server lacks are made, with room for one."""

    def __init__(self, session: RunSession, own_server: bool) -> None:
        self.session, self.own_server = session, own_server
        self.room: dict[str, int] = {}
        names = sorted({name for step in session.plan.to_run for name in step.node.execution.concurrency})
        if not names:
            return
        with get_client(sync_client=True) as client:
            known = {limit.name: limit.limit for limit in client.read_global_concurrency_limits()}
            for name in names:
                if name not in known:
                    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
                self.room[name] = known.get(name, 1)

    @contextmanager
    def held(self, step: PlannedStage) -> Iterator[None]:
        """Hold the slots that a stage names, taken in alphabetical order. Raises Stopped if the run ends while it
        waits."""
        with ExitStack() as stack:
            for name in sorted(step.node.execution.concurrency):
                take = self._of_the_store if self.own_server else self._of_the_server
                self._wait(step, name, stack, take)
            yield

    def _wait(
        self, step: PlannedStage, name: str, stack: ExitStack, take: Callable[..., AbstractContextManager[None]]
    ) -> None:
        announced = False
        while not self.session.stopping.is_set():
            try:
                stack.enter_context(take(name))
                return
            except (LockTimeoutError, TimeoutError):
                if not announced:
                    self.session.waits(step.name, self._whom(name))
                announced = True
            self.session.stopping.wait(POLL_S)
        raise Stopped(step.name)

    @contextmanager
    def _of_the_store(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for number in range(self.room[name]):
                try:
                    stack.enter_context(hold(self.session.catalog.storage, f"locks/slot-{name}-{number}.lock", 0))
                    break
                except LockTimeoutError:
                    continue
            else:
                raise LockTimeoutError(f"no slot {name} is free")
            yield

    @contextmanager
    def _of_the_server(self, name: str) -> Iterator[None]:
        slot = concurrency(name, occupy=1, timeout_seconds=1.0, lease_duration=LEASE_S)
        slot.__enter__()
        try:
            yield
        finally:
            try:
                slot.__exit__(None, None, None)
            except httpx.HTTPError as error:  # what the stage made stays; the lease runs out
                self.session.display.note(f"warning: slot {name} is free after {LEASE_S:.0f} s only: {error!r}")

    def _whom(self, slot: str) -> str:
        for run in all_runs(self.session.catalog):
            for stage in run["stages"].values():
                if stage["status"] == "running" and slot in stage.get("slots", ()):
                    return f"waits for slot {slot}, held by " + whom(run, stage["started_at"])
        return f"waits for slot {slot}, which no run of this store holds; `prefect gcl inspect {slot}` says who does"
