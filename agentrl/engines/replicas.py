"""What the vLLM engine needs of each of its replicas: a server over HTTP, or vLLM in this process."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from agentrl.engines.base import EngineError, Turn
from agentrl.placement.launcher import limits
from agentrl.schemas.trajectory import Span

if TYPE_CHECKING:
    import numpy as np

    from agentrl.engines.routes import RouteShape

State = Literal["starting", "stale", "serving", "suspect", "dead"]
"""``serving`` needs health, the version of the engine, and a probe that the weights passed. ``stale`` answers, with
weights of another version."""

EXTENSION, FORGET = "--worker-extension-cls", "forget_expert_kernels"
"""The option that gives workers the methods of :class:`agentrl.engines.worker.extension.Extension`, and one of them."""

WORKER = "agentrl_worker"
"""The name that :mod:`agentrl.engines.worker` has where a server finds it."""

ROUTES, RUNNER = "--enable-return-routed-experts", "VLLM_USE_V2_MODEL_RUNNER"
"""The option that makes vLLM return routes, and the variable that chooses the model runner that can. The parameter
``routed_experts_prompt_start`` of a request says from which token on."""

START_S, TRANSFER_S = 600.0, 300.0
"""Seconds that a server may take to answer, or to read weights, and a transfer of weights, besides the time for their
bytes."""

BYTES_S = 50e6
"""Bytes of weights that are read or sent in a second at least: a slow disk that eight servers share."""

ANSWER_S = 10.0  # for what is left of a request that was cut
ABORT_AGAIN_S = 0.1
Result = TypeVar("Result")


class ReplicaError(EngineError):
    """A replica answered that it failed, or did not answer."""


class BadRequestError(ReplicaError):
    """A replica answered that a request is wrong, for a ``reason`` in words of its own."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Adapter:
    """The adapter of one version of the weights, in a folder as PEFT writes it. vLLM knows it by ``name``, or by
    ``number`` in this process."""

    name: str
    number: int
    version: int
    folder: Path


@dataclass(frozen=True)
class Request:
    """A turn to sample. ``params`` are vLLM's own ``SamplingParams``, by name. The smallest ``priority`` is served
    first. With an ``adapter`` it is sampled by the weights that this one changes."""

    ids: list[int]
    params: dict[str, Any]
    priority: int
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Receiver:
    """One replica in a transfer: ``client`` is vLLM's ``VLLMWeightSyncClient`` of it, ``ranks`` how many GPUs it has,
    and ``address`` where it finds this process."""

    client: Any
    ranks: int
    address: str


def start_s(folder: Path) -> float:
    """Seconds until vLLM must answer that is started with, or reads, the weights in ``folder``."""
    size = sum(file.stat().st_size for file in folder.glob("*") if file.is_file()) if folder.is_dir() else 0
    return limits().server_start_s or START_S + size / BYTES_S


def transfer_s(size: int) -> float:
    """Seconds that a transfer of ``size`` bytes of weights may take."""
    return limits().transfer_s or TRANSFER_S + size / BYTES_S


