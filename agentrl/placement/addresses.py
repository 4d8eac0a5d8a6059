"""Addresses of this machine that other machines reach: no name, which may mean 127.0.1.1 here, or nothing there."""

import os
import socket
from collections.abc import Iterator, Mapping

import psutil

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the interface of a machine for ranks; whoever has several sets it in ``execution.env``."""

ADDRESS = "AGENTRL_ADDRESS"
"""The variable in which a process that a launcher started finds its machine's address."""


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """An IPv4 address of this machine. In this order: that of the interface that GLOO_SOCKET_IFNAME names, the one at
    which a connection of ssh came in, the one from which a route leads to where ``srun`` was called, and the one of the
    default route. 127.0.0.1 if there is nothing else.

    Raises LookupError if there is no such interface, or if it has no IPv4 address.
    """
    if names := environment.get(INTERFACE):
        return _of_interface(names)
    candidates = _candidates(environment)
    return next((address for address in candidates if not address.startswith("127.")), "127.0.0.1")


def interface_of(address: str) -> str | None:
    """The interface of this machine that has an address."""
    return next((name for name, held in _addresses() if held == address), None)


def _candidates(environment: Mapping[str, str]) -> Iterator[str]:
    came_in = environment.get("SSH_CONNECTION", "").split()  # client, its port, this machine, its port
    if len(came_in) == 4 and ":" not in came_in[2]:
        yield came_in[2]
    for towards in (environment.get("SLURM_LAUNCH_NODE_IPADDR"), "192.0.2.1"):  # the second is of no machine (RFC 5737)
        if towards and (address := _source(towards)):
            yield address


def _of_interface(names: str) -> str:
    held = dict(reversed(_addresses()))
    for name in names.split(","):
        if address := held.get(name.strip()):
            return address
    there = ", ".join(sorted({name for name, _ in _addresses()}))
    raise LookupError(
        f"{INTERFACE} is {names}, and {socket.gethostname()} has no such interface with an IPv4 address (it has "
        f"{there}); name one that all machines have in execution.env, or leave it out"
    )


def _addresses() -> list[tuple[str, str]]:
    """Interface and IPv4 address."""
    interfaces = psutil.net_if_addrs().items()
    return [(name, held.address) for name, all_held in interfaces for held in all_held if held.family is socket.AF_INET]


def _source(towards: str) -> str | None:
    """The address from which this machine would send to another one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
