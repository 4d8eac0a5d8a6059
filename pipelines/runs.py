"""Runs that were: listing them, showing one, comparing two."""

import os
import socket
from datetime import datetime
from typing import Any

from datastore.catalog import Catalog
from pipelines.plan import differences
from pipelines.problems import did_you_mean
from schemas.manifest import Manifest

Run = dict[str, Any]


def all_runs(catalog: Catalog) -> list[Run]:
    """Newest first. A run whose process is gone without a word is ``killed``."""
    runs = [_with_true_state(run) for run in catalog.runs()]
    return sorted(runs, key=lambda run: run["run_id"], reverse=True)


def _with_true_state(run: Run) -> Run:
    if run["state"] == "running" and run["host"] == socket.gethostname() and not _lives(run["pid"]):
        stages = {
            name: {**stage, "status": "killed"} if stage["status"] == "running" else stage
            for name, stage in run["stages"].items()
        }
        return {**run, "state": "killed", "stages": stages}
    return run


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def find_run(catalog: Catalog, text: str) -> Run:
    """A run by its id, the beginning of it, or ``last``. Raises LookupError with a message for the user."""
    runs = all_runs(catalog)
    if text == "last" and runs:
        return runs[0]
    found = [run for run in runs if run["run_id"].startswith(text)]
    exact = [run for run in found if run["run_id"] == text]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise LookupError(f"{text!r} is the beginning of {len(found)} runs; write more of it")
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


def local_time(text: str | None) -> str:
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M:%S}" if text else ""


def diff_runs(catalog: Catalog, a: Run, b: Run) -> dict[str, dict[str, Any]]:
    """What differs between two runs, by stage; stages that do not differ are left out.

    Each has ``only_in`` or ``ingredients`` (config, code, inputs... one line each), ``metrics`` and ``rows``
    (name -> [in a, in b]).
    """
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*a["stages"], *b["stages"]]):
        if name not in a["stages"] or name not in b["stages"]:
            found[name] = {"only_in": (a if name in a["stages"] else b)["run_id"]}
            continue
        left, right = (catalog.manifest(name, run["stages"][name]["fingerprint"]) for run in (a, b))
        if a["stages"][name]["fingerprint"] == b["stages"][name]["fingerprint"]:
            continue
        if left is None or right is None:
            absent = [run for run, manifest in ((a, left), (b, right)) if manifest is None]
            why = [f"no artifact of run {run['run_id']} ({run['stages'][name]['status']})" for run in absent]
            found[name] = {"ingredients": why}
            continue
        found[name] = {
            "ingredients": differences(left.ingredients, right.ingredients),
            "metrics": _differing(left.metrics, right.metrics),
            "rows": _differing(_rows(left), _rows(right)),
        }
    return found


def _rows(manifest: Manifest) -> dict[str, Any]:
    return {name: output.rows for name, output in manifest.outputs.items() if output.rows is not None}


def _differing(a: dict[str, Any], b: dict[str, Any]) -> dict[str, list[Any]]:
    return {key: [a.get(key), b.get(key)] for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}
