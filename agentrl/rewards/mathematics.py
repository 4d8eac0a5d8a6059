"""Equality of mathematical answers, by the math-verify library in a process of its own.

A policy writes what is parsed. An expression such as a tower of powers keeps Python busy in C code, where no time limit
of the library reaches it, so the process is ended after ``timeout_s`` and another one takes its place.
"""

import atexit
import os
import pickle
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import Literal

from pydantic import Field, model_validator

from agentrl.rewards.answers import final_answer, truths
from agentrl.rewards.component import Grade, Verifier
from agentrl.schemas.installation import install_hint, is_installed, python_path
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

START_S = 120.0
"""Seconds that the process has for its imports."""


class Mathematics(Verifier):
    """1 if the last message says what the ground truth says, as mathematics: 1/2, 0.5 and ``\\frac{1}{2}`` are equal.
    What cannot be compared within ``timeout_s`` gets 0, and the detail ``timeout`` is 1."""

    type: Literal["math"] = "math"
    timeout_s: float = Field(5.0, gt=0, description="seconds for one answer; what takes longer is wrong")

    @model_validator(mode="after")
    def _is_installed(self) -> "Mathematics":
        if not is_installed("math_verify"):
            raise ValueError(f"the reward math needs math-verify; {install_hint('math')}")
        return self

    def value(self, rollout: Trajectory, task: Task) -> Grade:
        answer = final_answer(rollout)
        if answer is None:
            return Grade(0.0)
        try:
            return Grade(float(any(math_equal(answer, truth, self.timeout_s) for truth in truths(task))))
        except TimeoutError:
            return Grade(0.0, {"timeout": 1.0})


def math_equal(answer: str, truth: str, timeout_s: float = 5.0) -> bool:
    """Whether an answer, which may be a sentence, says what ``truth`` says. Raises TimeoutError if that takes longer
    than ``timeout_s`` seconds, and ValueError if ``truth`` is no mathematics."""
    if answer.strip() == truth.strip():
        return True
    return _CHECKER.ask(answer, truth, timeout_s)


class _Checker:
    """The process, started when it is first asked. Threads ask one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, answer: str, truth: str, timeout_s: float) -> bool:
        with self._lock:
            connection = self._started()
            try:
                connection.send_bytes(pickle.dumps((answer, truth)))
                if not connection.poll(timeout_s):
                    raise TimeoutError(f"{answer[:80]!r} was not compared within {timeout_s:g} s")
                verdict = pickle.loads(connection.recv_bytes())
            except (TimeoutError, EOFError, OSError) as error:
                self._kill()
                raise TimeoutError(str(error) or "the process that compares ran out of memory") from None
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return bool(verdict)

    def _started(self) -> Connection:
        if self._process is None or self._owner != os.getpid():  # another process's after a fork
            self._connection, child_end = Pipe()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "agentrl.rewards.mathematics_process", str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": python_path()},
            )
            self._owner = os.getpid()
            child_end.close()
            atexit.register(self._kill)
            if not self._connection.poll(START_S):
                self._kill()
                raise RuntimeError(f"math-verify was not loaded within {START_S:g} s")
            self._connection.recv_bytes()
        return self._connection

    def _kill(self) -> None:
        process, self._process = self._process, None
        atexit.unregister(self._kill)
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            self._connection.close()


_CHECKER = _Checker()
