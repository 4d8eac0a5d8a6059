"""What one machine says before a run: what it is, which others it reaches, when it sees files, how fast it sums and
reads. It runs on each machine of a launcher (``python -m agentrl.training.cluster_probe``);
:mod:`agentrl.training.cluster_check` asks."""

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.placement.addresses import ADDRESS
from agentrl.placement.shared import wait_until_listed, wait_until_seen
from agentrl.schemas.installation import code_digest

SAYS = "AGENTRL_PROBE "
"""How lines begin that the other side understands."""

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "ray", "numpy", "pyarrow")
GO, WEIGHTS, LOCK = "go", "weights", "lock"
"""Files in the shared folder: the addresses of all machines, what stands for a model's weights, and one to lock."""

CONNECT_S = 5.0
SUMMED, WRITTEN = 2**24, 2**27
"""Numbers that are summed over the machines, 64 MiB, and bytes that are written and read."""


def about(folder: Path) -> dict[str, Any]:
    """This machine, as a value of JSON. Free space is in bytes."""
    import psutil

    places = {"folder": folder, "temporary": Path(tempfile.gettempdir()), "models": _models()}
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "processors": os.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "free": {name: shutil.disk_usage(path).free for name, path in places.items()},
    }


def _models() -> Path:
    """The folder that the hub's models are kept in, or the nearest one above it that is there."""
    folder = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def versions() -> dict[str, str]:
    """Of Python, of our own code by a digest, and of packages that are installed."""
    installed = {"python": platform.python_version(), "agentrl's code": code_digest()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def listen(port: int) -> None:
    """Take connections at ``port``, until this process ends."""
    server = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    server.bind(("", port))
    server.listen(1024)

    def accept() -> None:
        while True:
            server.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()


def unreached(addresses: list[str]) -> dict[str, str]:
    """Of addresses ``host:port`` those that cannot be connected to, and why."""
    problems = {}
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            problems[address] = str(error)
    return problems


def locks(path: Path) -> str:
    """Why a file cannot be locked; empty if it can."""
    try:
        with path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another machine has it
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_weights(path: Path) -> float:
    """Bytes per second to the disk."""
    part, began = os.urandom(2**20), time.monotonic()
    with path.open("wb") as file:
        for _ in range(WRITTEN // len(part)):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return WRITTEN / (time.monotonic() - began)


def read_weights(path: Path, limit_s: float) -> float:
    """Bytes per second, once all of the file is seen."""
    wait_until_seen({str(path.absolute()): WRITTEN}, limit_s)
    began = time.monotonic()
    with path.open("rb") as file:
        while file.read(2**22):
            pass
    return WRITTEN / (time.monotonic() - began)


def summed(backend: str) -> float:
    """Bytes per second of sums over one rank of each machine, by the addresses and variables that ranks use.

    Raises RendezvousError if they do not meet.
    """
    import torch
    import torch.distributed as dist

    from agentrl.training.rendezvous import meet

    meet(backend)
    numbers = torch.ones(SUMMED, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(numbers)  # connections are made
    began, rounds = time.monotonic(), 3
    for _ in range(rounds):
        dist.all_reduce(numbers)
    float(numbers[0])  # a GPU is done now
    seconds = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group()
    return rounds * 4 * SUMMED / seconds


def say(check: str, answer: Any) -> None:
    sys.stdout.write(f"{SAYS}{json.dumps({'check': check, 'answer': answer})}\n")
    sys.stdout.flush()


def gpus() -> list[dict[str, Any]]:
    import torch

    names = range(torch.cuda.device_count())
    return [{"name": (kept := torch.cuda.get_device_properties(n)).name, "memory": kept.total_memory} for n in names]


def _answers(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    folder, first = given.folder, given.node == 0
    listen(given.port)
    yield "about", about(folder)
    if not wait_until_listed(folder / GO, given.limit_s):
        raise TimeoutError(f"no file of the stage's machine was seen in {folder} for {given.limit_s:g} s")
    addresses = json.loads((folder / GO).read_text())
    (folder / f"from-{given.node}").write_text("seen")
    yield "seen", time.time()
    yield "unreached", unreached(addresses)
    yield "locks", locks(folder / LOCK)
    path = folder / WEIGHTS
    yield ("written", write_weights(path)) if first else ("read", read_weights(path, given.limit_s))
    yield "gpus", (devices := gpus())
    os.environ |= {ADDRESS: given.host, "RANK": str(given.node), "WORLD_SIZE": str(given.nodes)}
    yield "summed", summed("nccl" if devices else "gloo")


def main(given: argparse.Namespace) -> int:
    """The exit code: 1 if a check could not be made, after a line that says why."""
    try:
        for check, answer in _answers(given):
            say(check, answer)
    except Exception as error:
        say("failed", f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, kind in (("--node", int), ("--nodes", int), ("--limit-s", float), ("--host", str), ("--port", int)):
        parser.add_argument(name, type=kind, required=True)
    parser.add_argument("folder", type=Path)
    sys.exit(main(parser.parse_args()))
