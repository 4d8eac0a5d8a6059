"""The machines that a hostfile lists, over ssh. ``~/.ssh/config`` says how to reach them; no password is asked for."""

import re
from pathlib import Path

from agentrl.placement.base import LaunchError
from agentrl.placement.connected import Machine

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")


class Ssh:
    """See :class:`agentrl.placement.connected.Way`."""

    name, keeps_environment = "ssh", False

    def command(self, machine: str, script: str) -> list[str]:
        return [*SSH, machine, script]


def read_hosts(path: Path, nodes: int | None = None, gpus: int = 0) -> list[Machine]:
    """The machines of a hostfile, one ``name slots=N`` a line; ``#`` begins a comment. ``nodes`` takes the first ones,
    and ``gpus`` so many of the slots of each.

    Raises LaunchError, which names a line that cannot be read, also if there are fewer machines or slots than asked
    for.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise LaunchError(f"hostfile {path} cannot be read: {error.strerror}; give one 'name slots=N' a line") from None
    hosts: list[Machine] = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([A-Za-z0-9][\w.@:-]*)\s+slots\s*=\s*(\d+)", text)
        if not match:
            raise LaunchError(f"hostfile {path}, line {number}: {text!r} is not 'name slots=N', as in 'gpu-1 slots=8'")
        if any(host.name == match[1] for host in hosts):
            raise LaunchError(f"hostfile {path}, line {number}: {match[1]} is named twice; add its slots up")
        hosts.append(Machine(match[1], int(match[2])))
    if len(hosts) < (nodes or 1):
        raise LaunchError(f"hostfile {path} has {len(hosts)} machines, and execution.nodes is {nodes or 1}")
    hosts = hosts[:nodes]
    if few := [host.name for host in hosts if host.slots < gpus]:
        raise LaunchError(f"hostfile {path} has fewer than execution.gpus = {gpus} slots for {', '.join(few)}")
    return [host._replace(slots=gpus or host.slots) for host in hosts]
