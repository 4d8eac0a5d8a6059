"""Whether a run can start on the machines of a launcher: a probe on each of them, a minute in all, and a verdict with a
remedy for each thing that runs stumble over."""

import json
import shutil
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.placement.base import Launcher, LaunchError, Process
from agentrl.placement.launcher import launcher_of
from agentrl.placement.shared import is_listed, pause_s
from agentrl.schemas.installation import python_path
from agentrl.schemas.pipeline import Execution
from agentrl.training.cluster_probe import GO, LOCK, SAYS, locks, versions
from agentrl.training.rendezvous import MEET, RENDEZVOUS_S

Verdict = Literal["ok", "warning", "wrong"]

SLOW_S, CLOCK_S = 5.0, 5.0
"""Seconds until a file is seen, and between two clocks, from which on they are worth a warning."""

FREE, MODELS_FREE = 10 * 2**30, 50 * 2**30
"""Bytes on a disk below which there is a warning, and those for the models of the hub."""

EQUAL = ("python", "agentrl's code", "torch", "deepspeed")
"""Versions that must be equal on all machines of ranks. Others are worth a warning."""

GIB = 2**30
HERE = "the stage's machine"


@dataclass(frozen=True)
class ClusterFinding:
    """What one check came to, on one machine or between several."""

    check: str
    where: str
    verdict: Verdict
    evidence: str
    remedy: str = ""


@dataclass
class _Machine:
    process: Process
    log: Path
    answers: dict[str, Any] = field(default_factory=dict)
    heard: dict[str, float] = field(default_factory=dict)
    """When each answer came, on the clock of this process."""

    @property
    def name(self) -> str:
        host = self.answers.get("about", {}).get("host", "a machine")
        return f"{host} ({self.process.address.rpartition(':')[0]})"

    def look(self) -> None:
        for line in self.log.read_text(errors="replace").splitlines(keepends=True):
            if line.startswith(SAYS) and line.endswith("\n"):
                message = json.loads(line[len(SAYS) :])
                if message["check"] not in self.answers:
                    self.answers[message["check"]], self.heard[message["check"]] = message["answer"], time.time()

    def tail(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if not line.startswith(SAYS)]
        return " ".join(lines[-5:])[-400:]


