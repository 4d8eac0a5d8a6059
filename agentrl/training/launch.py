"""Launch a training job through DeepSpeed, and what its processes run: ``python -m agentrl.training.launch``.

On each machine, one process imports what training needs and then forks its ranks, so that imports are paid for once. It
starts before the job is known, and waits for a file that names the job.
"""

import argparse
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pyarrow.parquet as pq

from agentrl.models.hub import on_hub, on_machine
from agentrl.placement.addresses import ADDRESS
from agentrl.placement.base import LaunchError, Process
from agentrl.placement.launcher import here, limits, temporary
from agentrl.placement.shared import UnseenError, is_listed, pause_s, sizes_of, wait_until_seen
from agentrl.placement.signs import SIGNS, Signs, Silence
from agentrl.schemas.installation import python_path
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.lines import DIALECT, DONE, FAILED, NO_MEMORY, NOTE, WROTE, tell
from agentrl.training.rank import READ, run, run_or_say
from agentrl.training.rendezvous import MEET, RENDEZVOUS_S, UNREACHED

if TYPE_CHECKING:
    from agentrl.training.step import Metrics

TRAIN = "agentrl.training.launch"
TAIL = 40
FIRST = ".first"
"""How the name of the file ends that has the address of the first rank."""

LOOK_S = 1.0
"""Seconds between two looks at whether ranks have ended, and at signs of life of the stage."""

HEARTBEAT_S = "AGENTRL_HEARTBEAT_S"
"""The variable in which ranks find ``execution.limits.heartbeat_s``."""


def heartbeat_s() -> float:
    """Seconds that this rank allows without a sign of life, and until it sees a file."""
    return float(os.environ[HEARTBEAT_S])


