"""The machines of a Slurm allocation, over one ``srun`` for each process. The stage runs inside of the allocation, in a
script of ``sbatch`` or under ``salloc``."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from agentrl.placement.base import LaunchError
from agentrl.placement.connected import Machine

NODES = "SLURM_JOB_NODELIST"
ASK_S = 60.0

SRUN = ("srun", "--nodes=1", "--ntasks=1", "--kill-on-bad-exit=1", "--export=ALL", "--unbuffered")
SHARED = ("--overlap", "--mem=0", "--cpu-bind=none")
"""Ranks and servers of one machine share its processors, memory and GPUs: each is shown its own by a variable."""


class Srun:
    """See :class:`agentrl.placement.connected.Way`. ``options`` are more of ``srun``'s."""

    name, keeps_environment = "srun", True

    def __init__(self, options: Sequence[str]) -> None:
        self.options = list(options)

    def command(self, machine: str, script: str) -> list[str]:
        # by its path: with --export=NONE a task has no PATH
        return [*SRUN, *SHARED, f"--nodelist={machine}", *self.options, "/bin/sh", "-c", script]


def allocated(nodes: int | None, gpus: int, environment: Mapping[str, str] = os.environ) -> list[Machine]:
    """The machines of this process's allocation, the first ``nodes`` of them, each with ``gpus`` GPUs, or if that is 0
    as many as Slurm gave this one.

    Raises LaunchError if there is no allocation, or if it has fewer machines.
    """
    if not environment.get(NODES):
        raise LaunchError(
            f"launcher slurm needs an allocation, and {NODES} is not set; call `agentrl run` in a script that sbatch "
            "starts, or under salloc"
        )
    command = ["scontrol", "show", "hostnames", environment[NODES]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"launcher slurm cannot ask scontrol for the machines of the allocation: {error}") from None
    names = done.stdout.split()
    if done.returncode or not names:
        raise LaunchError(f"`{' '.join(command)}` names no machine: {' '.join(done.stderr.split())[:300]}")
    if len(names) < (nodes or 1):
        raise LaunchError(
            f"the allocation has {len(names)} machines, and execution.nodes is {nodes}; ask sbatch for more"
        )
    slots = gpus or int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    return [Machine(name, slots) for name in names[:nodes]]
