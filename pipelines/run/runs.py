"""Records of runs: their true state, listing them, showing one, comparing two."""

import os
import socket
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
from pydantic import ValidationError

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.plan.plan import differences
from agentrl.schemas.manifest import Manifest
from agentrl.schemas.shards import ShardsNow

Run = dict[str, Any]

HEARTBEAT_S = 10.0
"""A run at work writes its record at least this often."""

SILENT = timedelta(seconds=60)
"""A run of another machine is gone if its record is older than the store's newest record by more than this."""

CLOCK_SLACK = timedelta(minutes=10)
"""How far the local clock may be from the store's. It is used only if no other record tells the store's time."""


def this_process() -> dict[str, Any]:
    """What a record says about the process of its run. A pid alone may be given to another process later."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "pid_namespace": _pid_namespace(),
    }


def _pid_namespace() -> str:
    """Two containers may have one host name and the same pids. Empty if the system has no such namespaces."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def all_runs(catalog: Catalog, pipeline: str | None = None) -> list[Run]:
    """Newest first, those of one pipeline or all. A run whose process is gone before it recorded an end is ``killed``,
    and ``gone`` says how that is known."""
    recorded = catalog.runs()
    written = dict(catalog.storage.beside("runs")) if any(run["state"] == "running" for run in recorded) else {}
    runs = [_with_true_state(run, written) for run in recorded if pipeline is None or run["pipeline"] == pipeline]
    return sorted(runs, key=_when, reverse=True)


def _when(run: Run) -> tuple[str, str, str]:
    """By what runs are in order. The first 15 characters of an id are the second in which the run started, and what
    follows is random."""
    return run["run_id"][:15], str(run.get("started_at", "")), run["run_id"]


def _with_true_state(run: Run, written: dict[str, datetime]) -> Run:
    """``written`` is when each record was last written, by the store's clock."""
    if run["state"] != "running" or not (gone := _gone(run, written)):
        return run
    stages = {
        name: {**stage, "status": "killed"} if stage["status"] in ("running", "waiting") else stage
        for name, stage in run["stages"].items()
    }
    return {**run, "state": "killed", "stages": stages, "gone": gone}


def _gone(run: Run, written: dict[str, datetime]) -> str:
    """Why a run that says ``running`` is not; empty if it is."""
    here = run["host"] == socket.gethostname() and run.get("pid_namespace", _pid_namespace()) == _pid_namespace()
    if here and (same := _is_same_process(run)) is not None:
        return "" if same else f"process {run['pid']} of {run['host']} is gone"
    last = written.get(f"runs/{run['run_id']}.json")
    if last is None:
        return ""
    silent = max(max(written.values()) - last, datetime.now(UTC) - last - CLOCK_SLACK)
    return f"{run['host']} has not written the record since {last:%Y-%m-%d %H:%M:%S} UTC" if silent > SILENT else ""


def _is_same_process(run: Run) -> bool | None:
    """Whether a run of this machine lives. None if the process with its pid started at another time: it is another
    process, or the clock was set since. Then the heartbeat of the run decides.

    A zombie is gone. In a container whose first process waits for nobody, every orphan that was killed stays one."""
    try:
        process = psutil.Process(run["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        started = process.create_time()
    except psutil.NoSuchProcess:
        return False
    return True if abs(started - run.get("process_started", started)) < 1.0 else None


def at_work_on(runs: Iterable[Run], stage: str, fingerprint: str, but: str) -> Run | None:
    """The run that is at work on an artifact and is not ``but``, the oldest if there are several."""
    others = (
        run
        for run in runs
        if run["run_id"] != but
        and run["stages"].get(stage, {}).get("fingerprint") == fingerprint
        and run["stages"][stage]["status"] == "running"
    )
    return min(others, key=lambda run: run["stages"][stage].get("started_at", ""), default=None)


def whom(run: Run, since: str) -> str:
    """A run that others wait for, and what can be done about it."""
    return (
        f"run {run['run_id']} (host {run['host']}, pid {run['pid']}), at work since {local_time(since)}; "
        f"wait for it, or end it there: kill {run['pid']}"
    )


def find_run(catalog: Catalog, text: str) -> Run:
    """A run by its id, the beginning of it, or ``last``. Raises LookupError with a message for the user."""
    runs = all_runs(catalog)
    if text == "last" and runs:
        return runs[0]
    matches = [run for run in runs if run["run_id"].startswith(text)]
    exact = [run for run in matches if run["run_id"] == text]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        raise LookupError(f"{text!r} is the beginning of {len(matches)} runs; write more of it")
    ids = [run["run_id"] for run in runs]
    hint = did_you_mean(text, ids) or f"; the newest: {', '.join(ids[:3]) or 'there are no runs in this store'}"
    raise LookupError(f"there is no run {text!r}{hint}")


def summary(run: Run) -> Run:
    """One line's worth of a run, for a list."""
    counts: dict[str, int] = {}
    for stage in run["stages"].values():
        counts[stage["status"]] = counts.get(stage["status"], 0) + 1
    keys = ("run_id", "pipeline", "state", "started_at", "duration_s", "command")
    return {**{key: run.get(key) for key in keys}, "stages": counts}


def shards_of(stage: Mapping[str, Any]) -> ShardsNow | None:
    """What the record of a run says of a stage's shards; None if it does not say."""
    try:
        return ShardsNow.model_validate(stage.get("shards"))
    except ValidationError:
        return None


def local_time(text: str | None) -> str:
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}" if text else ""


def diff_runs(catalog: Catalog, a: Run, b: Run, of_b: Catalog | None = None) -> dict[str, dict[str, Any]]:
    """What differs between two runs, by stage; stages that do not differ are left out. Run ``b`` may be of another
    store, whose catalog is ``of_b``.

    Each has ``only_in`` or ``ingredients`` (config, code, inputs... one line each), ``metrics`` and ``rows``
    (name -> [in a, in b]).
    """
    differing: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*a["stages"], *b["stages"]]):
        if name not in a["stages"] or name not in b["stages"]:
            differing[name] = {"only_in": (a if name in a["stages"] else b)["run_id"]}
            continue
        left, right = _manifest(catalog, name, a), _manifest(of_b or catalog, name, b)
        if a["stages"][name]["fingerprint"] == b["stages"][name]["fingerprint"]:
            continue
        if left is None or right is None:
            absent = [run for run, manifest in ((a, left), (b, right)) if manifest is None]
            why = [f"no artifact of run {run['run_id']} ({run['stages'][name]['status']})" for run in absent]
            differing[name] = {"ingredients": why}
            continue
        differing[name] = {
            "ingredients": differences(left.ingredients, right.ingredients),
            "metrics": _differing(left.metrics, right.metrics),
            "rows": _differing(_rows(left), _rows(right)),
        }
    return differing


def _manifest(catalog: Catalog, stage: str, run: Run) -> Manifest | None:
    fingerprint = run["stages"][stage]["fingerprint"]  # empty if the run ended before its inputs were made
    return catalog.manifest(stage, fingerprint) if fingerprint else None


def _rows(manifest: Manifest) -> dict[str, Any]:
    return {name: output.rows for name, output in manifest.outputs.items() if output.rows is not None}


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}
