"""Whether a run that says ``running`` is: by its process here, by its heartbeat on other machines."""

import os
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.results.gc import find_garbage
from agentrl.pipelines.run.runs import all_runs, this_process

MINUTE = 60


def write(catalog: Catalog, run_id: str, age_s: float = 0.0, **changes: Any) -> None:
    """A record that says ``running`` and was last written ``age_s`` seconds ago by the store's clock."""
    stages = {"a": {"status": "running", "fingerprint": "f" * 32, "started_at": datetime.now(UTC)}}
    catalog.write_run({"run_id": run_id, "state": "running", "stages": stages, **this_process(), **changes})
    path = catalog.storage.root / "runs" / f"{run_id}.json"  # type: ignore[union-attr]
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def states(catalog: Catalog) -> dict[str, str]:
    return {run["run_id"]: run["state"] for run in all_runs(catalog)}


def test_runs_of_one_second_are_in_the_order_in_which_they_started(tmp_path: Path) -> None:
    catalog, start = Catalog(tmp_path), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for number, name in enumerate(["f", "0", "a"]):
        write(catalog, f"20260102-030405-{name}", started_at=start.replace(microsecond=number))
    assert list(states(catalog)) == [f"20260102-030405-{name}" for name in ["a", "0", "f"]]


def test_a_process_of_this_machine_is_asked_itself(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    write(catalog, "1-alive", age_s=60 * MINUTE)  # stopped by a debugger, say
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    write(catalog, "2-gone", pid=gone.pid)
    assert states(catalog) == {"1-alive": "running", "2-gone": "killed"}
    killed = next(run for run in all_runs(catalog) if run["run_id"] == "2-gone")
    assert killed["stages"]["a"]["status"] == "killed"
    assert killed["gone"] == f"process {gone.pid} of {socket.gethostname()} is gone"


def test_a_killed_process_that_nobody_has_waited_for_is_gone(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    killed = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    write(catalog, "1-zombie", pid=killed.pid, process_started=psutil.Process(killed.pid).create_time())
    assert states(catalog) == {"1-zombie": "running"}
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not waited for
    assert psutil.Process(killed.pid).status() == psutil.STATUS_ZOMBIE
    assert states(catalog) == {"1-zombie": "killed"}
    killed.communicate()


def test_a_pid_that_another_process_has_now_does_not_keep_a_run_alive(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    long_ago = psutil.Process().create_time() - 86400
    write(catalog, "1-reused", age_s=60 * MINUTE, process_started=long_ago)
    write(catalog, "2-clock-was-set", process_started=long_ago)  # but its record is renewed
    assert states(catalog) == {"1-reused": "killed", "2-clock-was-set": "running"}


@pytest.mark.parametrize("elsewhere", [{"host": "another"}, {"pid_namespace": "pid:[1]"}])
def test_a_silent_run_of_another_machine_is_gone_and_keeps_nothing(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    catalog = Catalog(tmp_path)
    checkpoints = catalog.scratch("a", "f" * 32)
    write(catalog, "1-silent", age_s=2 * MINUTE, **elsewhere)
    assert find_garbage(catalog, 0).folders == []
    assert states(catalog) == {"1-silent": "running"}  # perhaps our clock is two minutes fast
    write(catalog, "2-beats", age_s=5, **elsewhere)  # by the store's clock the other one is silent
    assert states(catalog) == {"1-silent": "killed", "2-beats": "running"}
    write(catalog, "2-beats", age_s=20 * MINUTE, **elsewhere)
    write(catalog, "1-silent", age_s=20 * MINUTE, **elsewhere)
    assert states(catalog) == {"1-silent": "killed", "2-beats": "killed"}
    assert "has not written the record since" in all_runs(catalog)[0]["gone"]
    assert find_garbage(catalog, 0).folders == [checkpoints]


def test_a_record_of_an_earlier_version_without_start_and_namespace(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    old = {"run_id": "1", "state": "running", "stages": {}, "host": socket.gethostname(), "pid": os.getpid()}
    catalog.write_run(old)
    assert states(catalog) == {"1": "running"}
