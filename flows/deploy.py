"""Pipelines on a schedule, and stages in other work pools: Prefect deployments of the one flow below."""

import logging
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.flow_runs import run_deployment
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.states import Cancelling

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.storage.object_store import is_remote
from agentrl.flows.display import Lines
from agentrl.flows.flow import run_stages
from agentrl.flows.session import RunSession
from agentrl.flows.slots import Slots
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.plan.plan import Plan, PlannedStage, Selection, Status, make_plan
from agentrl.pipelines.run.execute import Outcome, same_content
from agentrl.pipelines.run.worker import StageError
from agentrl.pipelines.secrets import shown_setting

DEFAULT_POOL = "agentrl"
TAG = "agentrl"
POLL_S = 1.0


@flow(name="agentrl", validate_parameters=False, persist_result=False)
def run_pipeline(
    file: str,
    store: str,
    profile: str | None = None,
    settings: list[str] | None = None,
    only: list[str] | None = None,
    force: bool = False,
    jobs: int = 1,
    pool: str | None = None,
) -> None:
    """Plan a pipeline and run what is not cached. ``pool`` is the work pool that this runs in.

    Raises StageError if a stage fails, ValueError if the plan is blocked, SpecError if the file is wrong.
    """
    catalog = Catalog(store)
    pipeline = load(file, profile=profile, settings=settings or ())
    plan = make_plan(pipeline, catalog, store, Selection(only=tuple(only or ()), force=force))
    log = cast(logging.Logger, get_run_logger())
    if blocked := plan.having(Status.BLOCKED):
        raise ValueError("; ".join(f"stage {step.name} is blocked: {'; '.join(step.reasons)}" for step in blocked))
    if not plan.to_run:
        log.info("everything is up to date, %d stages cached", len(plan.having(Status.CACHED)))
        return
    session = RunSession(plan, catalog, Lines(log.info), engine="prefect", engine_reason="a deployment of its server")
    with session.recorded():
        run_stages(session, jobs, Slots(session, own_server=False), run_in_pool, pool)


# deployments


def deploy(plan: Plan, name: str, pool: str, cron: str | None = None, timezone: str | None = None) -> str:
    """Create or update the deployment ``<pipeline>/<name>`` in a work pool and return its full name.

    Raises LookupError if the pool does not exist (the default pool is created), or if a setting holds a secret.
    """
    pipeline = plan.pipeline
    with get_client(sync_client=True) as client:
        local = _pool_type(client, pool) == "process"
    schedule: dict[str, Any] = {}
    if cron:
        from prefect.schedules import Cron

        schedule = {"schedule": Cron(cron, timezone=timezone)}
    deployment = RunnerDeployment.from_flow(
        run_pipeline.with_options(name=pipeline.name),
        name=name,
        parameters=_parameters(plan, pool, local),
        tags=[TAG, pipeline.name],
        description=pipeline.description or None,
        work_pool_name=pool,
        job_variables=_process(Path.cwd()) if local else {},
        entrypoint_type=EntrypointType.MODULE_PATH,
        enforce_parameter_schema=False,
        **schedule,
    )
    deployment.apply()
    return f"{pipeline.name}/{name}"


def _process(folder: Path) -> dict[str, str]:
    """How a process pool on this machine starts a flow run."""
    return {"working_dir": str(folder), "command": shlex.join([sys.executable, "-P", "-m", "agentrl.flows.flow_run"])}


def _parameters(plan: Plan, pool: str, local: bool) -> dict[str, Any]:
    """Paths are made absolute for workers on this machine; elsewhere they are as the user wrote them.

    Raises LookupError if a setting holds a secret: Prefect keeps parameters and shows them.
    """
    if hidden := [shown_setting(setting) for setting in plan.pipeline.settings if shown_setting(setting) != setting]:
        raise LookupError(
            f"--set {hidden[0]}: Prefect would keep the value; write ${{NAME}} and set NAME where it runs"
        )
    pipeline, store = plan.pipeline, plan.store
    file = pipeline.reference
    if local:
        file = str(Path(file).resolve()) if Path(file).is_file() else file
        store = store if is_remote(store) else str(Path(store).resolve())
    return {
        "file": file,
        "store": store,
        "profile": pipeline.profile,
        "settings": list(pipeline.settings),
        "pool": pool,
    }


def _pool_type(client: SyncPrefectClient, pool: str) -> str:
    try:
        return client.read_work_pool(pool).type
    except ObjectNotFound:
        if pool != DEFAULT_POOL:
            known = ", ".join(sorted(pool_known.name for pool_known in client.read_work_pools())) or "none"
            raise LookupError(
                f"there is no work pool {pool!r}; there are: {known}; create it: "
                f"prefect work-pool create {pool} --type process (or kubernetes)"
            ) from None
    from prefect.workers.process import ProcessWorker

    template = ProcessWorker.get_default_base_job_template()
    client.create_work_pool(WorkPoolCreate(name=pool, type="process", base_job_template=template))
    return "process"