class ClusterCheck:
    """Checks the machines of ``execution``. ``parent`` is a folder that all of them should share; what the check writes
    there is removed."""

    def __init__(self, execution: Execution, parent: Path) -> None:
        self.execution, self.limit_s = execution, execution.limits.heartbeat_s
        self.folder = parent.absolute() / f"check-{uuid.uuid4().hex[:8]}"
        self._machines: list[_Machine] = []

    def findings(self) -> Iterator[ClusterFinding]:
        """What was found, check by check."""
        self.folder.mkdir(parents=True)
        launcher = None
        try:
            yield self._locks()
            launcher = launcher_of(self.execution)
            self._start(launcher)
            told = self._ask()
            yield from self._judged(launcher, told)
        except LaunchError as error:
            yield ClusterFinding("start", HERE, "wrong", str(error))
        finally:
            for machine in self._machines:
                machine.process.stop()
            if launcher:
                launcher.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _locks(self) -> ClusterFinding:
        where = HERE
        if problem := locks(self.folder / LOCK):
            remedy = "a store needs them on the machine of its runs: mount with locks (NFS 4, or Lustre's -o flock)"
            return ClusterFinding("locks", where, "wrong", f"{self.folder.parent}: {problem}", remedy)
        return ClusterFinding("locks", where, "ok", "files in the folder can be locked")

    def _start(self, launcher: Launcher) -> None:
        env = {
            "PYTHONPATH": python_path(),
            MEET: str(self.folder / "first"),
            RENDEZVOUS_S: str(self.limit_s),
        }
        for node in range(launcher.nodes):
            log = self.folder / f"{node}.log"
            log.touch()
            about = ["--node", str(node), "--nodes", str(launcher.nodes), "--limit-s", str(self.limit_s)]
            own = ["--host", "{host}", "--port", "{port}", str(self.folder)]
            command = [sys.executable, "-m", "agentrl.training.cluster_probe", *about, *own]
            process = launcher.start("probe", command, log=log, gpus=launcher.gpus, env=env, node=node)
            self._machines.append(_Machine(process, log))

    def _ask(self) -> float:
        """Let the probes work until they end. Returns when they were told of each other."""
        addresses = [machine.process.address for machine in self._machines]
        self._wait(lambda machine: "about" in machine.answers, self.limit_s)
        partial = self.folder / f"{GO}.partial"
        partial.write_text(json.dumps(addresses))
        told = time.time()
        partial.replace(self.folder / GO)
        self._wait(lambda machine: False, 3 * self.limit_s)
        return told

    def _wait(self, enough: Any, limit_s: float) -> None:
        """Until all machines have said enough, or have ended."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            ended = [machine.process.poll() is not None for machine in self._machines]
            for machine in self._machines:
                machine.look()
            if all(over or enough(machine) for over, machine in zip(ended, self._machines, strict=True)):
                return
            time.sleep(pause_s(time.monotonic() - began))

    # -- verdicts

    def _judged(self, launcher: Launcher, told: float) -> Iterator[ClusterFinding]:
        for machine in self._machines:
            yield from self._of_machine(machine, launcher, told)
        known = [machine for machine in self._machines if "about" in machine.answers]
        yield from self._versions(known)
        yield from self._rates()

    def _of_machine(self, machine: _Machine, launcher: Launcher, told: float) -> Iterator[ClusterFinding]:
        where, answers = machine.name, machine.answers
        if "about" not in answers:
            remedy = "the same Python and checkout must be at the same path on all machines, and the folder be shared"
            yield ClusterFinding("start", where, "wrong", machine.tail() or "the probe said nothing", remedy)
            return
        yield self._address(machine, launcher)
        yield from self._seen(machine, told)
        if problems := answers.get("unreached"):
            names = ", ".join(f"{address}: {why}" for address, why in problems.items())
            remedy = "let machines reach each other at all ports, or name their common network by GLOO_SOCKET_IFNAME"
            yield ClusterFinding("reach", where, "wrong", f"cannot connect to {names}", remedy)
        elif "unreached" in answers and launcher.nodes > 1:
            yield ClusterFinding("reach", where, "ok", f"connects to all {len(self._machines)} machines, itself too")
        yield from self._disks(where, answers["about"]["free"])
        yield from self._gpus(where, answers)
        if "failed" in answers:
            yield ClusterFinding(
                "probe", where, "wrong", answers["failed"], "mend this first; what follows was not checked"
            )

    def _address(self, machine: _Machine, launcher: Launcher) -> ClusterFinding:
        address = machine.process.address.rpartition(":")[0]
        if launcher.nodes > 1 and address.startswith("127."):
            remedy = "name the interface that leads to the others in execution.env: {GLOO_SOCKET_IFNAME: ...}"
            return ClusterFinding("address", machine.name, "wrong", "others reach no machine at this address", remedy)
        return ClusterFinding("address", machine.name, "ok", f"others use {address}")

    def _seen(self, machine: _Machine, told: float) -> Iterator[ClusterFinding]:
        """The machine saw a file, and its answer was seen, both within a span of this clock: so is the other clock's
        time of it, if the clocks agree."""
        if "seen" not in machine.answers:
            return
        theirs, heard = machine.answers["seen"], machine.heard["seen"]
        back = is_listed(self.folder / f"from-{self._machines.index(machine)}")
        late = heard - told
        remedy = (
            "a folder that is seen late works, and each order to ranks waits for it; a faster one makes steps faster"
        )
        evidence = f"a file and the answer to it are seen after {late:.2f} s"
        if not back:
            evidence, remedy = "what it writes is not seen here", "share one folder (--store on shared storage)"
        verdict: Verdict = "wrong" if not back else "warning" if late > SLOW_S else "ok"
        yield ClusterFinding("folder", machine.name, verdict, evidence, "" if verdict == "ok" else remedy)
        apart = max(told - theirs, theirs - heard, 0.0)
        if apart > CLOCK_S:
            remedy = "set the clocks by NTP: times of rows and runs would be wrong"
            yield ClusterFinding("clock", machine.name, "warning", f"at least {apart:.0f} s from the stage's", remedy)
        else:
            yield ClusterFinding("clock", machine.name, "ok", f"within {apart + late:.1f} s of the stage's")

    def _disks(self, where: str, free: Mapping[str, int]) -> Iterator[ClusterFinding]:
        for name, free_bytes in free.items():
            few = free_bytes < (MODELS_FREE if name == "models" else FREE)
            remedy = "models are downloaded there; HF_HOME names another folder" if name == "models" else "make room"
            evidence = f"{free_bytes / GIB:,.0f} GiB free ({name})"
            yield ClusterFinding("disk", where, "warning" if few else "ok", evidence, remedy if few else "")

    def _gpus(self, where: str, answers: Mapping[str, Any]) -> Iterator[ClusterFinding]:
        if "gpus" not in answers:
            return
        devices, asked = answers["gpus"], self.execution.gpus
        names = ", ".join(f"{device['name']} {device['memory'] / GIB:.0f} GiB" for device in devices) or "no GPU"
        if len(devices) < asked:
            remedy = "check the driver and CUDA of torch there, or ask for fewer by execution.gpus"
            yield ClusterFinding("devices", where, "wrong", f"{names}; execution.gpus is {asked}", remedy)
        else:
            yield ClusterFinding("devices", where, "ok", names)

    def _versions(self, machines: list[_Machine]) -> Iterator[ClusterFinding]:
        held: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        here = versions()
        each = [(HERE, here), *((m.name, m.answers["about"]["versions"]) for m in machines)]
        for package in dict.fromkeys(name for _, named in each for name in named):
            for where, named in each:
                held[package][named.get(package, "none")].append(where)
        differing = {package: by_version for package, by_version in held.items() if len(by_version) > 1}
        for package, by_version in differing.items():
            evidence = "; ".join(f"{version} on {', '.join(names)}" for version, names in by_version.items())
            verdict: Verdict = "wrong" if package in EQUAL else "warning"
            yield ClusterFinding(package, "all", verdict, evidence, "install the same everywhere, from constraints.txt")
        if not differing:
            told = ", ".join(f"{name} {version}" for name, version in here.items())
            yield ClusterFinding("versions", "all", "ok", f"equal: {told}")

    def _rates(self) -> Iterator[ClusterFinding]:
        for check, says in (("written", "writes"), ("read", "reads")):
            for machine in self._machines:
                if check in machine.answers:
                    rate = machine.answers[check] / 1e6
                    yield ClusterFinding("weights", machine.name, "ok", f"{says} 128 MiB at {rate:,.0f} MB/s")
        sums = [machine.answers["summed"] for machine in self._machines if "summed" in machine.answers]
        if len(sums) == len(self._machines) > 0:
            rate = f"64 MiB over {len(sums)} machines at {min(sums) / 1e6:,.0f} MB/s"
            yield ClusterFinding("sum", "all", "ok", rate if len(sums) > 1 else "one rank starts and computes")
