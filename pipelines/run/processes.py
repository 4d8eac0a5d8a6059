"""Trees of processes: listing what is below a process, ending a whole tree, and a guard that ends what a worker leaves
behind."""

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from agentrl.pipelines.run.printed import Printed

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SWEEP_S = 2.0


def descendants(pid: int) -> list[psutil.Process]:
    """Living processes below this one, nearest first; zombies are left out."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if _lives(child)]
    return []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end(guard: subprocess.Popen[bytes], grace_s: float = 2.0) -> None:
    """SIGTERM to all that is below a guard, SIGKILL to what is left after ``grace_s`` seconds. The guard then ends
    by itself, and is killed if it does not."""
    tree = descendants(guard.pid)
    _send(tree, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(map(_lives, tree)):
        time.sleep(0.02)
    _send([*tree, *descendants(guard.pid)], signal.SIGKILL)
    try:
        guard.wait(_SWEEP_S)
    except subprocess.TimeoutExpired:  # for instance because it was stopped
        _send(descendants(guard.pid), signal.SIGKILL)
        guard.kill()
        guard.wait()


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


def split_off_guard(alive: int, descriptors: tuple[int, ...], printed: "Printed") -> None:
    """Fork. The child returns from here and does the work. The parent becomes its guard and never returns.

    The guard runs no code of a stage, so nothing that a stage does, such as holding the interpreter lock, can stop it.
    It ends if the child is gone, with the child's exit code or signal, or if the pipe ``alive`` closes, which means
    that the run is gone. Before it ends, it kills all that is left below it, also daemons that forked twice, since it
    adopts them. If the guard itself is killed, the child dies with it. ``theirs`` are descriptors of the child alone.
    What the child and all below it print goes through the guard (``printed``).

    Adopting, and dying with the guard, need Linux.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(alive)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before we could ask
            os._exit(1)
        printed.begin()
        return
    for descriptor in descriptors:
        os.close(descriptor)
    status = 1
    try:
        printed.guard()
        status = _stand_guard(child, alive, printed)
    finally:
        os._exit(status)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _stand_guard(child: int, alive: int, printed: "Printed") -> int:
    """Wait until the child or the run is gone, and end the rest. Returns the exit code, or dies of the child's
    signal."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([alive, readable, *printed.descriptors], [], [], 1.0)
        if alive in ready:
            break
        if readable in ready:
            os.read(readable, 4096)
        printed.forward()
        status = _reap(child)
    _sweep()
    printed.end()
    if status is None:
        return 1
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


def _reap(child: int) -> int | None:
    """Collect what has died below us. Returns the child's status if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                status = ended[1]
    return status


def _sweep() -> None:
    deadline = time.monotonic() + _SWEEP_S
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        _send(left, signal.SIGKILL)
        time.sleep(0.01)
        _reap(0)
