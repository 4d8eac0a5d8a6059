"""How ranks meet. The first one binds a port and only then publishes its address, in a file that all of them see. All
report there, and then connect to each other. Whoever does not get through says so, and so do the others."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.placement.addresses import ADDRESS, INTERFACE, interface_of
from agentrl.placement.shared import is_listed, pause_s, wait_until_listed
from agentrl.training.batch import TrainingError
from agentrl.training.lines import FAILED, tell

if TYPE_CHECKING:
    from torch.distributed import TCPStore

MEET, RENDEZVOUS_S = "AGENTRL_MEET", "AGENTRL_RENDEZVOUS_S"
"""Variables of a rank: the file with the address of the first one, and how long it waits for the others."""

CONNECT_S = 10.0
MESH_S = {"gloo": 20.0, "nccl": 120.0}
"""Seconds to connect all ranks that have reported, besides a tenth of a second for each. Gloo's own limit does not
hold: one side fails at once, and the other one after 100 s."""

LOOK_S = 0.5
UNMET, UNREACHED = "unmet", ".unreached"
"""The key, and the ending of the file, in which a rank tells the others why it fails."""


class RendezvousError(TrainingError):
    """The ranks did not meet."""


def meet(backend: str) -> None:
    """Join the ranks of this job, by the variables that :func:`agentrl.training.launch.fork_ranks` sets.

    Raises RendezvousError with the reason. A rank that hangs in ``backend`` cannot raise: it is ended by
    :func:`_watched`.
    """
    import torch.distributed as dist

    rank, world, limit_s = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(os.environ[RENDEZVOUS_S])
    address = os.environ[ADDRESS]
    if INTERFACE not in os.environ and (interface := interface_of(address)):
        os.environ[INTERFACE] = interface  # gloo would ask for the address of the machine's name
    store = _store(rank, world, address, limit_s)
    store.set_timeout(timedelta(seconds=CONNECT_S))
    try:
        beside = store.clone()  # type: ignore[attr-defined]  # asked while the other one waits within a call
        _report(store, rank, world, limit_s)
    except RuntimeError as error:
        lost = f"rank {rank} on {socket.gethostname()} ({address}) lost the connection to rank 0"
        raise RendezvousError(f"{lost}: {str(error).splitlines()[0]}; {_REMEDY}") from None
    store.set_timeout(timedelta(seconds=limit_s))
    with _watched(store, beside, world, backend):
        dist.init_process_group(backend, store=dist.PrefixStore("ranks", store), rank=rank, world_size=world)
        _count(world)


def _store(rank: int, world: int, address: str, limit_s: float) -> "TCPStore":
    """The first rank's store of keys, or a connection to it."""
    import torch.distributed as dist

    file = Path(os.environ[MEET])
    limit = timedelta(seconds=limit_s)
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, world, True, limit, wait_for_workers=False)
        partial = file.with_name(f"{file.name}.partial")
        partial.write_text(f"{address}:{store.port}")
        partial.replace(file)
        return store
    if not wait_until_listed(file, limit_s):
        raise RendezvousError(
            f"rank {rank} on {socket.gethostname()} saw no address of rank 0 in {file} for {limit_s:g} s; its machine "
            "must share that folder; a slower start needs a higher execution.limits.rendezvous_s"
        )
    host, _, port = file.read_text().rpartition(":")
    try:  # torch would try for a minute
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        return dist.TCPStore(host, int(port), world, False, limit, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        reason = (
            f"rank {rank} on {socket.gethostname()} ({address}) cannot reach rank 0 at {host}:{port}: "
            f"{str(error).splitlines()[0]}; {_REMEDY}"
        )
        file.with_suffix(UNREACHED).write_text(reason)
        raise RendezvousError(reason) from None


_REMEDY = (
    f"let machines reach each other at all ports, or name the interface of their common network in execution.env "
    f"({INTERFACE})"
)


def _report(store: "TCPStore", rank: int, world: int, limit_s: float) -> None:
    """Wait until all ranks have reported, or one of them says in a file that it cannot."""
    unreached = Path(os.environ[MEET]).with_suffix(UNREACHED)
    store.set(f"here-{rank}", socket.gethostname())
    began = time.monotonic()
    while missing := [other for other in range(world) if not store.check([f"here-{other}"])]:
        if (waited := time.monotonic() - began) > limit_s:
            raise RendezvousError(
                f"ranks {', '.join(map(str, missing[:20]))} of {world} did not report to rank 0 within {limit_s:g} s; "
                "the logs of their machines say why, or set execution.limits.rendezvous_s higher"
            )
        if is_listed(unreached):
            raise RendezvousError(f"rank {rank} on {socket.gethostname()} ends: {unreached.read_text()}")
        time.sleep(max(0.05, pause_s(waited)))


@contextmanager
def _watched(store: "TCPStore", beside: "TCPStore", world: int, backend: str) -> Iterator[None]:
    """Within it ranks connect. If one of them fails, or it takes too long, this rank says so and ends, though it may
    hang in a call that cannot be interrupted."""
    limit_s, over = MESH_S[backend] + 0.1 * world, threading.Event()
    at = f"{os.environ[ADDRESS]}, interface {os.environ.get(INTERFACE)}"
    name = f"rank {os.environ['RANK']} on {socket.gethostname()} ({at})"

    def end(reason: str) -> None:
        tell(FAILED, reason)
        os._exit(1)

    def watch() -> None:
        while not over.wait(LOOK_S):
            try:
                failed = beside.get(UNMET).decode() if beside.check([UNMET]) else ""
            except RuntimeError as error:
                failed = f"rank 0 is gone: {str(error).splitlines()[0]}"
            if failed and not over.is_set():
                end(f"{name} ends: {failed}")

    def limit() -> None:
        if not over.wait(limit_s):
            reason = f"{name} could not connect to all {world} ranks by {backend} within {limit_s:g} s; {_REMEDY}"
            _tell_others(store, reason)
            end(reason)

    for work in (watch, limit):
        threading.Thread(target=work, name=f"rendezvous-{work.__name__}", daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        reason = f"{name} cannot connect to the other ranks by {backend}: {str(error).splitlines()[0]}; {_REMEDY}"
        _tell_others(store, reason)
        raise RendezvousError(reason) from None
    finally:
        over.set()


def _tell_others(store: "TCPStore", reason: str) -> None:
    """In another thread: a connection that is cut waits for minutes."""
    threading.Thread(target=lambda: store.clone().set(UNMET, reason), daemon=True).start()  # type: ignore[attr-defined]
    time.sleep(4 * LOOK_S)  # rank 0 has the store: they read it first


def _count(world: int) -> None:
    """A first sum, by which NCCL connects."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(ones)
    if int(ones) != world:
        raise RuntimeError(f"a sum over {world} ranks gave {float(ones):g}")
