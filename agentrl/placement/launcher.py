"""The launcher of the stage that runs in this process, as its ``execution`` names it."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.placement.base import Launcher, LaunchError, Process
from agentrl.schemas.pipeline import Execution, TimeLimits


def launcher_of(execution: Execution) -> Launcher:
    """What ``execution.launcher`` names. Raises LaunchError if its machines cannot be had."""
    if execution.launcher == "hostfile":
        from agentrl.placement.connected import Machines
        from agentrl.placement.hostfile import Ssh, read_hosts

        assert execution.hostfile is not None  # checked when the pipeline was read
        hosts = read_hosts(Path(execution.hostfile).expanduser(), execution.nodes, execution.gpus)
        return Machines(Ssh(), hosts, execution.env, execution.limits.connect_s)
    if execution.launcher == "ray":
        from agentrl.placement.on_ray import RayLauncher

        return RayLauncher(execution.nodes or 1, execution.gpus, execution.env, execution.limits.reserve_s)
    if execution.launches == "slurm":
        from agentrl.placement.connected import Machines
        from agentrl.placement.slurm import Srun, allocated

        options = [] if isinstance(execution.launcher, str) else execution.launcher.options
        hosts = allocated(execution.nodes, execution.gpus)
        return Machines(Srun(options), hosts, execution.env, execution.limits.connect_s)
    if execution.launcher == "external":
        return Nothing()
    from agentrl.placement.local import Local

    return Local()


class Nothing:
    """Starts nothing: all that the stage needs runs already, and its config has the addresses."""

    nodes, gpus = 1, 0

    def start(self, role: str, command: Sequence[str], **where: object) -> Process:
        raise LaunchError(f"launcher external starts no {role}; name those that run in engine.urls, or use another one")

    def close(self) -> None:
        pass


_execution = Execution()
_launcher: Launcher | None = None
_folder: Path | None = None


def here() -> Launcher:
    """The launcher of the stage that runs in this process; outside of a stage, this machine."""
    global _launcher
    if _launcher is None:
        _launcher = launcher_of(_execution)
    return _launcher


def limits() -> TimeLimits:
    """How long the processes of the stage that runs in this process wait for each other."""
    return _execution.limits


def temporary(name: str) -> Path:
    """A new folder for files that this process and those that it starts read: in the stage's folder, or outside of a
    stage among the system's temporary files."""
    return Path(tempfile.mkdtemp(prefix=f"agentrl-{name}-", dir=_folder))


@contextmanager
def placed(execution: Execution, folder: Path | None = None) -> Iterator[None]:
    """Let :func:`here` be what ``execution`` says, and :func:`temporary` make folders in ``folder``. Nothing is
    reserved before it is asked for, and at the end all that was started is ended. What is in ``folder`` is removed
    then; if the process is killed, before the next try."""
    global _execution, _launcher, _folder
    before = _execution, _launcher, _folder
    _execution, _launcher, _folder = execution, None, folder
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    try:
        yield
    finally:
        if _launcher is not None:
            _launcher.close()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        _execution, _launcher, _folder = before
