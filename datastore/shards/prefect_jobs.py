"""Shards as flow runs of a work pool of the user's Prefect server, which the pool's workers start."""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from agentrl.datastore.optional import optional
from agentrl.datastore.shards.shard import ShardError

MOST = 1000
"""Flow runs at a time, if a pipeline says no number."""
PAGE = 200
"""Flow runs that Prefect's server tells of at once."""
LOOK_S = 5.0
"""Seconds between two looks at whether anybody works in the pool."""


class PrefectJobs:
    """``workers``: how many flow runs may be there at once. Raises ShardError if there is no server, or no such pool in
    it."""

    def __init__(self, pool: str, workers: int | None = None) -> None:
        settings = optional("prefect.settings", "prefect")
        from prefect.client.orchestration import get_client
        from prefect.exceptions import ObjectNotFound

        if not settings.PREFECT_API_URL.value():
            raise ShardError(
                f"engine prefect needs a Prefect server that has the work pool {pool!r}, and none is named; set "
                "PREFECT_API_URL, or choose another profile by `prefect profile use`"
            )
        self._client = get_client(sync_client=True).__enter__()
        self.most = workers or MOST
        self._pool, self._url = pool, str(self._client.api_url).rstrip("/")
        if error := self._client.api_healthcheck():
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ShardError(
                f"the Prefect server at {self._url} does not answer: {reason}; start it, or set PREFECT_API_URL to "
                "another"
            )
        try:
            self._client.read_work_pool(pool)
        except ObjectNotFound:
            known = ", ".join(sorted(other.name for other in self._client.read_work_pools())) or "none"
            raise ShardError(
                f"the Prefect server at {self._url} has no work pool {pool!r}; it has: {known}; create it by `prefect "
                f"worker start --pool {pool} --type process` where shards are to run, or name another server by "
                "PREFECT_API_URL"
            ) from None
        self._deployment = self._deployed()
        self._runs: dict[int, UUID] = {}
        self._looked, self._notice = 0.0, ""

    def _deployed(self) -> UUID:
        from prefect.deployments.runner import EntrypointType, RunnerDeployment

        from agentrl.datastore.shards.prefect_flow import run_shard

        deployment = RunnerDeployment.from_flow(
            run_shard,
            name=self._pool,
            description="Shards of stages whose execution.engine names this pool",
            work_pool_name=self._pool,
            entrypoint_type=EntrypointType.MODULE_PATH,
            enforce_parameter_schema=False,
        )
        return cast(UUID, cast(Any, deployment).apply(_sync=True))  # also inside an event loop, as of a notebook

    @property
    def notice(self) -> str:
        if time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            self._notice = self._why_idle()
        return self._notice

    def _why_idle(self) -> str:
        from prefect.client.schemas.objects import WorkPoolStatus

        try:
            status = self._client.read_work_pool(self._pool).status
        except _errors():
            return f"the Prefect server at {self._url} does not answer; it is asked again"
        if status is WorkPoolStatus.PAUSED:
            return f"the pool is paused: prefect work-pool resume {self._pool}"
        nobody = f"nobody works in the pool: prefect worker start --pool {self._pool}"
        return nobody if status is WorkPoolStatus.NOT_READY else ""

    def submit(self, folder: Path, numbers: Sequence[int]) -> None:
        for number in numbers:
            given = {"folder": str(folder), "number": number}
            try:
                run = self._client.create_flow_run_from_deployment(
                    self._deployment, parameters=given, name=f"{folder.name}-{number}"
                )
            except _errors() as error:
                raise ShardError(
                    f"the Prefect server at {self._url} took no flow run: {type(error).__name__}: "
                    f"{' '.join(str(error).split())[:200]}; run again, what is done stays done"
                ) from None
            self._runs[number] = run.id

    def gone(self) -> dict[int, str]:
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

        names = {run: number for number, run in self._runs.items()}
        ids, listed = list(names), list[Any]()
        try:
            for start in range(0, len(ids), PAGE):
                chosen = FlowRunFilter(id=FlowRunFilterId(any_=ids[start : start + PAGE]))
                listed += self._client.read_flow_runs(flow_run_filter=chosen, limit=PAGE)
        except _errors():
            return {}  # the notice says that it does not answer
        states = {run.id: run.state for run in listed}
        words = {names[run]: _last_words(run, state) for run, state in states.items() if state and state.is_final()}
        return words | {names[run]: f"flow run {run} was deleted" for run in names.keys() - states.keys()}

    def cancel(self, numbers: Collection[int]) -> None:
        from prefect.states import Cancelling

        for run in [self._runs.pop(number) for number in numbers if number in self._runs]:
            with suppress(*_errors()):
                self._client.set_flow_run_state(run, Cancelling())

    def forget(self, number: int) -> None:
        self._runs.pop(number, None)

    def close(self) -> None:
        self.cancel(list(self._runs))
        self._client.__exit__(None, None, None)


def _last_words(run: UUID, state: Any) -> str:
    reason = " ".join((state.message or "").split())[:300]
    return f"flow run {run} is {state.name}{f': {reason}' if reason else ''}"


def _errors() -> tuple[type[Exception], ...]:
    """What the client raises if the server does not answer, or refuses."""
    import httpx
    from prefect.exceptions import PrefectException

    return httpx.HTTPError, PrefectException
