"""Run a plan: choose what runs the stages, handle Ctrl-C, and print the end."""

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.flows.display import Display
from agentrl.flows.gpus import shortage
from agentrl.flows.order import run_here
from agentrl.flows.server import PrefectServerError, serving, users_server
from agentrl.flows.session import RunSession
from agentrl.flows.showing import display_for
from agentrl.flows.terminal import console
from agentrl.pipelines.file.fields import dotted
from agentrl.pipelines.file.machines import DIVIDED, gpus_here
from agentrl.pipelines.file.readiness import missing_variables
from agentrl.pipelines.plan.plan import Plan, PlannedStage, Selection, Status
from agentrl.pipelines.run.execute import Outcome
from agentrl.schemas.installation import missing
from agentrl.schemas.manifest import Kind, Manifest

OK, FAILED, BLOCKED, CANCELLED = 0, 1, 2, 130

PATIENCE_S, PATIENCE_IDLE_S = 8.0, 0.5
"""Seconds that a cancelled run has to end by itself, if a stage is at work and if none is."""


@dataclass(frozen=True)
class Orchestration:
    """What runs the stages of a plan, and why. ``ignored`` lists settings of stages that will have no effect."""

    prefect: bool
    reason: str
    ignored: str = ""


def choose_engine(plan: Plan, wanted: bool | None) -> Orchestration:
    """Prefect if the user wants it, if a stage that is to run needs it, or if the user has a Prefect server."""
    needs = [f"{step.name}: {', '.join(what)}" for step in plan.to_run if (what := needs_prefect(step))]
    text = "; ".join(needs[:3]) + (f"; and {len(needs) - 3} more stages" if len(needs) > 3 else "")
    if wanted is False:
        return Orchestration(False, "--no-prefect", text)
    if wanted:
        return Orchestration(True, "--prefect")
    if needs:
        return Orchestration(True, text)
    if users_server():
        return Orchestration(True, "a Prefect server is named")
    return Orchestration(False, "no stage needs it")


def needs_prefect(step: PlannedStage) -> list[str]:
    """Fields of a stage's ``execution`` that are set and have an effect only with Prefect."""
    execution = step.node.execution
    return [name for name in ("pool", "concurrency", "retries", "timeout_s") if getattr(execution, name)]