def deployments() -> list[dict[str, Any]]:
    """Every deployment of ours: name, schedule, whether it is paused, pool, parameters."""
    with get_client(sync_client=True) as client:
        return [_described(client, deployment) for deployment in _ours(client)]


def _ours(client: SyncPrefectClient) -> list[DeploymentResponse]:
    return client.read_deployments(deployment_filter=DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG])))


def _described(client: SyncPrefectClient, deployment: DeploymentResponse) -> dict[str, Any]:
    schedules = [getattr(entry.schedule, "cron", str(entry.schedule)) for entry in deployment.schedules]
    return {
        "name": f"{client.read_flow(deployment.flow_id).name}/{deployment.name}",
        "schedule": ", ".join(schedules) or None,
        "paused": bool(deployment.paused),
        "pool": deployment.work_pool_name,
        "parameters": deployment.parameters,
    }


def _find(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """By full name, or by the pipeline's name if it has only one deployment. Raises LookupError."""
    named = {_described(client, deployment)["name"]: deployment for deployment in _ours(client)}
    fitting = [full for full in named if name in (full, full.partition("/")[0])]
    if len(fitting) != 1:
        hint = did_you_mean(name, named) or f"; there are: {', '.join(named) or 'none'}"
        what = (
            f"{name!r} stands for {', '.join(fitting)}; name one" if fitting else f"there is no schedule {name!r}{hint}"
        )
        raise LookupError(what)
    return named[fitting[0]]


def pause(name: str) -> None:
    with get_client(sync_client=True) as client:
        client.pause_deployment(_find(client, name).id)


def resume(name: str) -> None:
    with get_client(sync_client=True) as client:
        client.resume_deployment(_find(client, name).id)


def delete(name: str) -> None:
    with get_client(sync_client=True) as client:
        client.delete_deployment(_find(client, name).id)


# stages in other pools


def run_in_pool(session: RunSession, step: PlannedStage) -> Outcome:
    """Run one stage as a deployment run in the work pool that its ``execution`` names, and wait for it.

    Raises StageError if that run fails, is cancelled, or publishes another fingerprint than was planned here. If
    this run ends first, the deployment run is cancelled.
    """
    pool = step.node.execution.pool
    assert pool
    try:
        name = deploy(session.plan, f"stages-{pool}", pool)
    except LookupError as error:
        raise StageError(step.name, str(error.args[0]), session.log(step.name)) from None
    job = session.job(step.name)
    before = session.catalog.manifest(step.name, job.fingerprint)
    if before and not job.forced:
        return Outcome(before, reused=True)
    parameters = {**_run_parameters(session.plan, pool), "only": [step.name], "force": job.forced}
    started = cast(FlowRun, run_deployment(name, parameters=parameters, timeout=0, flow_run_name=step.name))
    try:
        ended = _wait(session, started)
    except BaseException:
        with suppress(Exception), get_client(sync_client=True) as client:
            client.set_flow_run_state(started.id, Cancelling(), force=False)
        raise
    manifest = session.catalog.manifest(step.name, job.fingerprint)
    state = ended.state
    if state is None or not state.is_completed():
        cause = f"in pool {pool}: {state.name if state else 'unknown'}: {state.message if state else ''}"
        raise StageError(step.name, f"{cause} (flow run {ended.id})", session.log(step.name))
    if manifest is None:
        cause = f"pool {pool} published another fingerprint; code, models or packages differ between here and there"
        raise StageError(step.name, cause, session.log(step.name))
    if before and manifest.made_again == before.made_again:
        raise StageError(step.name, f"pool {pool} did not make it again", session.log(step.name))
    return Outcome(manifest, reproduced=same_content(before, manifest))


def _run_parameters(plan: Plan, pool: str) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        return _parameters(plan, pool, _pool_type(client, pool) == "process")


def _wait(session: RunSession, started: FlowRun) -> FlowRun:
    """The deployment run after its end. A server that does not answer is reported once and asked again."""
    lost = False
    with get_client(sync_client=True) as client:
        while True:
            try:
                flow_run = client.read_flow_run(started.id)
                if flow_run.state and flow_run.state.is_final():
                    return flow_run
            except httpx.HTTPError as error:
                if not lost:
                    text = f"warning: {started.name}: Prefect's server does not answer ({error!r}); it is asked again"
                    session.display.note(text)
                lost = True
            if session.stopping.wait(POLL_S):
                raise StageError(started.name, "cancelled", Path(os.devnull))