def command(processes: int, node: int, nodes: int, told: Path, module: str = TRAIN) -> list[str]:
    """The command that starts the ranks of machine ``node`` of ``nodes``, which run ``module``. The path of the job
    file will stand in the file ``told``."""
    ranks = ["--ranks", str(processes), "--node", str(node), "--nodes", str(nodes), "--address", "{host}"]
    return [sys.executable, "-m", module, *ranks, str(told)]


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
        self._job = self._told
        self._processes: list[Process] = []
        self._logs: list[TextIO] = []
        self._parts: list[str] = []
        self._tails: list[list[str]] = []
        self._reason = ""
        self._written: dict[str, int] | None = None
        self.limits = limits()
        self._signs = Signs(self._files.with_suffix(SIGNS))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        launcher = here()
        number = _ranks(self.config, launcher.gpus)
        env = {
            HEARTBEAT_S: str(self.limits.heartbeat_s),
            RENDEZVOUS_S: str(self.limits.rendezvous_s),
            "PYTHONPATH": python_path(),  # a loss may be a class of the user's
            "PYTHONSAFEPATH": "1",  # no module of the folder is taken for ours
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # else malloc raises it to 32 MB by itself, and keeps a gigabyte of what gradients and gathered weights left
            "MALLOC_MMAP_THRESHOLD_": os.environ.get("MALLOC_MMAP_THRESHOLD_", "1000000"),
        }
        for node in range(launcher.nodes):
            ranks = command(number, node, launcher.nodes, self._told, self.module)
            log = self._files.with_suffix(f".{node}.log")
            log.touch()
            gpus = number if launcher.gpus else 0
            self._processes.append(launcher.start("ranks", ranks, log=log, gpus=gpus, env=env, node=node))
            self._logs.append(log.open(errors="replace"))
            self._parts.append("")
            self._tails.append([])

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
        heard = time.monotonic()
        try:
            while (lines := self.said()) is not None:
                for line in lines:
                    on_step(json.loads(line[len(DONE) :]))
                heard = time.monotonic() if lines else heard
                time.sleep(pause_s(time.monotonic() - heard))
            self._wait_for_results()
        except NoMemoryError as error:
            self.close()
            error.halve(job)
            return Ranks(self.config, self.folder, self.module).run(job, on_step)
        finally:
            self.close()
        return pq.read_table(job.parent / "metrics.parquet").to_pylist()

    def begin(self, job: Path) -> None:
        """Tell the processes of their job, and of the files that it reads."""
        self._job = job
        reads = [path for name in READ if (path := job.parent / name).exists()]
        written = self._files.with_suffix(".tmp")
        told = {"job": str(job.absolute()), "text": job.read_text(), "files": sizes_of(*reads)}
        written.write_text(json.dumps(told))
        written.rename(self._told)

    def _wait_for_results(self) -> None:
        """What ranks print, and what they write, may be seen here after they have ended. Raises TrainingError if it is
        not."""
        from agentrl.training.batch import TrainingError

        began = time.monotonic()
        while self._written is None and time.monotonic() - began < self.limits.heartbeat_s:
            time.sleep(pause_s(time.monotonic() - began))
            self.said()
        try:
            wait_until_seen(self._written or {}, self.limits.heartbeat_s)
        except UnseenError as error:
            raise TrainingError(str(error)) from None

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
                self._reason = self._reason or line[len(FAILED) :].strip()  # what others say follows from it
            elif line.startswith(NO_MEMORY):
                why = line[len(NO_MEMORY) :].strip()
            elif line.startswith(WROTE):
                self._written = json.loads(line[len(WROTE) :])
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
            where = f"the ranks of machine {node + 1} of {len(codes)} ({self._processes[node].address})"
            raise TrainingError(self._reason or f"{where} of {self._job} ended with {codes[node]}:\n{tail}")
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
        self._signs.close()
        for file in (self._told, self._told.with_suffix(FIRST), self._told.with_suffix(UNREACHED)):
            file.unlink(missing_ok=True)
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
    processes of this machine. If one of them fails, or if the stage gives no sign of life, the others are ended."""
    _choose_accelerator(os.environ)
    _import_what_ranks_need(modules)
    silence = Silence(given.told.with_suffix(SIGNS), heartbeat_s())
    first = given.node * given.ranks
    names = f"ranks {first} to {first + given.ranks - 1} on {socket.gethostname()} end"
    try:
        job = _job_told(given.told, silence)
        _fetch(json.loads(job.read_text()).get("start"), silence)
        from torch.multiprocessing import start_processes

        os.environ |= {ADDRESS: given.address, MEET: str(given.told.with_suffix(FIRST))}
        os.environ |= {"WORLD_SIZE": str(given.ranks * given.nodes), "LOCAL_WORLD_SIZE": str(given.ranks)}
        ranks = start_processes(_rank, (first, job, run), nprocs=given.ranks, join=False, start_method="fork")
        assert ranks is not None
        try:
            while not ranks.join(LOOK_S):
                _look(silence)
        finally:
            for process in ranks.processes:
                process.kill()
    except (DownloadError, SilenceError, UnseenError) as error:
        tell(FAILED, f"{names}: {error}")
        sys.exit(1)


class SilenceError(RuntimeError):
    """The stage gave no sign of life for too long."""


def _look(silence: Silence) -> None:
    if reason := silence.look():
        raise SilenceError(reason)


def _job_told(told: Path, silence: Silence) -> Path:
    """The job file that the stage tells of, when it is seen here with the files that it reads. Raises SilenceError and
    UnseenError."""
    began = looked = time.monotonic()
    while not is_listed(told):
        if time.monotonic() - looked > LOOK_S:
            _look(silence)
            looked = time.monotonic()
        time.sleep(pause_s(time.monotonic() - began))
    about = json.loads(told.read_text())
    job, text = Path(about["job"]), about["text"]
    wait_until_seen({**about["files"], str(job): len(text.encode())}, silence.limit_s)
    began = time.monotonic()
    while job.read_text() != text:  # what an earlier try left may have its size
        if time.monotonic() - began > silence.limit_s:
            raise UnseenError(f"{job} is still seen as an earlier one after {silence.limit_s:g} s")
        time.sleep(pause_s(time.monotonic() - began))
    return job


class DownloadError(RuntimeError):
    """This machine cannot get a model of the hub."""


def _fetch(start: str | None, silence: Silence) -> None:
    """Download a model of the hub that this machine lacks, once for all ranks, which then read it from the cache. A
    process of its own does it, since ranks are forked from this one, and should inherit no connection.

    Raises DownloadError with the reason, and SilenceError.
    """
    model = on_hub(start) if start and not on_machine(start) else None
    if model is None:
        return
    tell(NOTE, f"{socket.gethostname()} downloads {model.name}@{model.revision}")
    downloading = [sys.executable, "-m", "agentrl.models.hub", *model]
    process = subprocess.Popen(downloading, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        reason = None
        while reason is None:
            try:
                reason = process.communicate(timeout=LOOK_S)[1].strip()
            except subprocess.TimeoutExpired:
                _look(silence)
    finally:
        process.kill()
    if process.returncode:
        raise DownloadError((reason or f"the download ended with {process.returncode}").splitlines()[-1])


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
    parser.add_argument("--address", required=True)
    parser.add_argument("told", type=Path)
    fork_ranks(parser.parse_args(), run, modules)


if __name__ == "__main__":
    main(run)