class CannotRunError(RuntimeError):
    """A plan cannot be run; each of ``reasons`` says why."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


def run_plan(plan: Plan, catalog: Catalog, *, jobs: int, prefect: bool | None, as_json: bool) -> int:
    """Run what is to run, and print the results. Returns the exit code: 0, 1 failed, 2 blocked, 130 Ctrl-C.

    ``prefect`` None leaves the choice to :func:`choose_engine`.
    """
    out = console(stderr=as_json)

    def warn(text: str) -> None:
        out.print(f"warning: {text}", markup=False, highlight=False)

    def given_up(session: RunSession) -> None:
        _say(session, out, as_json, cancelled=True)
        out.file.flush()

    display = display_for(out, quiet=as_json)
    try:
        session = carried_out(plan, catalog, jobs=jobs, prefect=prefect, display=display, warn=warn, given_up=given_up)
    except CannotRunError as error:
        for reason in error.reasons:
            out.print(reason, markup=False, highlight=False)
        return BLOCKED
    except PrefectServerError as error:
        out.print(f"error: {error}", markup=False, highlight=False)
        return FAILED
    if session is None:
        return _nothing_to_do(plan, catalog, out, as_json)
    _say(session, out, as_json, session.cancelled)
    return CANCELLED if session.cancelled else FAILED if session.failure else OK


def carried_out(
    plan: Plan,
    catalog: Catalog,
    *,
    jobs: int,
    prefect: bool | None,
    display: Display,
    warn: Callable[[str], None] = warnings.warn,
    given_up: Callable[[RunSession], None] = lambda session: None,
) -> RunSession | None:
    """The session of a run that has ended, or None if nothing was to run. ``warn`` hears what does not apply;
    ``given_up`` is called before this process exits, if Prefect does not end in time after Ctrl-C.

    Raises CannotRunError, and PrefectServerError if the server does not start.
    """
    engine = choose_engine(plan, prefect)
    if problems := obstacles(plan, engine.prefect):
        raise CannotRunError(problems)
    if not plan.to_run:
        return None
    if engine.ignored:
        warn(f"--no-prefect: what stages ask of Prefect does not apply ({engine.ignored})")
    name = "prefect" if engine.prefect else "none"
    session = RunSession(plan, catalog, display, engine=name, engine_reason=engine.reason)
    try:
        with _ended_by_signals(session, given_up), session.recorded():
            _run(session, jobs, engine.prefect)
    except KeyboardInterrupt:
        session.cancelled = True
    return session


def obstacles(plan: Plan, prefect: bool) -> list[str]:
    """Why a plan cannot be run at all on this machine."""
    problems = [f"stage {step.name} is blocked: {'; '.join(step.reasons)}" for step in plan.having(Status.BLOCKED)]
    if plan.to_run:
        try:
            _ = TrajectoryBuffer(plan.store).version
        except StoreError as error:  # for instance written by a newer agentrl
            problems.append(f"error: {error}")
    if plan.to_run and prefect and (why := missing("prefect", "prefect")):
        problems.append(f"error: {why} (or run with --no-prefect: no retries, limits, slots, pools)")
    needs = {(package, extra) for step in plan.to_run for package, extra in step.node.stage.requires.items()}
    for package, extra in sorted(needs):
        if why := missing(package, extra):
            names = ", ".join(step.name for step in plan.to_run if package in step.node.stage.requires)
            problems.append(f"error: stage {names}: {why} (or leave it out, e.g. with --until)")
    for step in plan.to_run:
        if not (prefect and step.node.execution.pool):  # workers of a pool have an environment of their own
            absent = missing_variables(step.node.config, step.node.execution.env)
            problems += [f"error: stage {step.name}: with.{dotted(key)}: {why}" for key, why in absent]
            execution = step.node.execution
            if few := shortage(gpus_here(execution, step.node.config), execution.env):
                problems.append(f"error: stage {step.name}: {few}")
    elsewhere = [step for step in plan.to_run if step.node.execution.pool]
    if elsewhere and prefect and not users_server():
        names = ", ".join(f"{step.name} ({step.node.execution.pool})" for step in elsewhere)
        problems.append(
            f"error: stages run in work pools: {names}; that needs a Prefect server with workers: set PREFECT_API_URL, "
            "choose another profile, or run everything here with --no-prefect"
        )
    return problems + _no_server(plan)


def _no_server(plan: Plan) -> list[str]:
    """What is said of stages whose shards a work pool would run, if no server is named that could have it."""
    executions = {step.name: step.node.execution for step in plan.to_run if step.node.stage.name in DIVIDED}
    pools = {name: each.engine.pool for name, each in executions.items() if each.engine.pool and not each.pool}
    if not pools or users_server():
        return []
    names = ", ".join(f"{name} ({pool})" for name, pool in pools.items())
    return [
        f"error: work pools run shards of stages: {names}; that needs a Prefect server with workers: set "
        "PREFECT_API_URL, choose another profile, or name another execution.engine"
    ]


@contextmanager
def _ended_by_signals(session: RunSession, given_up: Callable[[RunSession], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt, once. If Prefect does not end in time (a retry that waits, a
    server that does not answer), ``given_up`` is called and the process exits. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up() -> None:
        if not over.wait(PATIENCE_S if session.workers.at_work else PATIENCE_IDLE_S):
            session.end("cancelled")
            given_up(session)
            os._exit(CANCELLED)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, signal.SIG_IGN)  # what follows takes a moment
        session.stopping.set()
        threading.Thread(target=give_up, daemon=True).start()
        raise KeyboardInterrupt

    over = threading.Event()
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(session: RunSession, jobs: int, prefect: bool) -> None:
    if not prefect:
        run_here(session, jobs)
        return
    first = session.plan.to_run[0]
    execution = first.node.execution
    if not (execution.concurrency or execution.pool or execution.gpus):
        session.begin(first.name)  # it works while Prefect starts
    with serving(prefect_home(session.catalog), session.log("_prefect")) as server:
        from agentrl.flows.flow import run_with_prefect

        if server:
            server.wait(session.display.note)
        run_with_prefect(session, jobs, server is not None, _in_pool)


def _in_pool(session: RunSession, step: PlannedStage) -> Outcome:
    from agentrl.flows.deploy import run_in_pool

    return run_in_pool(session, step)


def prefect_home(catalog: Catalog) -> Path:
    """Prefect's database and logs lie in the store, or beside its working files if the store is not local."""
    storage = catalog.storage
    return (storage.root if isinstance(storage, LocalStorage) else storage.working_folder()) / "prefect"


def _nothing_to_do(plan: Plan, catalog: Catalog, out: Console, as_json: bool) -> int:
    skipped = plan.having(Status.SKIPPED)
    if as_json:
        print(json.dumps({"run_id": None, "state": "up to date", **plan.to_json()}, indent=2))
        return OK
    what = f"{len(plan.having(Status.CACHED))} stages cached"
    if skipped:
        names = ", ".join(step.name for step in skipped)
        out.print(f"nothing to run in this selection ({what}; out of date but not selected: {names})", markup=False)
        return OK
    out.print(f"{plan.pipeline.name}: everything is up to date, {what}", markup=False, highlight=False)
    manifests = {step.name: step.manifest for step in plan.steps.values() if step.manifest}
    _results(out, plan, catalog, manifests)
    return OK


