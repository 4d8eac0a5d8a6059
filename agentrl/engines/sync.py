"""How replicas of vLLM get the weights of a new version: as folders that they load again, or as adapters beside the
weights that they have."""

import asyncio
import shutil
import uuid
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.engines.base import EngineError, Weights
from agentrl.engines.blocking import in_thread
from agentrl.engines.replicas import Adapter, Replica, ReplicaError
from agentrl.engines.weights import adapter_rank, adapter_targets, write_adapter, write_folder

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

END_S = 5.0


class Sync(Protocol):
    """One way to give weights to replicas. Weights are prepared, used from then on by all that asks, and given.

    A replica starts with those in ``start``. ``label`` is what it calls the weights that it samples with, and
    ``adapter`` what a request has to name.
    """

    start: Path
    label: int

    @property
    def adapter(self) -> Adapter | None: ...

    def prepare(self, weights: Weights) -> Any:
        """Make ready what :meth:`use` takes. Nothing is changed. Raises EngineError if replicas could not load it."""
        ...

    def use(self, version: int, prepared: Any) -> None:
        """From now on these are the current weights."""
        ...

    def back(self) -> None:
        """The weights before the current ones are the current ones again."""
        ...

    async def offer(self, replicas: Sequence[Replica], prepared: Any) -> None:
        """Let replicas get what they can of prepared weights while they sample with the current ones."""
        ...

    async def give(self, replicas: Sequence[Replica]) -> list[BaseException | None]:
        """Give the current weights to replicas. What went wrong with each of them: ReplicaError if it failed, and
        EngineError if it is well but did not load them."""
        ...

    async def restore(self, replica: Replica) -> None:
        """Give a replica that answers again what it lacks of the current weights: one that was started again answers
        with those of its start."""
        ...

    async def tidy(self, replicas: Sequence[Replica], used: Collection[Adapter | None]) -> None:
        """Remove what was prepared earlier, but for adapters that turns under way have ``used``."""
        ...

    async def end(self, replicas: Sequence[Replica]) -> None:
        """Leave nothing on replicas that go on without this engine."""
        ...


class Folders:
    """A folder of the whole model for each version. Replicas load it between two tokens. They compute their caches
    again, so that later tokens see the new weights alone."""

    adapter: Adapter | None = None

    def __init__(self, policy: "Policy", folder: Path, dtype: str | None) -> None:
        self._folder, self._tokenizer, self._dtype = folder, policy.tokenizer, dtype
        first = folder / str(policy.version)
        self._first = self.start = write_folder(policy.source, policy.tokenizer, first, dtype=dtype)
        self.label = policy.version
        self._before: tuple[int, Path] | None = None

    def prepare(self, weights: Weights) -> Path:
        if adapter_rank(weights.source) is not None:
            raise EngineError("this model has an adapter, and had none when vLLM was started with it; begin anew")
        folder = self._folder / str(weights.version)
        return write_folder(weights.source, self._tokenizer, folder, self._first, self._dtype)

    def use(self, version: int, prepared: Path) -> None:
        self._before = self.label, self.start
        self.label, self.start = version, prepared

    def back(self) -> None:
        if self._before is not None:
            self.label, self.start = self._before
            self._before = None

    async def offer(self, replicas: Sequence[Replica], prepared: Path) -> None:
        pass

    async def give(self, replicas: Sequence[Replica]) -> list[BaseException | None]:
        return await asyncio.gather(
            *(self._renew(replica, self._before) for replica in replicas), return_exceptions=True
        )

    async def restore(self, replica: Replica) -> None:
        if await replica.version() != str(self.label):
            await self._renew(replica)

    async def _renew(self, replica: Replica, before: tuple[int, Path] | None = None) -> None:
        """If a replica cannot load the weights, it goes back to those ``before``: it would end with the next
        request."""
        label, folder = self.label, self.start  # they may change meanwhile
        await replica.pause()
        try:
            await replica.reload(folder)
        except ReplicaError as error:
            if before is None or not await replica.healthy():
                raise
            await replica.reload(before[1])
            await replica.resume()
            raise EngineError(f"{replica} did not load version {label}: {error}") from error
        await replica.label(label)
        await replica.resume()

    async def tidy(self, replicas: Sequence[Replica], used: Collection[Adapter | None]) -> None:
        if self._before is not None and self._before[1] not in (self._first, self.start):
            await asyncio.to_thread(shutil.rmtree, self._before[1], ignore_errors=True)

    async def end(self, replicas: Sequence[Replica]) -> None:
        pass


class Adapters:
    """The model once, and a new adapter for each version. Nothing pauses: turns under way go on with the adapter that
    they began with, and later ones name the new one."""

    def __init__(self, policy: "Policy", folder: Path, dtype: str | None) -> None:
        if "lm_head" in adapter_targets(policy.model):
            raise EngineError(
                "vLLM 0.32 ends when it scores a prompt with an adapter of the output layer; leave lm_head out of "
                "optimizer.lora.targets"
            )
        self._folder = folder
        self.start = write_folder(policy.model, policy.tokenizer, folder / "base", dtype=dtype)
        self.label = policy.version
        self._prefix = uuid.uuid4().hex[:12]  # a server may serve several engines
        self._count = 0
        self._old: list[Adapter] = []
        self.adapter: Adapter = self.prepare(Weights(policy.version, policy.model))

    def prepare(self, weights: Weights) -> Adapter:
        model: Any = weights.source
        if adapter_rank(model) is None:
            raise EngineError("this model has no adapter, and had one when vLLM was started with it; begin anew")
        self._count += 1
        folder = write_adapter(model, self._folder / f"adapter-{self._count}")
        return Adapter(f"{self._prefix}-{self._count}", self._count, weights.version, folder)

    def use(self, version: int, prepared: Adapter) -> None:
        self._old.append(self.adapter)
        self.adapter = prepared

    def back(self) -> None:
        self._old.append(self.adapter)
        self.adapter = self._old.pop(-2)

    async def offer(self, replicas: Sequence[Replica], prepared: Adapter) -> None:
        pass

    async def give(self, replicas: Sequence[Replica]) -> list[BaseException | None]:
        return await asyncio.gather(*(self._give(replica) for replica in replicas), return_exceptions=True)

    async def _give(self, replica: Replica) -> None:
        try:
            await replica.label(self.label)
            await replica.adapt(self.adapter)
        except ReplicaError as error:
            if not await replica.healthy():
                raise
            version = self.adapter.version
            raise EngineError(f"{replica} did not take up the adapter of version {version}: {error}") from error

    async def restore(self, replica: Replica) -> None:
        if await replica.version() != str(self.label):
            await replica.label(self.label)
        if self.adapter.name not in await replica.adapters():
            await replica.adapt(self.adapter)

    async def tidy(self, replicas: Sequence[Replica], used: Collection[Adapter | None]) -> None:
        for adapter in [adapter for adapter in self._old if adapter not in used]:
            self._old.remove(adapter)
            await asyncio.gather(*(replica.drop(adapter) for replica in replicas), return_exceptions=True)
            await in_thread(partial(shutil.rmtree, adapter.folder, ignore_errors=True))

    async def end(self, replicas: Sequence[Replica]) -> None:
        self._old.append(self.adapter)
        await asyncio.wait([asyncio.create_task(self.tidy(replicas, ()))], timeout=END_S)
