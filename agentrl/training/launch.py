"""Launch a training job through DeepSpeed, and what each of its processes runs: ``python -m agentrl.training.launch
job.json``."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from agentrl.models.policy import Policy
from agentrl.training.batch import TrainingError
from agentrl.training.jit_locks import clear_stale_locks
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.loop import fit
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.ranks import DeepSpeedRanks
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Metrics, Trainer

DONE = "AGENTRL_STEP "
FAILED = "AGENTRL_ERROR "
NOTE = "AGENTRL_NOTE "


def command(config: DeepSpeed, job: Path) -> list[str]:
    """The command that starts the job's processes: torchrun on this node, DeepSpeed's own launcher on several."""
    module = ["agentrl.training.launch", str(job)]
    if config.hostfile:
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", config.hostfile]
        return [*launcher, "--num_gpus", str(config.processes), "--module", *module]
    nodes = ["--standalone", "--nproc_per_node", str(config.processes)]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, "-m", *module]


def launch(config: DeepSpeed, job: Path, on_step: Callable[[Metrics], None]) -> list[Metrics]:
    """Run a job file's processes to their end, calling ``on_step`` with the metrics of each step as it is done; the
    metrics of all steps. A job that was killed goes on from its last checkpoint.

    Raises TrainingError with the end of the output if they fail.
    """
    ours = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [ours, *sys.path]))  # a loss may be a class of the user's
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # no module here is taken for one of ours
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        command(config, job), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    tail: list[str] = []
    reason = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(DONE):
                on_step(json.loads(line[len(DONE) :]))
            elif line.startswith(NOTE):
                warnings.warn(line[len(NOTE) :].strip(), stacklevel=2)
            elif line.startswith(FAILED):
                reason = line[len(FAILED) :].strip()
            else:
                tail = [*tail[-40:], line]
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise TrainingError(reason or f"the processes of {job} ended with {code}:\n{''.join(tail)}")
    return pq.read_table(job.parent / "metrics.parquet").to_pylist()


def run(job_file: Path) -> None:
    """What one process does."""
    folder = job_file.parent
    job = TrainingJob.model_validate_json(job_file.read_text())
    rows = TrainingRows.open(folder / "rows.arrow")
    if os.environ.get("LOCAL_RANK") == "0":
        for said in clear_stale_locks(shared=job.deepspeed.hostfile is not None):
            print(NOTE + said, flush=True)
    policy = Policy.load(folder / "start")
    ranks: list[DeepSpeedRanks] = []

    def backend(policy: Policy, config: OptimizerConfig) -> DeepSpeedRanks:
        ranks.append(DeepSpeedRanks(policy, job))
        return ranks[0]

    trainer = Trainer(policy, job.objective, job.optimizer, job.steps, backend, job.seed)
    history = fit(trainer, rows, job.batch, job.seed, folder / "checkpoints", _say, job.checkpoint_every)
    ranks[0].export(folder / "model")
    if ranks[0].rank == 0:
        pq.write_table(pa.Table.from_pylist(history), folder / "metrics.parquet")
    dist.barrier()
    dist.destroy_process_group()


def _say(metrics: Metrics) -> None:
    if dist.get_rank() == 0:
        print(DONE + json.dumps(metrics), flush=True)


if __name__ == "__main__":
    # DeepSpeed's launcher adds --local_rank, which is also in the environment.
    try:
        run(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
    except TrainingError as error:
        print(FAILED + str(error), flush=True)
        sys.exit(1)
