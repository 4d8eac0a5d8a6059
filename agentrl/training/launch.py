"""Launch a training job through DeepSpeed, and what its processes run: ``python -m agentrl.training.launch``.

On each machine, one process imports what training needs and then forks its ranks, so that imports are paid for once. It
starts before the job is known, and waits for a file that names the job.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pyarrow.parquet as pq

from agentrl.placement.base import LaunchError, Process, python_path
from agentrl.placement.launcher import here, temporary
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.rank import DIALECT, DONE, FAILED, NO_MEMORY, NOTE, run, run_or_say

if TYPE_CHECKING:
    from agentrl.training.step import Metrics

TRAIN = "agentrl.training.launch"
POLL_S = 0.02
TAIL = 40


def command(processes: int, node: int, nodes: int, master: str, job_file: Path, module: str = TRAIN) -> list[str]:
    """The command that starts the ranks of machine ``node`` of ``nodes``, which run ``module``. The first rank listens
    at ``master``; the path of the job file will stand in the file ``told``."""
    ranks = ["--ranks", str(processes), "--node", str(node), "--nodes", str(nodes), "--master", master]
    return [sys.executable, "-m", module, *ranks, str(job_file)]


class Ranks:
    """The processes of one job, which run ``module``, on each machine of the stage's launcher. They start at once, and
    import what they need until the job is there. ``folder`` is one that all machines read; None takes a temporary one.

    Raises LaunchError if they cannot be started.
    """

    def __init__(self, config: DeepSpeed, folder: Path | None = None, module: str = TRAIN) -> None:
        self.config, self.folder, self.module = config, folder, module
        self.dialect: dict[str, str] = {}
        """How the model's messages become tokens, as the metrics of a stage name it; known after :meth:`run`."""
        self._temporary = None if folder else temporary("ranks")
        self._files = (folder or Path(str(self._temporary))).absolute() / f"ranks-{uuid.uuid4().hex[:8]}"
        self._processes: list[Process] = []
        self._logs: list[TextIO] = []
        self._parts: list[str] = []
        self._tails: list[list[str]] = []
        self._reason = ""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        launcher, master = here(), "{host}:{port}"
        number = _ranks(self.config, launcher.gpus)
        env = {
            "PYTHONPATH": python_path(),  # a loss may be a class of the user's
            "PYTHONSAFEPATH": "1",  # no module of the folder is taken for ours
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # else malloc raises it to 32 MB by itself, and keeps a gigabyte of what gradients and gathered weights left
            "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", "1000000"),
        }
        for node in range(launcher.nodes):
            ranks = command(number, node, launcher.nodes, master, self._told, self.module)
            log = self._files.with_suffix(f".{node}.log")
            log.touch()
            gpus = number if launcher.gpus else 0
            self._processes.append(launcher.start("ranks", ranks, log=log, gpus=gpus, env=env, node=node))
            self._logs.append(log.open(errors="replace"))
            self._parts.append("")
            self._tails.append([])
            master = self._processes[0].address

    @property
    def _told(self) -> Path:
        return self._files.with_suffix(".told")

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
            return Ranks(self.config, self.folder, self.module).run(job, on_step)
        finally:
            self.close()
        return pq.read_table(job.parent / "metrics.parquet").to_pylist()

    def begin(self, job: Path) -> None:
        """Tell the processes of their job."""
        self._job = job
        written = self._files.with_suffix(".tmp")
        written.write_text(f"{job.absolute()}\n")
        written.rename(self._told)

    def said(self) -> list[str] | None:
        """What the processes said since this was asked last; None if they have ended. What they note is warned of.

        Raises TrainingError with the end of the output if they failed, and NoMemoryError if that was why.
        """
        codes = [process.poll() for process in self._processes]
        lines, why = [], ""
        for node, line in self._new_lines():
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
                self._tails[node] = [*self._tails[node][-TAIL:], line]
        if why:
            raise NoMemoryError(why)
        if any(codes):
            from agentrl.training.batch import TrainingError

            node = next(node for node, code in enumerate(codes) if code)
            tail = "\n".join(self._tails[node])
            raise TrainingError(self._reason or f"the processes of {self._job} ended with {codes[node]}:\n{tail}")
        return lines if lines or None in codes else None

    def _new_lines(self) -> Iterator[tuple[int, str]]:
        """Machine and line."""
        for node, log in enumerate(self._logs):
            *lines, self._parts[node] = (self._parts[node] + log.read()).split("\n")
            yield from ((node, line) for line in lines)

    def close(self) -> None:
        """End the processes, if they are still there."""
        for process in self._processes:
            process.stop()
        for log in self._logs:
            log.close()
        self._told.unlink(missing_ok=True)
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)


