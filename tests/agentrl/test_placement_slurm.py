"""Slurm as a launcher. There is no Slurm here: `srun` and `scontrol` are scripts, and all machines are this one."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from fake_machines import fake_slurm
from test_placement import FAMILY, SAYS, child_of, ended, is_gone

from agentrl.placement.base import LaunchError
from agentrl.placement.launcher import here, placed
from agentrl.placement.slurm import allocated
from agentrl.schemas.pipeline import Execution, SlurmLauncher

SLURM = Execution(launcher=SlurmLauncher(), gpus=2, env={"WORD": "said"})


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return fake_slurm(tmp_path / "bin", monkeypatch)


@pytest.mark.slow
@pytest.mark.ci
def test_each_process_is_a_task_with_gpus_of_its_own(
    tmp_path: Path, srun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_API_KEY", "hidden")
    says = f"{SAYS}; print(os.environ['NCCL_DEBUG'], os.environ['SOME_API_KEY'])"
    with placed(SLURM):
        launcher = here()
        assert launcher.nodes == 2
        started = [
            launcher.start("server", [sys.executable, "-c", says, "{host}"], log=tmp_path / f"log{n}", gpus=1)
            for n in range(4)
        ]
        assert [ended(process) for process in started] == [0] * 4
    assert srun.read_text().split() == ["gpu-1", "gpu-2", "gpu-1", "gpu-2"]
    texts = [(tmp_path / f"log{n}").read_text() for n in range(4)]
    for process, text in zip(started, texts, strict=True):
        assert f"['{process.address.partition(':')[0]}']" in text
        assert "said" in text
        assert "INFO hidden" in text
    assert ["0" in text.split("\n")[1].split()[1] for text in texts] == [False, False, True, True]


def test_a_stage_that_ends_leaves_no_task(tmp_path: Path, srun: Path) -> None:
    with placed(SLURM):
        here().start("server", [sys.executable, "-c", FAMILY], log=tmp_path / "log")
        child = child_of(tmp_path / "log")
    assert is_gone(child)


def test_an_environment_that_srun_loses_is_named_and_what_we_pass_arrives(
    tmp_path: Path, srun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    says = "import os; print('CUDA_HOME' in os.environ, os.environ['NCCL_DEBUG'])"
    with placed(Execution(launcher=SlurmLauncher(options=["--export=NONE"]))):
        with pytest.warns(UserWarning, match=r"srun brought no CUDA_HOME to .*: set them in execution.env"):
            process = here().start("server", [sys.executable, "-c", says], log=tmp_path / "log")
        assert ended(process) == 0
    assert "False INFO" in (tmp_path / "log").read_text()


def test_what_is_no_allocation_or_too_small_is_refused(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [machine.name for machine in allocated(None, 0)] == ["gpu-1", "gpu-2"]
    assert [machine.slots for machine in allocated(1, 0, {**os.environ, "SLURM_GPUS_ON_NODE": "8"})] == [8]
    with pytest.raises(LaunchError, match=r"the allocation has 2 machines, and execution.nodes is 3"):
        allocated(3, 0)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "")
    with (
        placed(SLURM),
        pytest.raises(LaunchError, match="SLURM_JOB_NODELIST is not set; call `agentrl run` in a script"),
    ):
        here()


def test_a_machine_on_which_nothing_starts_is_named_with_what_srun_says(tmp_path: Path, srun: Path) -> None:
    (srun.parent / "srun").write_text("#!/bin/sh\necho 'srun: error: Node gpu-1 is down' >&2; exit 1\n")
    says = r"the ranks cannot be started: srun gpu-1 ended with 1; try: srun .* true; it printed: .*Node gpu-1 is down"
    with placed(SLURM), pytest.raises(LaunchError, match=says):
        here().start("ranks", ["true"], log=tmp_path / "log")


@pytest.mark.slow
def test_ranks_of_two_tasks_train_as_one_process(tmp_path: Path, srun: Path) -> None:
    pytest.importorskip("deepspeed")
    from test_placement_ray import assert_it_trains_alike

    assert_it_trains_alike(tmp_path, "launcher: {type: slurm}")
    assert set(srun.read_text().split()) == {"gpu-1", "gpu-2"}


@pytest.mark.slow
def test_a_task_that_dies_ends_the_job_with_a_reason(tmp_path: Path, srun: Path) -> None:
    pytest.importorskip("deepspeed")
    from agentrl.training.batch import TrainingError
    from agentrl.training.job import DeepSpeed
    from agentrl.training.launch import Ranks

    with placed(Execution(launcher=SlurmLauncher())):
        ranks = Ranks(DeepSpeed(processes=1), tmp_path)
        killed: list[float] = []

        def kill() -> None:
            time.sleep(2)
            begins = ["-m", "agentrl.training.launch", "--ranks", "1", "--node", "1"]
            children = psutil.Process().children(recursive=True)
            [task] = [process for process in children if process.cmdline()[1:7] == begins]
            killed.append(time.monotonic())
            os.kill(task.pid, signal.SIGKILL)

        threading.Thread(target=kill).start()

        def listen() -> None:
            while ranks.said() is not None:
                time.sleep(0.1)

        with pytest.raises(TrainingError, match=r"the ranks of machine 2 of 2 \(.*\) of .* ended with 137"):
            listen()
        ranks.close()
    assert time.monotonic() - killed[0] < 30
