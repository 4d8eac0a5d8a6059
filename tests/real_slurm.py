"""A real Slurm of two nodes that are both this machine: slurmctld, two slurmd and munged with files, sockets and ports
of their own, which run as the user that starts them."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
"""Where daemons are, which are not on everybody's path."""
NODES = ("n1", "n2")
LOOK_S = 0.05

CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
SlurmdTimeout=5
KillWait=3
{settings}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What a function gives as soon as it is true."""
    end = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(LOOK_S)
    return answer


def needs_slurm() -> None:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=PATH)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: apt-get install slurmctld slurmd slurm-client munge")


class RealSlurm:
    """``options`` are more lines of slurm.conf."""

    def __init__(self, folder: Path, options: str) -> None:
        self.folder, self._options = folder, options
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.env |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> None:
        ports = [_free_port() for _ in range(3)]
        names = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser(), "folder": self.folder}
        names |= dict(zip(("controller", *NODES), ports, strict=True)) | {"settings": self._options}
        (self.folder / "slurm.conf").write_text(CONF.format(**names))
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(os.urandom(128))
        (self.folder / "key").chmod(0o600)
        own = [f"--{what}={self.folder / file}" for what, file in _OF_MUNGE.items()]
        # a folder for temporary files is sticky, which munged asks for by --force
        self._run("munged", "--foreground", "--force", *own)
        until(lambda: self._lives("munged") and (self.folder / "munge").exists())
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        until(lambda: self._lives(*self._daemons) and self.states() == ["idle"])

    def start_controller(self) -> None:
        self._run("slurmctld", "-D")

    def start_node(self, name: str) -> None:
        self._run("slurmd", "-D", "-N", name, as_name=name)

    def kill(self, name: str) -> None:
        """End a daemon, a node or ``slurmctld``, at once."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def _run(self, program: str, *options: str, as_name: str = "") -> None:
        # also if this process is killed
        command = ["setpriv", "--pdeathsig=KILL", shutil.which(program, path=PATH) or program, *options]
        with (self.folder / f"{as_name or program}.log").open("ab") as log:
            self._daemons[as_name or program] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _lives(self, *names: str) -> bool:
        for name in names:
            assert self._daemons[name].poll() is None, f"{name} ended"
        return True

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def resume(self, node: str) -> None:
        """Bring a node back that is down. It may be back already: its daemon reports now and then."""
        command = ["scontrol", "update", f"nodename={node}", "state=resume"]
        subprocess.run(command, env=self.env, capture_output=True, check=False, timeout=60)

    def states(self) -> list[str]:
        """Of the nodes, each once. Empty while the controller does not answer."""
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=self.env, capture_output=True, text=True, check=False)
        return sorted(set(done.stdout.split()))

    def entered(self, patch: pytest.MonkeyPatch) -> None:
        """Let commands that this process starts ask this cluster."""
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", self.env["SLURM_CONF"])
        patch.setenv("PATH", PATH)

    def jobs(self, *options: str) -> list[str]:
        """Those that wait or run, each as ``id state``."""
        return self.ask("squeue", "--noheader", "--array", "--format=%i %T", *options).splitlines()

    def processes(self) -> Iterator[psutil.Process]:
        """Those that ask this cluster or were started by it, but for this one."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]:
                    yield process

    def workers(self) -> dict[str, psutil.Process]:
        """Processes that run shards, by their jobs."""
        made = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if "agentrl.datastore.shards.worker" in process.cmdline():
                    env = process.environ()
                    made[f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"] = process
        return made

    def empty(self) -> None:
        """End all jobs, and wait until none is left."""
        self.ask("scancel", f"--user={getpass.getuser()}")
        until(lambda: not self.jobs(), 60)

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.empty()
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for process in self.processes():  # of jobs that no controller could end
            with contextlib.suppress(psutil.Error):
                process.kill()


_OF_MUNGE = {
    "socket": "munge",
    "key-file": "key",
    "pid-file": "munged.pid",
    "seed-file": "seed",
    "log-file": "munge.log",
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def real_slurm(options: str = "") -> Iterator[RealSlurm]:
    """A cluster that runs, with more lines of slurm.conf; skips the test where Slurm is not installed."""
    needs_slurm()
    # a socket's path has at most 108 characters, and pytest's folders are long
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as name:
        cluster = RealSlurm(Path(name), options)
        try:
            try:
                cluster.start()
            except AssertionError as error:
                raise AssertionError(f"Slurm did not start: {error}\n{cluster.logs()}") from None
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture(scope="session")
def slurm_of_session() -> Iterator[RealSlurm]:
    with real_slurm() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_of_session: RealSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSlurm]:
    """The cluster of all tests, which this process's commands then ask. Every test begins with both nodes idle."""
    slurm_of_session.entered(monkeypatch)
    until(lambda: slurm_of_session.states() == ["idle"])
    yield slurm_of_session
    slurm_of_session.empty()