def _ranks(config: DeepSpeed, gpus: int) -> int:
    try:
        return config.ranks(gpus)
    except ValueError as error:
        raise LaunchError(f"deepspeed.{error}") from None


class NoMemoryError(RuntimeError):
    """A rank ran out of memory. The others waited for it, so all of them have to begin again."""

    def halve(self, job: Path) -> None:
        """Halve the micro batches in a job file. Raises TrainingError if they are as small as they can be."""
        old = TrainingJob.model_validate_json(job.read_text())
        half = old.optimizer.micro_tokens // 2
        if not half:
            from agentrl.training.batch import TrainingError

            raise TrainingError(
                f"{self}, though each micro batch is as small as it can be; shard more (zero: 3, or sequence_parallel)"
            )
        optimizer = old.optimizer.model_copy(update={"micro_tokens": half})
        old.model_copy(update={"optimizer": optimizer}).write(job.parent)
        warnings.warn(
            f"{self}; the ranks go on from their last checkpoint with micro batches of {half} tokens, which changes no "
            "result: set optimizer.micro_tokens to it",
            stacklevel=3,
        )


def launch(config: DeepSpeed, job: Path, on_step: "Callable[[Metrics], None]") -> "list[Metrics]":
    """Start processes and run a job file; see :meth:`Ranks.run`."""
    return Ranks(config, job.parent).run(job, on_step)


def _choose_accelerator(environment: "os._Environ[str] | dict[str, str]") -> None:
    """Tell DeepSpeed if there is no GPU; by itself it might find another accelerator, or none. The check opens no GPU,
    because processes that are forked later could not open it again."""
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"


def fork_ranks(given: argparse.Namespace, run: Callable[[Path], None], modules: Sequence[str]) -> None:
    """Import what training needs, and ``modules``, wait for the path of a job file, and ``run`` it in the forked
    processes of this machine. If one of them fails, the others are ended."""
    starter = os.getppid()
    _choose_accelerator(os.environ)
    _import_what_ranks_need(modules)
    while not given.told.exists():
        if os.getppid() != starter:
            return  # whoever would have told of a job has ended
        time.sleep(POLL_S)
    job = Path(given.told.read_text().strip())
    from torch.multiprocessing import start_processes

    host, _, port = given.master.rpartition(":")
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ |= {"WORLD_SIZE": str(given.ranks * given.nodes), "LOCAL_WORLD_SIZE": str(given.ranks)}
    start_processes(_rank, (given.node * given.ranks, job, run), nprocs=given.ranks, start_method="fork")


def _rank(number: int, first: int, job: Path, run: Callable[[Path], None]) -> None:
    os.environ |= {"RANK": str(first + number), "LOCAL_RANK": str(number)}
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


def main(run: Callable[[Path], None], modules: Sequence[str] = ()) -> None:
    """Run a job in ranks that are forked from this process, by the arguments of the command line. ``modules`` are what
    ranks import besides."""
    parser = argparse.ArgumentParser()
    for name in ("--ranks", "--node", "--nodes"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("told", type=Path)
    fork_ranks(parser.parse_args(), run, modules)


if __name__ == "__main__":
    main(run)
