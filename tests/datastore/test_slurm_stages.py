"""Curations and imports by jobs of a real Slurm give the ids, reasons and rows of one process, after kills too."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from divided_files import imported, write_files
from divided_rows import filled, kept, rows
from real_slurm import RealSlurm, until

from agentrl.datastore.formats import parts
from agentrl.datastore.shards import queued
from agentrl.schemas.pipeline import ShardEngine

pytestmark = pytest.mark.slurm
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def given() -> list:
    return rows(600)


@pytest.fixture(scope="module")
def expected(given: list, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    return kept(filled(tmp_path_factory.mktemp("whole"), given, 1), ShardEngine(type="here", shards=1))


def test_arrays_of_jobs_curate_as_one_process(
    tmp_path: Path, slurm: RealSlurm, given: list, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "LOOK_S", 0.5)
    assert kept(filled(tmp_path, given), ShardEngine(type="slurm", shards=3)) == expected
    until(lambda: not slurm.jobs())


def test_jobs_import_as_forks_do(tmp_path: Path, slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SIZE", 3000)
    files = write_files(tmp_path)
    whole = imported(tmp_path / "whole", files, None)
    assert imported(tmp_path / "store", files, {"type": "slurm", "workers": 3, "shards": 5}) == whole
    until(lambda: not slurm.jobs())


class Storm:
    """Ends what curates, in turn: a job's process, a job, a node, and the driver."""

    def __init__(self, slurm: RealSlurm, command: list[str], env: dict[str, str]) -> None:
        self.slurm, self.command, self.env = slurm, command, env
        self.done, self.chance = Counter[str](), random.Random(0)

    def run(self, each: dict[str, int]) -> None:
        while True:
            self.driver = subprocess.Popen(self.command, env=self.env, start_new_session=True)
            while self.driver.poll() is None:
                time.sleep(self.chance.uniform(0.1, 1.0))
                left = [kind for kind, number in each.items() if self.done[kind] < number]
                jobs = self.slurm.workers()
                if left and jobs and self.driver.poll() is None:
                    kind = self.chance.choice(left)
                    job = self.chance.choice(sorted(jobs))
                    getattr(self, kind)(job, jobs[job].pid)
                    self.done[kind] += 1
            assert self.driver.returncode in (0, -signal.SIGKILL)
            if self.driver.returncode == 0:
                return

    def kill(self, job: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def cancel(self, job: str, pid: int) -> None:
        self.slurm.ask("scancel", job)

    def down(self, job: str, pid: int) -> None:
        self.slurm.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
        self.slurm.resume("n2")

    def die(self, job: str, pid: int) -> None:
        """The node's daemon, as if the machine were gone."""
        self.slurm.kill("n1")
        until(lambda: "down" in self.slurm.states() or "down*" in self.slurm.states(), 60)
        self.slurm.start_node("n1")

    def start_again(self, job: str, pid: int) -> None:
        self.driver.kill()


def test_kills_of_all_kinds_change_nothing_and_leave_no_job(
    tmp_path: Path, slurm: RealSlurm, given: list, expected: object
) -> None:
    store, result = filled(tmp_path / "store", given), tmp_path / "result.json"
    engine = ShardEngine(type="slurm", shards=4).model_dump_json()
    command = [sys.executable, str(HERE / "divided_rows.py"), store.store, str(tmp_path / "work"), str(result), engine]
    env: dict[str, Any] = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), *sys.path])}
    storm = Storm(slurm, command, env)
    each = {"kill": 3, "cancel": 3, "down": 2, "die": 1, "start_again": 2}
    storm.run(each)
    assert storm.done == each
    assert tuple(json.loads(result.read_text())) == expected
    until(lambda: not slurm.jobs())
