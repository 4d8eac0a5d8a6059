"""How replicas of vLLM get what changed in the weights since the version before: it is fetched while they sample, and
taken up in a pause."""

import asyncio
import shutil
import threading
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.engines.base import EngineError, Weights
from agentrl.engines.replicas import Adapter, Replica, ReplicaError, start_s
from agentrl.engines.weights import adapter_rank, check_shapes, shapes_of, stored, tensors_of, write_folder
from agentrl.engines.worker.delta import Copy, Delta

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

WHOLE = 0.5
"""Deltas since the last whole folder are together at most this part of its size; then another folder is written."""

POLL_S = 0.02

REMEDY = (
    "start it with --worker-extension-cls agentrl_worker.extension.Extension, and with a PYTHONPATH where "
    "agentrl/engines/worker lies under the name agentrl_worker"
)


@dataclass(frozen=True)
class Chain:
    """The weights of one version, as steps that lead to them: digests of weights, each with the folder that has them or
    the delta that leads to them from those before. ``folder`` is the last whole one, and ``size`` the bytes of deltas
    since."""

    version: int
    steps: tuple[tuple[str, Path], ...]
    folder: Path
    size: int = 0

    @property
    def digest(self) -> str:
        return self.steps[-1][0]


class Deltas:
    """See :class:`agentrl.engines.sync.Sync`. A folder of the whole model at first, and a file of what changed for each
    version. A replica that does not hold the version before reads the last folder and what came since. If that does not
    lead to the digest that the weights have here, the current weights are written as a whole folder.

    One copy of the weights, as they are served, is held in memory; so does each worker of a replica.
    """

    adapter: Adapter | None = None

    def __init__(self, policy: "Policy", folder: Path, dtype: str | None) -> None:
        if adapter_rank(policy.model) is not None:
            raise EngineError("sync: delta sends whole models, and this one has an adapter; leave sync out")
        self._root, self._tokenizer, self._dtype = folder, policy.tokenizer, dtype
        self.anchors = 0
        """How often the weights were written as a whole because a replica could not use what there was."""
        self._lock = threading.Lock()  # of what is held, which is changed in place
        self._held: Copy | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._written: set[Path] = set()
        self._warned = {""}
        self._now = self._before = self._whole(Weights(policy.version, policy.source))
        self.label, self.start = self._now.version, self._now.folder

    def prepare(self, weights: Weights) -> Chain:
        if adapter_rank(weights.source) is not None:
            raise EngineError("this model has an adapter, and had none when vLLM was started with it; begin anew")
        with self._lock:
            held, self._held = self._held, None  # worth nothing if this fails half way
            if held is None or held.digest != self._now.digest:
                return self._whole(weights)
            tensors = stored(weights.source) if isinstance(weights.source, Path) else tensors_of(weights.source)
            check_shapes(str(weights.version), shapes_of(tensors), self._shapes)
            delta = held.move(tensors)
            self._held = held
            return self._next(weights.version, held, delta)

    def _whole(self, weights: Weights) -> Chain:
        """The weights as a folder, from which later deltas start."""
        folder = self._root / str(weights.version)
        write_folder(weights.source, self._tokenizer, folder, dtype=self._dtype)
        self._written.add(folder)
        held = Copy.of_folder(folder)
        shapes = shapes_of(held.tensors)
        check_shapes(folder.name, shapes, self._shapes or shapes)
        self._held, self._shapes = held, shapes
        return Chain(weights.version, ((held.digest, folder),), folder)

    def _next(self, version: int, held: Copy, delta: Delta) -> Chain:
        """What led to the weights until now, and a delta; a folder too, if deltas are large together. Those that hold
        the version before need only the delta even then."""
        path = self._root / f"{version}.delta"
        delta.write(path)
        self._written.add(path)
        now = self._now
        first = [step for _, step in now.steps].index(now.folder)
        steps = (*now.steps[first:], (delta.result, path))
        if now.size + delta.size <= WHOLE * held.size:
            return Chain(version, steps, now.folder, now.size + delta.size)
        folder = self._copied(held, version)
        return Chain(version, (*steps, (delta.result, folder)), folder)

    def _copied(self, held: Copy, version: int) -> Path:
        """A folder of the weights that are held."""
        folder = write_folder(self.start, self._tokenizer, self._root / str(version), tensors=held.tensors)
        self._written.add(folder)
        return folder

    def use(self, version: int, prepared: Chain) -> None:
        self._before = self._now
        self._follow(prepared)

    def back(self) -> None:
        self._follow(self._before)

    def _follow(self, chain: Chain) -> None:
        self._now = chain
        self.label, self.start = chain.version, chain.folder

    async def offer(self, replicas: Sequence[Replica], prepared: Chain) -> None:
        await asyncio.gather(*(self._fetched(replica, prepared) for replica in replicas), return_exceptions=True)

    async def give(self, replicas: Sequence[Replica]) -> list[BaseException | None]:
        return await asyncio.gather(*(self._renew(replica) for replica in replicas), return_exceptions=True)

    async def restore(self, replica: Replica) -> None:
        chain = self._now
        if await replica.version() == str(chain.version) and await self._loaded(replica, chain):
            await replica.resume()
        else:
            await self._renew(replica)

    async def _loaded(self, replica: Replica, chain: Chain) -> bool:
        """Whether all workers compute with these weights. The label alone does not tell: a server that was started
        again in the middle of an update may have been given it."""
        states = await replica.told("weights_state", start_s(chain.folder))
        return all(state["loaded"] == chain.digest for state in states)

    async def _renew(self, replica: Replica) -> None:
        chain = self._now
        problem = await self._given(replica, chain)
        if problem:
            chain = await asyncio.to_thread(self._anchored, chain, f"{replica}: {problem}")
            problem = await self._given(replica, chain)
        if problem:
            raise EngineError(f"{replica} did not load version {chain.version}: {problem}")

    def _anchored(self, chain: Chain, problem: str) -> Chain:
        """The weights of a chain that a replica could not follow, as one whole folder."""
        with self._lock:
            if self._now is not chain:
                return self._now  # another replica had the same problem, or they are not the current ones any more
            if self._held is None or self._held.digest != chain.digest:
                raise ReplicaError(f"version {chain.version} is not held any more; {problem}")
            folder = self._copied(self._held, chain.version)
            self._follow(Chain(chain.version, ((chain.digest, folder),), folder))
        self.anchors += 1
        warnings.warn(f"version {chain.version} was written as a whole, since {problem}", stacklevel=2)
        return self._now

    async def _given(self, replica: Replica, chain: Chain) -> str:
        """What went wrong while a replica took up weights, if something did; it is paused then."""
        problem = await self._fetched(replica, chain)
        if problem:
            return problem
        limit_s = start_s(chain.folder)
        await replica.pause()
        problem = _problem(await replica.told("take_weights", limit_s, digest=chain.digest))
        if problem:
            return problem
        await replica.label(chain.version)
        if not await self._loaded(replica, chain):
            raise ReplicaError(f"{replica} was started again while it took up version {chain.version}")
        await replica.resume()
        return ""

    async def _fetched(self, replica: Replica, chain: Chain) -> str:
        """Have a replica make weights ready while it samples; what went wrong, if something did."""
        limit_s = start_s(chain.folder)
        steps = [[digest, str(path)] for digest, path in chain.steps]
        try:
            states = await replica.told("fetch_weights", limit_s, steps=steps)
        except ReplicaError as error:
            if not await replica.healthy():
                raise
            raise EngineError(f"{replica} takes no deltas ({error}); {REMEDY}, or leave sync out") from error
        ends = asyncio.get_running_loop().time() + limit_s
        while any(state["fetching"] for state in states):
            if asyncio.get_running_loop().time() > ends:
                raise ReplicaError(f"{replica} did not read version {chain.version} within {limit_s:g} s")
            await asyncio.sleep(POLL_S)
            states = await replica.told("weights_state", limit_s)
        for reason in {state["why_not_beside"] for state in states} - self._warned:
            self._warned.add(reason)
            warnings.warn(f"{replica} loads weights while it pauses, not beside: {reason}", stacklevel=2)
        return _problem(states)

    async def tidy(self, replicas: Sequence[Replica], used: Collection[Adapter | None]) -> None:
        needed = {path for _, path in self._now.steps}
        for path in self._written - needed:
            await asyncio.to_thread(_remove, path)
        self._written &= needed

    async def end(self, replicas: Sequence[Replica]) -> None:
        pass


def _problem(states: Sequence[dict[str, Any]]) -> str:
    return next((str(state["problem"]) for state in states if state["problem"]), "")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
