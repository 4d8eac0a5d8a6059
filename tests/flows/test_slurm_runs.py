"""Runs whose stages have jobs of a real Slurm: what users see of them, and what is left when a run ends early."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from real_slurm import RealSlurm, until

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]

PIPELINE = """
name: clean
stages:
  tasks: {{uses: tasks.generate, with: {{env: lookup, train: 700, dev: 2, heldout: 2}}}}
  expert: {{uses: trajectories.synthesize, inputs: {{tasks: tasks.train}}, with: {{noise: 0.5}}}}
  scored:
    uses: trajectories.score
    inputs: {{trajectories: expert, tasks: tasks.train}}
    with: {{rewards: [{{type: environment}}, {{type: "slow:Slow", weight: 0.1}}]}}
    execution: {{engine: {{type: slurm, shards: 3{more}}}}}
"""
SLOW = """
import time
from agentrl.rewards.component import Reward

class Slow(Reward):
    def value(self, rollout, task):
        time.sleep(60)
        return 0.5
"""


def agentrl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.flows.cli", *arguments]


@pytest.fixture
def env(tmp_path: Path, slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-C with Prefect", "SIGTERM"])
def test_a_run_that_is_ended_leaves_no_job(env: dict[str, str], slurm: RealSlurm, how: str) -> None:
    Path("p.yaml").write_text(PIPELINE.format(more=", workers: 2"))
    command = agentrl("run", "p.yaml", *([] if "Prefect" in how else ["--no-prefect"]))
    with Path("printed").open("wb") as log:
        run = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    until(lambda: run.poll() is not None or len(slurm.workers()) == 2, 90)
    assert run.poll() is None, Path("printed").read_text()
    assert len(slurm.jobs()) == 3
    if how == "SIGTERM":
        run.terminate()
    else:
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    assert run.wait(30) == 130, Path("printed").read_text()
    until(lambda: not slurm.jobs(), 10)
    assert not slurm.workers()


def test_status_says_why_jobs_do_not_start(env: dict[str, str], slurm: RealSlurm) -> None:
    Path("p.yaml").write_text(PIPELINE.format(more=", options: [--cpus-per-task=9]"))
    run = subprocess.Popen(agentrl("run", "p.yaml", "--no-prefect"), env=env, stdout=subprocess.DEVNULL)
    told: list[str] = []

    def status() -> bool:
        told.append(subprocess.check_output(agentrl("status", "p.yaml"), env={**env, "COLUMNS": "400"}, text=True))
        return "3 waiting, Slurm does not start 3 of 3 jobs: PartitionConfig" in told[-1]

    try:
        until(status, 60)
    except AssertionError:
        pytest.fail(told[-1])
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(30)
    until(lambda: not slurm.jobs())
