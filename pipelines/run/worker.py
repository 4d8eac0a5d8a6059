"""A process that runs stages, one after the other, so that a stage that hangs, is killed or leaves children behind can
be ended without ending the run. torch and the like are imported once for all stages of a run.

The worker has a session of its own. So Ctrl-C reaches only the run, which then ends the worker with all it started.
Above each worker stands a guard (:mod:`agentrl.pipelines.run.processes`), a process that ends all of it when the run is
killed.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.pipelines.run.printed import Printed
from agentrl.pipelines.run.processes import descendants, end, split_off_guard
from agentrl.pipelines.secrets import RedactedStream, is_reference, redacted, revealed
from agentrl.schemas.installation import leave_checkout, python_path
from agentrl.schemas.shards import ShardsNow

if TYPE_CHECKING:
    from pydantic import BaseModel

    from agentrl.pipelines.run.execute import Outcome, StageJob

OnProgress = Callable[[str, int, int | None, Mapping[str, float | int | str | ShardsNow]], None]
"""Called with the stage's name, what is done, the total or None, and metrics."""

OnWait = Callable[[str, str], None]
"""Called with the stage's name and a text that names the run it waits for; the text is empty once the wait is over."""

POLL_S = 0.1
GRACE_S = 2.0
PROGRESS_S = 0.1
MODEL_MODULES = ("agentrl.engines.transformers", "transformers.modeling_utils")
"""What takes most of the seconds that a process needs before its first stage with a model."""


class StageError(RuntimeError):
    """A stage failed. ``cause`` is one line; ``log`` holds its output and the traceback."""

    def __init__(self, stage: str, cause: str, log: Path) -> None:
        self.stage, self.cause, self.log = stage, cause, log
        super().__init__(f"stage {stage}: {cause}")

    def __reduce__(self) -> tuple[Any, ...]:
        return StageError, (self.stage, self.cause, self.log)


@dataclass
class _Process:
    """A worker. ``popen`` is its guard; ``prepared`` says that it imports what stages with models need, and waits for
    the first of them; ``imported``, that it has imported it or will have."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    alive: int
    env: dict[str, str]
    prepared: bool = False
    imported: bool = False

    def close(self, reader: threading.Thread | None) -> None:
        """End it with all it started; the pipes close when nobody reads them any more."""
        end(self.popen)
        if reader:
            reader.join(5)
        self.connection.close()
        os.close(self.alive)


def _start(env: Mapping[str, str], log: Path) -> _Process:
    job_read, job_write = os.pipe()
    reply_read, reply_write = os.pipe()
    alive_read, alive_write = os.pipe()
    inherited = (job_read, reply_write, alive_read)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentrl.pipelines.run.worker", *map(str, inherited)],
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(), **env},
        )
    for descriptor in inherited:
        os.close(descriptor)
    return _Process(popen, _TwoPipes(reply_read, job_write), alive_write, dict(env))


class _TwoPipes(Connection):
    """A connection that reads from one pipe and writes to another."""

    def __init__(self, readable: int, writable: int) -> None:
        super().__init__(readable, writable=False)
        self._sender = Connection(writable, readable=False)

    def send_bytes(self, *args: Any) -> None:
        self._sender.send_bytes(*args)

    def close(self) -> None:
        self._sender.close()
        super().close()


@dataclass
class _Running:
    """A stage at work. A thread reads what its process says; ``said`` holds it for :meth:`Workers.run`."""

    process: _Process
    said: "queue.Queue[tuple[str, Any]]" = field(default_factory=queue.Queue)
    reader: threading.Thread | None = None


@dataclass
class Workers:
    """The workers of one run. Thread-safe; as many stages run at once as threads call :meth:`run`."""

    on_progress: OnProgress
    on_wait: OnWait = lambda stage, text: None
    _idle: list[_Process] = field(default_factory=list)
    _busy: dict[str, _Running] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, job: "StageJob", log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start a stage; :meth:`run` with the same job then waits for it."""
        env = dict(env or {})
        with self._lock:
            if job.stage in self._busy:
                return
            usable = [worker for worker in self._idle if worker.env == env and worker.popen.poll() is None]
            fitting = [worker for worker in usable if job.has_model or not worker.prepared]
            if fitting:
                self._idle.remove(process := max(fitting, key=lambda worker: worker.imported == job.has_model))
            else:
                process = _start(env, log)
            process.prepared = False
            process.imported |= job.has_model
            running = self._busy[job.stage] = _Running(process)
        with contextlib.suppress(BrokenPipeError):  # it died, and run() reports that
            process.connection.send_bytes(pickle.dumps((str(log), job.folders, pickle.dumps(job))))
        running.reader = threading.Thread(target=self._listen, args=(job.stage, running), daemon=True)
        running.reader.start()

    def prepare(self, log: Path, env: Mapping[str, str] | None = None) -> None:
        """Start a process for the first stage with a model, which imports what such stages need while others run."""
        process = _start(dict(env or {}), log)
        process.prepared = process.imported = True
        with contextlib.suppress(BrokenPipeError):  # it died, and begin() passes it over
            process.connection.send_bytes(pickle.dumps((str(log), (), None)))
        with self._lock:
            self._idle.append(process)

    def _listen(self, stage: str, running: _Running) -> None:
        kind = ""
        while kind not in ("result", "died"):
            try:
                kind, value = pickle.loads(running.process.connection.recv_bytes())
            except (EOFError, OSError):
                kind, value = "died", None
            if kind == "progress":
                self.on_progress(stage, *value)
            elif kind == "waits":
                self.on_wait(stage, value)
            running.said.put((kind, value))

    def run(
        self,
        job: "StageJob",
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        keep: bool = True,
        listener: Callable[[int, int | None], None] | None = None,
    ) -> "Outcome":
        """Run a stage to its end. ``keep`` False ends the process afterwards, so that a GPU's memory is freed.
        ``listener`` is told of progress in the caller's own thread.

        Raises StageError if the stage raised or its process died. On any other exception in this thread
        (a timeout, Ctrl-C) the process is ended with everything that it started.
        """
        self.begin(job, log, env)
        running = self._busy[job.stage]
        process, reusable = running.process, False
        kind = ""
        value: Any = None
        try:
            while kind not in ("result", "died"):
                with contextlib.suppress(queue.Empty):
                    kind, value = running.said.get(timeout=POLL_S)
                    if kind == "progress" and listener:
                        listener(value[0], value[1])
            failed = kind == "died" or isinstance(value, str)
            reusable = keep and not failed and len(descendants(process.popen.pid)) == 1  # the worker, nothing else
        finally:
            with self._lock:
                self._busy.pop(job.stage, None)
                if reusable:
                    self._idle.append(process)
            if not reusable:
                process.close(running.reader)
        if kind == "died":
            raise StageError(job.stage, _death(process.popen.returncode), log)
        if isinstance(value, str):
            raise StageError(job.stage, value, log)
        return value

    def close(self) -> None:
        """End all workers, also those in the middle of a stage."""
        with self._lock:
            idle, busy = list(self._idle), [running.process for running in self._busy.values()]
            self._idle.clear()
        ends = [threading.Thread(target=end, args=(worker.popen, GRACE_S)) for worker in busy]
        ends += [
            threading.Thread(target=end, args=(worker.popen, 0.0)) for worker in idle
        ]  # there is nothing to finish
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join()

    @property
    def at_work(self) -> bool:
        """Whether any stage runs now."""
        return bool(self._busy)


