"""Launch a training job through DeepSpeed, and what its processes run: ``python -m agentrl.training.launch``.

On one node, one process imports what training needs and then forks the ranks, so that imports are paid for once. It
starts before the job is known, and reads the path of the job file from its standard input. On several nodes DeepSpeed's
own launcher starts the ranks.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.training.job import DeepSpeed, TrainingJob

if TYPE_CHECKING:
    from agentrl.models.policy import Policy
    from agentrl.training.step import Metrics

DONE = "AGENTRL_STEP "
FAILED = "AGENTRL_ERROR "
NOTE = "AGENTRL_NOTE "
DIALECT = "AGENTRL_DIALECT "


def command(config: DeepSpeed, job: Path | None = None) -> list[str]:
    """The command that starts the processes. On one node they are told of the job later."""
    if config.hostfile is None:
        return [sys.executable, "-m", "agentrl.training.launch", "--ranks", str(config.processes)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", config.hostfile]
    return [*launcher, "--num_gpus", str(config.processes), "--module", "agentrl.training.launch", str(job)]


class Ranks:
    """The processes of one job. On one node they start at once, and import what they need until the job is there."""

    def __init__(self, config: DeepSpeed) -> None:
        self.config = config
        self.dialect: dict[str, str] = {}
        """How the model's messages become tokens, as the metrics of a stage name it; known after :meth:`run`."""
        self._process = None if config.hostfile else self._start()

    def _start(self, job: Path | None = None) -> "subprocess.Popen[str]":
        ours = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [ours, *sys.path]))  # a loss may be a class of the user's
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # no module here is taken for ours
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self.config.hostfile:
            _choose_accelerator(environment)
        return subprocess.Popen(
            command(self.config, job),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def run(self, job: Path, on_step: "Callable[[Metrics], None]") -> "list[Metrics]":
        """Run a job file to its end, calling ``on_step`` with the metrics of each step as it is done; the metrics of
        all steps. A job that was killed goes on from its last checkpoint.

        Raises TrainingError with the end of the output if the processes fail.
        """
        process = self._process = self._process or self._start(job)
        tail: list[str] = []
        reason = ""
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # they ended, and said why
                process.stdin.write(f"{job}\n")
                process.stdin.close()
            for line in process.stdout:
                if line.startswith(DONE):
                    on_step(json.loads(line[len(DONE) :]))
                elif line.startswith(NOTE):
                    warnings.warn(line[len(NOTE) :].strip(), stacklevel=2)
                elif line.startswith(DIALECT):
                    self.dialect = json.loads(line[len(DIALECT) :])
                elif line.startswith(FAILED):
                    reason = line[len(FAILED) :].strip()
                else:
                    tail = [*tail[-40:], line]
            code = process.wait()
        finally:
            self.close()
        if code:
            from agentrl.training.batch import TrainingError

            raise TrainingError(reason or f"the processes of {job} ended with {code}:\n{''.join(tail)}")
        return pq.read_table(job.parent / "metrics.parquet").to_pylist()

    def close(self) -> None:
        """End the processes, if they are still there."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()


def launch(config: DeepSpeed, job: Path, on_step: "Callable[[Metrics], None]") -> "list[Metrics]":
    """Start processes and run a job file; see :meth:`Ranks.run`."""
    return Ranks(config).run(job, on_step)


def _choose_accelerator(environment: "os._Environ[str] | dict[str, str]") -> None:
    """Without a GPU, DeepSpeed is told so: it may find another accelerator, or none. The question is one that opens no
    GPU, since processes that are forked later could not open it again."""
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"


def fork_ranks(number: int) -> None:
    """Import what training needs, wait for the path of a job file, and run the job in ``number`` forked processes. If
    one of them fails, the others are ended."""
    _choose_accelerator(os.environ)
    _import_what_ranks_need()
    if not (job := sys.stdin.readline().strip()):
        return  # whoever would have told of a job has ended
    from torch.multiprocessing import start_processes

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    start_processes(_rank, (Path(job),), nprocs=number, start_method="fork")


def _rank(number: int, job: Path) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    run_or_say(job)


WHAT_RANKS_IMPORT = (
    "deepspeed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "agentrl.training.loop",
    "agentrl.training.ranks",
)
"""Also what is imported later, by DeepSpeed's engine and by the model's loading."""


def _import_what_ranks_need() -> None:
    import torch

    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # DeepSpeed's autotuner would take a second for it
    # DeepSpeed's engine imports the Muon optimiser, which compiles three functions: torch would import its compiler for
    # them, which takes two seconds more. They stay as they are written
    compiles, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compiles
    for name in WHAT_RANKS_IMPORT:
        importlib.import_module(name)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run(job_file: Path) -> None:
    """What one process does."""
    import torch.distributed as dist

    from agentrl.training.jit_locks import clear_stale_locks
    from agentrl.training.loop import fit
    from agentrl.training.ranks import DeepSpeedRanks
    from agentrl.training.rows import TrainingRows
    from agentrl.training.step import Trainer

    folder = job_file.parent
    job = TrainingJob.model_validate_json(job_file.read_text())
    rows = TrainingRows.open(folder / "rows.arrow")
    if os.environ.get("LOCAL_RANK") == "0":
        for said in clear_stale_locks(shared=job.deepspeed.hostfile is not None):
            print(NOTE + said, flush=True)
    policy = _policy(job, folder)
    trainer = Trainer(
        policy, job.objective, job.optimizer, job.steps, lambda policy, _: DeepSpeedRanks(policy, job), job.seed
    )
    backend = trainer.backend
    assert isinstance(backend, DeepSpeedRanks)

    def say(metrics: "Metrics") -> None:
        if backend.rank == 0:
            print(DONE + json.dumps(metrics), flush=True)

    history = fit(trainer, rows, job.batch, job.seed, folder / "checkpoints", say, job.checkpoint_every)
    backend.export(folder / "model")
    if backend.rank == 0:
        pq.write_table(pa.Table.from_pylist(history), folder / "metrics.parquet")
    dist.barrier()
    dist.destroy_process_group()


def _policy(job: TrainingJob, folder: Path) -> "Policy":
    """The model that the job starts from. If nobody looked at it before, its tokenizer is compared with that of the
    rows, and the first process says how its messages become tokens.

    Raises TrainingError if there is no model, if no dialect fits it, or if its tokenizer is another one.
    """
    from agentrl.models.policy import Policy
    from agentrl.training.batch import TrainingError

    try:
        policy = Policy.load(job.start or folder / "start")
        if job.made_by is None:
            return policy
        tokenizer, row = job.made_by
        if wrong := policy.wrote(row, tokenizer):
            raise TrainingError(wrong)
        if os.environ["RANK"] == "0":
            _tell_dialect(policy)
    except ValueError as error:
        raise TrainingError(str(error)) from error
    return policy


def _tell_dialect(policy: "Policy") -> None:
    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always")
        said = {"dialect": policy.codec.dialect, "dialect_source": policy.codec.source}
    for remark in remarks:
        print(NOTE + str(remark.message), flush=True)
    print(DIALECT + json.dumps(said), flush=True)


def run_or_say(job: Path) -> None:
    """:func:`run`; a TrainingError is said in one line."""
    from agentrl.training.batch import TrainingError

    try:
        run(job)
    except TrainingError as error:
        print(FAILED + str(error), flush=True)
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "--ranks":
        fork_ranks(int(sys.argv[2]))
    else:  # DeepSpeed's launcher adds --local_rank, which is also in the environment
        run_or_say(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
