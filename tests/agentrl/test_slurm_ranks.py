"""Slurm as a launcher, in allocations of a real one: two nodes, which are both this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from real_slurm import RealSlurm, until
from test_placement import FAMILY, SAYS, child_of, ended, is_gone

from agentrl.placement.base import LaunchError
from agentrl.placement.launcher import here, placed
from agentrl.schemas.pipeline import Execution, SlurmLauncher

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
TWO = ("--nodes=2", "--ntasks-per-node=1", "--mem=3000")
SLURM = Execution(launcher=SlurmLauncher(), gpus=2, env={"WORD": "said"})


@pytest.fixture
def allocation(slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its number. This process is in it, as far as ``srun`` can tell."""
    command = ["salloc", "--no-shell", *TWO]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=slurm.env)
    job = done.stderr.split("job allocation ")[1].split()[0]
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_JOB_NODELIST", slurm.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N"))
    yield job
    slurm.ask("scancel", job)


def steps(slurm: RealSlurm) -> list[str]:
    return slurm.ask("squeue", "--steps", "--noheader", "--format=%i").split()


def test_each_process_is_a_task_with_gpus_of_its_own(
    tmp_path: Path, allocation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SOME_API_KEY", "hidden")
    says = f"{SAYS}; print(os.environ['NCCL_DEBUG'], os.environ['SOME_API_KEY'], os.environ['SLURMD_NODENAME'])"
    with placed(SLURM):
        launcher = here()
        assert launcher.nodes == 2
        started = [
            launcher.start("server", [sys.executable, "-c", says, "{host}"], log=tmp_path / f"log{n}", gpus=1)
            for n in range(4)
        ]
        assert [ended(process) for process in started] == [0] * 4
    texts = [(tmp_path / f"log{n}").read_text() for n in range(4)]
    for process, text in zip(started, texts, strict=True):
        assert f"['{process.address.partition(':')[0]}']" in text
        assert "said" in text
        assert "INFO hidden" in text
    assert [text.split()[-1] for text in texts] == ["n1", "n2", "n1", "n2"]
    assert [text.partition("] ")[2].split()[0] for text in texts] == ["1", "1", "0", "0"]


def test_a_stage_that_ends_leaves_no_task(tmp_path: Path, slurm: RealSlurm, allocation: str) -> None:
    with placed(SLURM):
        here().start("server", [sys.executable, "-c", FAMILY], log=tmp_path / "log")
        child = child_of(tmp_path / "log")
        assert [step for step in steps(slurm) if step.startswith(allocation)]
    assert is_gone(child)
    until(lambda: f"{allocation}.0" not in steps(slurm))


STARTS = """
import sys
from pathlib import Path
from agentrl.placement.launcher import here, placed
from agentrl.schemas.pipeline import Execution, SlurmLauncher

with placed(Execution(launcher=SlurmLauncher())):
    here().start("server", [sys.executable, "-c", sys.argv[2]], log=Path(sys.argv[1]))
    sys.stdin.read()
"""


def test_a_stage_that_is_killed_leaves_no_task(tmp_path: Path, slurm: RealSlurm, allocation: str) -> None:
    command = [sys.executable, "-c", STARTS, str(tmp_path / "log"), FAMILY]
    stage = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    child = child_of(tmp_path / "log")
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    assert is_gone(child)
    until(lambda: f"{allocation}.0" not in steps(slurm))


def test_an_environment_that_srun_loses_is_named_and_what_we_pass_arrives(
    tmp_path: Path, allocation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    says = "import os; print('CUDA_HOME' in os.environ, os.environ['NCCL_DEBUG'])"
    with placed(Execution(launcher=SlurmLauncher(options=["--export=NONE"]))):
        with pytest.warns(UserWarning, match=r"srun brought no .*CUDA_HOME.* to .*: set them in execution.env"):
            process = here().start("server", [sys.executable, "-c", says], log=tmp_path / "log")
        assert ended(process) == 0
    assert "False INFO" in (tmp_path / "log").read_text()


def test_a_machine_that_went_down_is_named_with_what_srun_says(
    tmp_path: Path, slurm: RealSlurm, allocation: str
) -> None:
    slurm.ask("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        says = r"the ranks cannot be started: srun n1 (.|\n)*srun: error: "
        with placed(SLURM), pytest.raises(LaunchError, match=says):
            here().start("ranks", ["true"], log=tmp_path / "log")
    finally:
        slurm.resume("n1")


def test_a_task_that_dies_ends_the_ranks_with_a_reason(tmp_path: Path, slurm: RealSlurm, allocation: str) -> None:
    pytest.importorskip("deepspeed")
    from agentrl.training.batch import TrainingError
    from agentrl.training.job import DeepSpeed
    from agentrl.training.launch import Ranks

    def killed_one() -> bool:
        begins = ["-m", "agentrl.training.launch", "--ranks", "1", "--node", "1"]
        for process in slurm.processes():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:7] == begins:
                    process.kill()
                    return True
        return False

    with placed(Execution(launcher=SlurmLauncher())):
        ranks = Ranks(DeepSpeed(processes=1), tmp_path)
        threading.Thread(target=lambda: until(killed_one)).start()
        with pytest.raises(TrainingError, match=r"the ranks of machine 2 of 2 \(.*\) of .* ended with 137"):
            until(lambda: ranks.said() is None, 60)
        ranks.close()
    until(lambda: len(steps(slurm)) <= 1)


def test_ranks_on_two_nodes_train_as_one_process(tmp_path: Path, slurm: RealSlurm) -> None:
    pytest.importorskip("deepspeed")
    from test_placement_ray import assert_it_trains_alike

    assert_it_trains_alike(tmp_path, "launcher: {type: slurm}", "salloc", "--quiet", *TWO)
    until(lambda: not slurm.jobs())


CHECKED = """
name: p
execution: {launcher: {type: slurm}, limits: {heartbeat_s: 60}}
stages:
  tasks: {uses: tasks.generate, with: {env: words, train: 8, dev: 0, heldout: 0}}
"""


def test_the_nodes_of_an_allocation_are_checked(tmp_path: Path, slurm: RealSlurm) -> None:
    (tmp_path / "p.yaml").write_text(CHECKED)
    check = [sys.executable, "-m", "agentrl.flows.cli", "check-cluster", "p.yaml", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    within = ["salloc", "--quiet", *TWO, *check]
    done = subprocess.run(within, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=120)
    [machines] = json.loads(done.stdout)["machines"]
    findings = {finding["check"]: finding for finding in machines["findings"]}
    assert done.returncode == 0, (findings, done.stderr)
    assert {finding["verdict"] for name, finding in findings.items() if name != "disk"} == {"ok"}
    assert "64 MiB over 2 machines" in findings["sum"]["evidence"]


TRAINS = """
name: trains
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 12, dev: 2, heldout: 2}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {noise: 0.5}}
  spread:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {init: tiny}, steps: STEPS, batch: 4, optimizer: {lr: 5.0e-3}, deepspeed: {zero: 2}}
    execution: {launcher: {type: slurm}}
"""


def learned(store: Path) -> str:
    """The digest of the model."""
    from agentrl.datastore.artifacts.catalog import Catalog

    [manifest] = [made for made in Catalog(str(store)).all() if made.ingredients.stage == "spread"]
    return manifest.outputs["model"].digest


def job(slurm: RealSlurm, folder: Path, store: str, *options: str) -> str:
    """A job that runs the pipeline as docs/tutorials/cluster.md shows it."""
    agentrl = f"{sys.executable} -m agentrl.flows.cli run trains.yaml --no-prefect --store {store}"
    (folder / "job.sh").write_text(
        f"#!/bin/bash\nexport PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n{agentrl} &\nrun=$!\n"
        "trap 'kill -TERM $run; wait $run; scontrol requeue \"$SLURM_JOB_ID\"' USR1\nwait $run\n"
    )
    output = ["--output", str(folder / "job.log"), "--open-mode=append"]
    command = ["sbatch", "--parsable", *TWO, *output, *options, f"--chdir={folder}", str(folder / "job.sh")]
    return slurm.ask(*command)


def checkpoints(store: Path) -> list[Path]:
    return list(store.glob("tmp/scratch/**/checkpoints/*"))


def test_a_run_goes_on_after_the_end_of_its_time_and_after_scancel(tmp_path: Path, slurm: RealSlurm) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "trains.yaml").write_text(TRAINS.replace("STEPS", "400"))
    job(slurm, tmp_path, "calm")
    until(lambda: not slurm.jobs(), 240)
    ends = job(slurm, tmp_path, "store", "--time=1", "--requeue", "--signal=B:USR1@50")
    log = tmp_path / "job.log"
    until(lambda: "cancelled; nothing is half done" in log.read_text(), 120)
    until(lambda: f"{ends} PENDING" in slurm.jobs(), 60)
    assert not steps(slurm)
    slurm.ask("scontrol", "update", f"jobid={ends}", "timelimit=10")
    until(lambda: f"{ends} RUNNING" in slurm.jobs(), 60)
    until(lambda: checkpoints(tmp_path / "store"), 120)
    slurm.ask("scancel", ends)
    until(lambda: not slurm.jobs(), 60)
    job(slurm, tmp_path, "store")
    until(lambda: not slurm.jobs(), 240)
    assert learned(tmp_path / "store") == learned(tmp_path / "calm"), log.read_text()