class Replica(Protocol):
    """One vLLM that samples. ``load`` counts the tokens of requests under way.

    What it cannot do raises ReplicaError, and starting it EngineError with the end of its log.
    """

    state: State
    load: int
    restarts: int

    async def start(self, folder: Path) -> int:
        """Serve the weights in ``folder``; the length of its context."""
        ...

    async def revive(self, folder: Path) -> None:
        """Wait until it answers. One that this process started and that has ended is started again with the weights in
        ``folder``, and ``restarts`` counts it."""
        ...

    async def sample(self, request: Request, ends: float | None) -> Turn | None:
        """A turn. At ``ends``, a time of the event loop, it is cut; None if then nothing was heard of it. Raises
        BadRequestError if the request is wrong."""
        ...

    async def score(self, ids: list[int], adapter: Adapter | None) -> list[float]:
        """Log-probabilities of ``ids[1:]`` at temperature 1."""
        ...

    async def pause(self) -> None:
        """Hold all requests between two tokens, and drop their caches."""
        ...

    async def reload(self, folder: Path) -> None:
        """Load the weights in ``folder`` while it is paused."""
        ...

    async def told(self, method: str, limit_s: float, **arguments: Any) -> list[Any]:
        """What each of its workers answers to a method of :class:`agentrl.engines.worker.extension.Extension`. Raises
        EngineError if it was started without that."""
        ...

    async def label(self, version: int) -> None:
        """Call the weights by this version."""
        ...

    async def resume(self) -> None:
        """Go on with all requests."""
        ...

    async def version(self) -> str:
        """The label of its weights."""
        ...

    async def adapt(self, adapter: Adapter) -> None:
        """Take up an adapter that it does not have, while it samples."""
        ...

    async def drop(self, adapter: Adapter) -> None:
        """Forget an adapter that no turn uses."""
        ...

    async def adapters(self) -> set[str]:
        """Names of the adapters that it has."""
        ...

    async def receiver(self, limit_s: float) -> Receiver:
        """Its part in vLLM's own transfer of weights, of which no step may take longer than ``limit_s``. Raises
        ReplicaError if it was not started for one."""
        ...

    async def healthy(self) -> bool: ...

    async def stop(self) -> None:
        """End it if this process started it, and close connections to it."""
        ...

    def tail(self) -> str:
        """The end of its log, if this process keeps one."""
        ...


async def in_time(
    work: Coroutine[Any, Any, Result], ends: float | None, abort: Callable[[], Awaitable[Any]]
) -> Result | None:
    """What ``work`` gives. From ``ends`` on ``abort`` is called, after which it gives what it has; None if it gives
    nothing then."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=None if ends is None else max(0.0, ends - loop.time()))
        over = loop.time() + ANSWER_S
        while not task.done() and loop.time() < over:  # a request that is not taken in yet is unknown: told again
            await abort()
            await asyncio.wait([task], timeout=ABORT_AGAIN_S)
        return (await task) if task.done() else None
    finally:
        task.cancel()


def span_of(label: str, start: int, end: int) -> Span:
    """Which weights sampled. Raises ReplicaError if their label is none of ours: vLLM was started again, and has the
    weights of its start."""
    if not label.isdecimal():
        raise ReplicaError(f"vLLM sampled with weights that it calls {label!r}: it was started again")
    return Span(version=int(label), start=start, end=end)


def turn_of(
    ids: list[int], logprobs: list[float], spans: list[Span], reason: str | None, routes: "np.ndarray | None" = None
) -> Turn:
    """A turn from what vLLM gave. Raises ReplicaError if its parts do not fit together."""
    if len(logprobs) != len(ids) or sum(span.end - span.start for span in spans) != len(ids):
        raise ReplicaError(f"vLLM gave {len(ids)} tokens, {len(logprobs)} log-probs and the spans {spans}")
    if reason not in ("abort", "stop", "length"):
        raise ReplicaError(f"vLLM ended a request by {reason!r}")
    stop: Literal["cut", "stop", "length"] = "cut" if reason == "abort" else "stop" if reason == "stop" else "length"
    return Turn(ids, logprobs, spans, stop, routes=routes)


def routes_of(made: Turn, shape: "RouteShape", tokens: int) -> "np.ndarray | None":
    """The routes of a turn in the layers that have a router: vLLM gives those of all layers, [tokens, layers, k]. There
    are at most so many ``tokens``, fewer of a turn that was cut.

    Raises EngineError if a turn has none, and ReplicaError if they do not fit.
    """
    if made.routes is None:
        if made.stop == "cut":
            return None
        raise EngineError(f"vLLM returned no routes; start its servers with {ROUTES} and {RUNNER}=1")
    routes = made.routes
    if routes.shape[1] > max(shape.layers):
        routes = routes[:, list(shape.layers)]
    if len(routes) > tokens or (len(routes) < tokens and made.stop != "cut"):
        raise ReplicaError(f"vLLM gave routes of {len(routes)} tokens, not {tokens}")
    try:
        shape.check(routes)
    except ValueError as error:
        raise ReplicaError(str(error)) from None
    return routes.astype(shape.dtype)