def _say(session: RunSession, out: Console, as_json: bool, cancelled: bool) -> None:
    if as_json:
        print(json.dumps(session.record, indent=2, default=str), flush=True)
    else:
        _report(session, out, cancelled)


def _report(session: RunSession, out: Console, cancelled: bool) -> None:
    plan = session.plan
    stages: dict[str, dict[str, Any]] = session.record["stages"]
    ran = [name for name, stage in stages.items() if stage["status"] in ("ran", "reused")]
    left = [step.name for step in plan.to_run if step.name not in ran]
    if not left:
        manifests = session.manifests()
        _results(out, plan, session.catalog, manifests)
        if ran:
            _warn_of_worse(out, session.catalog, manifests)
        reused = sum(stages[name]["status"] == "reused" for name in ran)
        cached_stages = len(plan.having(Status.CACHED)) + reused
        out.print(
            f"run {session.run_id}: {len(ran) - reused} stages ran, {cached_stages} were cached",
            markup=False,
            highlight=False,
        )
        return
    if session.failure and not cancelled:
        out.print(Text.assemble("\n", (f"stage {session.failure.stage} failed", "red"), f": {session.failure.cause}"))
        out.print(f"  log       {session.failure.log}", markup=False, highlight=False)
    elif cancelled:
        out.print(Text.assemble("\n", ("cancelled", "yellow"), "; nothing is half done"))
    cached = [step.name for step in plan.having(Status.CACHED)] + ran
    out.print(f"  cached    {', '.join(cached) or 'nothing yet'}", markup=False, highlight=False)
    out.print(f"  left      {', '.join(left)}", markup=False, highlight=False)
    out.print(f"  go on     {_going_on(plan, ran, left)}", markup=False, highlight=False)


def _going_on(plan: Plan, ran: list[str], left: list[str]) -> str:
    """The command that does the rest. Stages that --force has run already are not run again."""
    if ran and plan.selection.force:
        return plan.command(selection=Selection(only=tuple(left), force=True).arguments())
    return plan.command()


def _results(out: Console, plan: Plan, catalog: Catalog, manifests: dict[str, Manifest]) -> None:
    """Print the success of each evaluation, then the paths of reports and store."""
    from agentrl.pipelines.results.gains import gains

    rows = [
        (name, manifest)
        for name, manifest in manifests.items()
        if "success" in manifest.metrics and "success_low" in manifest.metrics
    ]
    if rows:
        best = ["best temperature"] if any("control" in manifest.metrics for _, manifest in rows) else []
        table = Table(title="success on evaluated tasks", title_justify="left", box=None, pad_edge=False)
        for column in ("policy", "temperature 1", "95 % interval", "greedy", *best, "tasks"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name, manifest in rows:
            *cells, tasks = _success(name, manifest.metrics)
            table.add_row(*cells, *([_control(manifest.metrics)] if best else []), tasks)
        out.print(table)
        for gain in gains(catalog, [manifest for _, manifest in rows]).values():
            out.print(gain.brief, markup=False, highlight=False, soft_wrap=True)
    for step in plan.steps.values():
        if step.name in manifests:
            for path in _reports(step, manifests[step.name], catalog):
                out.print(f"report  {path}", markup=False, highlight=False)
    out.print(f"store   {catalog.storage.uri}", markup=False, highlight=False)


def _warn_of_worse(out: Console, catalog: Catalog, manifests: dict[str, Manifest]) -> None:
    """Print what training made worse, unless a report has warned of it."""
    from agentrl.pipelines.results.compare import regressions

    warned = {warning for manifest in manifests.values() for warning in manifest.warnings}
    for warning in regressions(catalog, manifests.values()):
        if warning not in warned:
            out.print(Text.assemble(("warning", "yellow"), f": {warning}"), soft_wrap=True)


def _success(name: str, metrics: dict[str, Any]) -> tuple[str, ...]:
    def number(key: str) -> str:
        return f"{metrics[key]:.3f}" if isinstance(metrics.get(key), float | int) else ""

    interval = f"{number('success_low')} - {number('success_high')}"
    tasks = f"{metrics.get('n_tasks', '')} {metrics.get('split', '')}".strip()
    return str(metrics.get("policy") or name), number("success"), interval, number("greedy"), tasks


def _control(metrics: dict[str, Any]) -> str:
    if "control" not in metrics:
        return "not run"
    return f"{metrics['control']:.3f} at {metrics['control_temperature']:g}"


def _reports(step: PlannedStage, manifest: Manifest, catalog: Catalog) -> list[str]:
    reports = []
    for output in manifest.outputs.values():
        if output.kind is Kind.REPORT:
            folder = catalog.local(manifest, output.path)
            files = sorted(path for path in folder.iterdir() if path.suffix in (".html", ".md"))
            reports += [os.path.relpath(path) for path in files] or [str(folder)]
    return reports
