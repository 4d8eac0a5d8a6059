"""Ranks that meet over two network namespaces, which are two machines as far as gloo knows, and what they say if they
cannot."""

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.placement.addresses import INTERFACE, interface_of, own_address
from agentrl.placement.local import KeptPort

ROOT = Path(__file__).parents[2]

RANK = """
import os, sys, time
import torch.distributed  # it takes seconds, which do not count
from agentrl.training.rendezvous import RendezvousError, meet

began = time.monotonic()
try:
    meet("gloo")
    print("met")
except RendezvousError as error:
    print(error)
finally:
    print("seconds", time.monotonic() - began, flush=True)
"""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """Names of two namespaces with the addresses 10.77.0.1 and 10.77.0.2, joined by a cable."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two network namespaces need root, and `ip` of iproute2")
    word = uuid.uuid4().hex[:6]
    names = f"a{word}", f"b{word}"
    try:
        for name in names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
    try:
        _ip("link", "add", f"v{names[0]}", "netns", names[0], "type", "veth", "peer", f"v{names[1]}", "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"v{name}")
            for device in ("lo", f"v{name}"):
                _ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def ranks(
    folder: Path, networks: tuple[str, str], addresses: tuple[str, str], interface: str | None = None, cut: bool = False
) -> list[tuple[str, float]]:
    """What each of two ranks prints last but one, and how long it took to. ``cut``: the cable is cut as both have
    reported, before they connect."""
    started = []
    for rank, (name, address) in enumerate(zip(networks, addresses, strict=True)):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2", "AGENTRL_ADDRESS": address}
        env |= {"AGENTRL_MEET": str(folder / "first"), "AGENTRL_RENDEZVOUS_S": "120", "OMP_NUM_THREADS": "1"}
        env |= {INTERFACE: interface} if interface else {}
        text = f"{CUT if cut else ''}{RANK}".replace("CABLE", f"v{networks[1]}").replace("NETWORK", networks[1])
        command = ["ip", "netns", "exec", name, sys.executable, "-c", text]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = []
    for process in started:
        printed, problems = process.communicate(timeout=240)
        lines = [line for line in printed.splitlines() if line]
        assert lines, problems
        assert "Traceback" not in problems, problems
        took = float(lines[-1].split()[1]) if lines[-1].startswith("seconds") else -1.0
        outputs.append((" ".join(lines), took))
    return outputs


CUT = """
import os, subprocess
from agentrl.training import rendezvous

plain = rendezvous._report

def report(*given):
    plain(*given)
    if os.environ["RANK"] == "0":
        subprocess.run(["ip", "-n", "NETWORK", "link", "set", "CABLE", "down"], check=True)

rendezvous._report = report
"""


@pytest.mark.slow
def test_ranks_meet_by_the_interface_of_their_address(tmp_path: Path, networks: tuple[str, str]) -> None:
    for output, took in ranks(tmp_path, networks, ("10.77.0.1", "10.77.0.2")):
        assert output.startswith("met")
        assert took < 30


@pytest.mark.slow
def test_an_address_that_is_only_the_first_ranks_own_is_named_by_both(
    tmp_path: Path, networks: tuple[str, str]
) -> None:
    for output, took in ranks(tmp_path, networks, ("127.0.1.1", "10.77.0.2")):
        assert "(10.77.0.2) cannot reach rank 0 at 127.0.1.1:" in output
        assert "let machines reach each other at all ports" in output
        assert took < 30


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interface", "cable"])
def test_gloo_that_cannot_connect_is_named_by_both_ranks_in_half_a_minute(
    how: str, tmp_path: Path, networks: tuple[str, str]
) -> None:
    began = time.monotonic()
    given = {"interface": "lo"} if how == "interface" else {"cut": True}
    outputs = ranks(tmp_path, networks, ("10.77.0.1", "10.77.0.2"), **given)  # type: ignore[arg-type]
    for output, took in outputs:
        assert any(reason in output for reason in ("by gloo", "rank 0 is gone", "lost the connection")), output
        assert took < 30
    assert time.monotonic() - began < 90, "with all that is imported"


def test_an_address_is_of_the_named_interface_or_where_ssh_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address({INTERFACE: "nowhere0,lo"}) == "127.0.0.1"
    assert own_address({"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22"}) == "10.0.0.2"
    default = own_address({})
    assert own_address({"SSH_CONNECTION": "127.0.0.1 5000 127.0.0.1 22"}) == default
    assert own_address({"SSH_CONNECTION": "fd00::1 5000 fd00::2 22"}) == default
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None
    with pytest.raises(LookupError, match=r"GLOO_SOCKET_IFNAME is ib7, and .* has no such interface .*lo"):
        own_address({INTERFACE: "ib7"})


def test_a_port_is_kept_for_a_server_and_from_others() -> None:
    port = KeptPort()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port.number))
    at = ("127.0.0.1", port.number)
    with socket.create_server(at) as server, socket.create_connection(at) as client:
        accepted, _ = server.accept()
        assert accepted.getpeername() == client.getsockname()
        accepted.close()
    port.close()
