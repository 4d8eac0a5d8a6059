"""GPUs: which there are, how large they are, and which are taken. The driver is asked, not torch: a process that forks
may not open a GPU before."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.placement.base import LaunchError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the GPUs that a process with this environment may use, as CUDA_VISIBLE_DEVICES has them. If that is not
    set, all that NVIDIA's driver lists; without a driver, none."""
    named = environment.get(VISIBLE)
    if named is None:
        return _asked("index")
    names = [name.strip() for name in named.split(",")]
    ends = [index for index, name in enumerate(names) if name in ("", "-1")]  # as CUDA does
    return names[: ends[0]] if ends else names


def memory_gib() -> float | None:
    """Memory of the smallest GPU of this machine in GiB; None if it has none."""
    free = _asked("memory.total")
    return min(map(float, free)) / 1024 if free else None


def _asked(what: str) -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


@dataclass
class Devices:
    """What is left of the GPUs of some machines. ``free`` has a list for each machine."""

    free: list[list[str]]
    processes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.processes = [0] * len(self.free)
        self._all = [len(names) for names in self.free]

    def take(self, role: str, gpus: int, node: int | None = None) -> tuple[int, list[str]]:
        """A machine and ``gpus`` of its devices, the last that are left: the first one is also the stage's own.

        Raises LaunchError if there are not so many.
        """
        places = range(len(self.free)) if node is None else [node]
        fitting = [index for index in places if len(self.free[index]) >= gpus]
        if not fitting:
            left = ", ".join(f"{len(self.free[index])} of {self._all[index]}" for index in places)
            raise LaunchError(
                f"the {role} needs {gpus} GPUs of one machine, and {left} are left; set execution.gpus higher, or "
                "start fewer (engine.servers, engine.tensor_parallel, deepspeed.processes)"
            )
        chosen = min(fitting, key=lambda index: self.processes[index])
        self.processes[chosen] += 1
        kept = len(self.free[chosen]) - gpus
        taken, self.free[chosen] = self.free[chosen][kept:], self.free[chosen][:kept]
        return chosen, taken

    def give_back(self, node: int, names: Sequence[str]) -> None:
        self.processes[node] -= 1
        self.free[node] = [*self.free[node], *names]


def shown(names: Sequence[str]) -> dict[str, str | None]:
    """The change of an environment that shows a process these devices alone; none leaves all that are shown."""
    return {VISIBLE: ",".join(names)} if names else {}
