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
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.rank import DIALECT, DONE, FAILED, NO_MEMORY, NOTE, run, run_or_say

if TYPE_CHECKING:
    from agentrl.training.step import Metrics

TRAIN = "agentrl.training.launch"
POLL_S = 0.02
TAIL = 40


def command(config: DeepSpeed, job: Path | None = None, module: str = TRAIN) -> list[str]:
    """The command that starts the processes, which run ``module``. On one node they are told of the job later."""
    if config.hostfile is None:
        return [sys.executable, "-m", module, "--ranks", str(config.processes)]
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--hostfile", config.hostfile]
    return [*launcher, "--num_gpus", str(config.processes), "--module", module, str(job)]


class Ranks:
    """The processes of one job, which run ``module``. On one node they start at once, and import what they need until
    the job is there."""

    def __init__(self, config: DeepSpeed, module: str = TRAIN) -> None:
        self.config, self.module = config, module
        self.dialect: dict[str, str] = {}
        """How the model's messages become tokens, as the metrics of a stage name it; known after :meth:`run`."""
        self._log = tempfile.NamedTemporaryFile(prefix="agentrl-ranks-")  # noqa: SIM115
        self._read = Path(self._log.name).open(errors="replace")  # noqa: SIM115
        self._tail: list[str] = []
        self._part = self._reason = ""
        self._process = None if config.hostfile else self._start()

    def _start(self, job: Path | None = None) -> "subprocess.Popen[str]":
        ours = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [ours, *sys.path]))  # a loss may be a class of the user's
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # no module here is taken for ours
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self.config.hostfile:
            _choose_accelerator(environment)
        return subprocess.Popen(
            command(self.config, job, self.module),
            stdin=subprocess.PIPE,
            stdout=self._log.fileno(),
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def run(self, job: Path, on_step: "Callable[[Metrics], None]") -> "list[Metrics]":
        """Run a job file to its end, calling ``on_step`` with the metrics of each step as it is done; the metrics of
        all steps. A job that was killed goes on from its last checkpoint, and so does one that ran out of memory, with
        micro batches of half the size.

        Raises TrainingError with the end of the output if the processes fail.
        """
        self.begin(job)
        try:
            while (lines := self.said()) is not None:
                for line in lines:
                    if line.startswith(DONE):
                        on_step(json.loads(line[len(DONE) :]))
                time.sleep(POLL_S)
        except NoMemoryError as error:
            self.close()
            error.halve(job)
            return Ranks(self.config, self.module).run(job, on_step)
        finally:
            self.close()
        return pq.read_table(job.parent / "metrics.parquet").to_pylist()

    def begin(self, job: Path) -> None:
        """Tell the processes of their job."""
        self._job = job
        process = self._process = self._process or self._start(job)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # they ended, and said why
            process.stdin.write(f"{job}\n")
            process.stdin.close()

    def said(self) -> list[str] | None:
        """What the processes said since this was asked last; None if they have ended. What they note is warned of.

        Raises TrainingError with the end of the output if they failed, and NoMemoryError if that was why.
        """
        assert self._process is not None
        code = self._process.poll()
        lines, why = [], ""
        for line in self._new_lines():
            if line.startswith(NOTE):
                warnings.warn(line[len(NOTE) :].strip(), stacklevel=2)
            elif line.startswith(DIALECT):
                self.dialect = json.loads(line[len(DIALECT) :])
            elif line.startswith(FAILED):
                self._reason = line[len(FAILED) :].strip()
            elif line.startswith(NO_MEMORY):
                why = line[len(NO_MEMORY) :].strip()
            elif line.startswith(DONE):
                lines.append(line)
            else:
                self._tail = [*self._tail[-TAIL:], line]
        if why:
            raise NoMemoryError(why)
        if code:
            from agentrl.training.batch import TrainingError

            tail = "\n".join(self._tail)
            raise TrainingError(self._reason or f"the processes of {self._job} ended with {code}:\n{tail}")
        return lines if lines or code is None else None

    def _new_lines(self) -> Iterator[str]:
        *lines, self._part = (self._part + self._read.read()).split("\n")
        yield from lines

    def close(self) -> None:
        """End the processes, if they are still there."""
        if self._process and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        self._read.close()
        self._log.close()


class NoMemoryError(RuntimeError):
    """A rank ran out of memory. The others waited for it, so all of them have to begin again."""

    def halve(self, job: Path) -> None:
        """Halve the micro batches in a job file. Raises TrainingError if they are as small as they can be."""
        old = TrainingJob.model_validate_json(job.read_text())
        half = old.optimizer.micro_tokens // 2
        if not half:
            from agentrl.training.batch import TrainingError

            raise TrainingError(f"{self}, though each micro batch is as small as it can be; shard more (zero: 3)")
        optimizer = old.optimizer.model_copy(update={"micro_tokens": half})
        old.model_copy(update={"optimizer": optimizer}).write(job.parent)
        warnings.warn(
            f"{self}; the ranks go on from their last checkpoint with micro batches of {half} tokens, which changes no "
            "result: set optimizer.micro_tokens to it",
            stacklevel=3,
        )


def launch(config: DeepSpeed, job: Path, on_step: "Callable[[Metrics], None]") -> "list[Metrics]":
    """Start processes and run a job file; see :meth:`Ranks.run`."""
    return Ranks(config).run(job, on_step)


def _choose_accelerator(environment: "os._Environ[str] | dict[str, str]") -> None:
    """Tell DeepSpeed if there is no GPU; by itself it might find another accelerator, or none. The check opens no GPU,
    because processes that are forked later could not open it again."""
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"


def fork_ranks(number: int, run: Callable[[Path], None], modules: Sequence[str]) -> None:
    """Import what training needs, and ``modules``, wait for the path of a job file, and ``run`` it in ``number`` forked
    processes. If one of them fails, the others are ended."""
    _choose_accelerator(os.environ)
    _import_what_ranks_need(modules)
    if not (job := sys.stdin.readline().strip()):
        return  # whoever would have told of a job has ended
    from torch.multiprocessing import start_processes

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    os.environ |= {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
    start_processes(_rank, (Path(job), run), nprocs=number, start_method="fork")


def _rank(number: int, job: Path, run: Callable[[Path], None]) -> None:
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    run_or_say(job, run)


WHAT_RANKS_IMPORT = (
    "deepspeed",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "agentrl.training.export",
    "agentrl.training.loop",
    "agentrl.training.partitioned",
    "agentrl.training.ranks",
)
"""Also what is imported later, by DeepSpeed's engine and by the model's loading."""


def _import_what_ranks_need(modules: Sequence[str]) -> None:
    import torch

    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]  # DeepSpeed's autotuner would take a second for it
    # DeepSpeed's engine imports the Muon optimiser, which compiles three functions: torch would import its compiler for
    # them, which takes two seconds more. They stay as they are written
    compiles, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment]
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compiles
    for name in (*WHAT_RANKS_IMPORT, *modules):
        importlib.import_module(name)


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(run: Callable[[Path], None], modules: Sequence[str] = ()) -> None:
    """Run a job in ranks that are forked from this process, or in this one if DeepSpeed's launcher started it, by the
    arguments of the command line. ``modules`` are what ranks import besides."""
    if sys.argv[1] == "--ranks":
        fork_ranks(int(sys.argv[2]), run, modules)
    else:  # DeepSpeed's launcher adds --local_rank, which is also in the environment
        run_or_say(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))), run)


if __name__ == "__main__":
    main(run)