def _death(code: int) -> str:
    from agentrl.datastore.shards.local import exit_reason

    return f"its process {exit_reason(code)}"


def main() -> None:
    leave_checkout()
    jobs, replies, alive = map(int, sys.argv[1:])
    for descriptor in (jobs, replies, alive):
        os.set_inheritable(descriptor, False)
    printed = Printed()
    split_off_guard(alive, (jobs, replies), printed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` blocks run
    sys.stdout, sys.stderr = RedactedStream(1), RedactedStream(2)
    connection = _TwoPipes(jobs, replies)
    from agentrl.pipelines.file import library
    from agentrl.pipelines.run import execute

    last = 0.0

    def progress(done: int, total: int | None = None, **metrics: float | int | str | ShardsNow) -> None:
        nonlocal last
        aside = now.aside if isinstance(now := metrics.get("shards"), ShardsNow) else 0
        if done + aside != total and time.monotonic() - last < PROGRESS_S:
            return
        last = time.monotonic()
        connection.send_bytes(pickle.dumps(("progress", (done, total, metrics))))

    def waits(text: str) -> None:
        connection.send_bytes(pickle.dumps(("waits", text)))

    while True:
        try:
            log, folders, packed = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        printed.to(log)
        if packed is None:
            _import_for_models()
            continue
        library.search_in(folders)
        result: Outcome | str
        try:
            job = pickle.loads(packed)
            _hide_secrets(job.config)
            result = execute.perform(job, progress, waits)
        except Exception as error:
            result = _one_line(error)
            with contextlib.suppress(OSError):  # the disk may be full; then the result says so
                traceback.print_exc()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        printed.written()
        _free_memory()
        connection.send_bytes(pickle.dumps(("result", result)))


def _import_for_models() -> None:
    for name in MODEL_MODULES:
        with contextlib.suppress(Exception):  # the stage that needs it fails by itself, and says so
            importlib.import_module(name)
    gc.freeze()


def _free_memory() -> None:
    """Give back what the stage no longer uses, since this process waits for its next stage beside others that compute:
    models and optimisers that refer to each other, the pages that malloc keeps, and the memory of GPUs that torch
    keeps."""
    torch = sys.modules.get("torch")
    if not torch:
        return
    gc.collect()
    if not gc.get_freeze_count():  # modules are no garbage: looking through their objects takes .25 s after each stage
        gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _hide_secrets(config: "BaseModel") -> None:
    """Note the values of the secrets that a config names, before anything can print them."""
    from agentrl.pipelines.file.fields import leaves

    for _, _, value in leaves(config):
        if is_reference(value) and (name := value[2:-1]) in os.environ:
            revealed(os.environ[name])


def _one_line(error: Exception) -> str:
    text = redacted(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


if __name__ == "__main__":
    main()
