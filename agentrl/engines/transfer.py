"""Weights over vLLM's own transfer, from the trainer's GPU into vLLM's: NCCL between GPUs, CUDA IPC on one.

The trainer's half of it is part of vLLM, so it must be installed where the stage runs.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.engines.base import EngineError, Weights
from agentrl.engines.blocking import in_thread
from agentrl.engines.replicas import Adapter, Receiver, Replica, ReplicaError, transfer_s
from agentrl.engines.weights import adapter_rank, tensors_of, write_folder

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

Backend = Literal["nccl", "ipc"]


class Receivers:
    """Several replicas as one ``VLLMWeightSyncClient``. Each of them is told at the same time, since collectives wait
    for all of them."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self.receivers = receivers
        self._pool = ThreadPoolExecutor(max(1, len(receivers)), "transfer")

    @property
    def ranks(self) -> int:
        return sum(receiver.ranks for receiver in self.receivers)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets = accumulate(
            (receiver.ranks for receiver in self.receivers[:-1]), initial=int(init_info.get("rank_offset", 0))
        )
        infos = [
            {**init_info, "rank_offset": offset} if "rank_offset" in init_info else init_info for offset in offsets
        ]
        self._told("init_weight_transfer_engine", [(info,) for info in infos])

    def shutdown_weight_transfer_engine(self) -> None:
        self._told("shutdown_weight_transfer_engine", [()] * len(self.receivers))

    def start_weight_update(self) -> None:
        self._told("start_weight_update", [()] * len(self.receivers))

    def update_weights(self, update_info: Any) -> None:
        self._told("update_weights", [(update_info,)] * len(self.receivers))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._told("finish_weight_update", [(weight_version,)] * len(self.receivers))

    def _told(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        calls = [
            self._pool.submit(getattr(receiver.client, name), *given)
            for receiver, given in zip(self.receivers, arguments, strict=True)
        ]
        for call in calls:
            call.result()


def transfer_option(backend: str) -> list[str]:
    """Makes a server take weights by vLLM's own transfer."""
    return ["--weight-transfer-config", json.dumps({"backend": backend})]


def check_transfer(backend: Backend) -> None:
    """Raises EngineError if a transfer cannot work here."""
    import torch

    try:
        import vllm.distributed.weight_transfer  # noqa: F401
    except ImportError as error:
        raise EngineError(
            f"sync: {backend} needs vLLM where the stage runs, and it cannot be imported here ({error}); install "
            "agentrl beside it, or leave sync out: weights then go as folders"
        ) from error
    if not torch.cuda.is_available():
        raise EngineError(f"sync: {backend} needs a CUDA device; leave sync out: weights then go as folders")


class Transfer:
    """See :class:`agentrl.engines.sync.Sync`. All replicas take part at once. One that ended has left the group of the
    others, and is used no more."""

    adapter: Adapter | None = None

    def __init__(self, policy: "Policy", folder: Path, dtype: str | None, backend: Backend) -> None:
        if adapter_rank(policy.model) is not None:
            raise EngineError(f"sync: {backend} sends whole models, and this one has an adapter; leave sync out")
        self.backend = backend
        self.start = write_folder(policy.model, policy.tokenizer, folder / str(policy.version), dtype=dtype)
        self.label = policy.version
        parameters = list(policy.model.parameters())
        self.limit_s = transfer_s(sum(tensor.numel() * tensor.element_size() for tensor in parameters))
        self.device = policy.model.device
        self._source: Any = policy.model
        self._before = (self.label, self._source)
        self._sender: Any = None
        self._members: list[Replica] = []

    def prepare(self, weights: Weights) -> Any:
        return weights.source

    def use(self, version: int, prepared: Any) -> None:
        self._before = (self.label, self._source)
        self.label, self._source = version, prepared

    def back(self) -> None:
        self.label, self._source = self._before

    async def offer(self, replicas: Sequence[Replica], prepared: Any) -> None:
        pass

    async def give(self, replicas: Sequence[Replica]) -> list[BaseException | None]:
        if not replicas:
            return []
        try:
            if list(replicas) != self._members:
                await self._form(replicas)
            await asyncio.gather(*(replica.pause() for replica in replicas))
            await self._beside(self._sender.send_weights)
            await asyncio.gather(*(replica.label(self.label) for replica in replicas))
            await asyncio.gather(*(replica.resume() for replica in replicas))
        except Exception as error:
            self._members = []
            problem = EngineError(f"sync: {self.backend} did not give version {self.label} to all replicas: {error!r}")
            problem.__cause__ = error
            return [problem] * len(replicas)
        return [None] * len(replicas)

    async def restore(self, replica: Replica) -> None:
        if await replica.version() != str(self.label):
            replica.state = "dead"
            raise EngineError(f"{replica} was started again, and sync: {self.backend} cannot give it weights alone")

    async def tidy(self, replicas: Sequence[Replica], used: Collection[Adapter | None]) -> None:
        pass

    async def end(self, replicas: Sequence[Replica]) -> None:
        if self._sender is not None:
            await in_thread(self._sender.shutdown)

    async def _form(self, replicas: Sequence[Replica]) -> None:
        """Make the group of the trainer and these replicas."""
        if self._sender is not None:
            await asyncio.to_thread(self._sender.shutdown)
            self._sender = None
        group = Receivers([await replica.receiver(self.limit_s) for replica in replicas])
        self._sender = await self._beside(lambda: self._joined(group))
        self._members = list(replicas)

    def _joined(self, group: Receivers) -> Any:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        sync = self

        class Current(WeightSource):
            """The weights that are current at each pass, in the order of their names."""

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

            def __iter__(self) -> Iterator[tuple[str, Any]]:
                for name, tensor in sorted(tensors_of(sync._source).items()):
                    yield name, tensor.to(sync.device)

        return WeightTransferTrainerFactory.trainer_init(self._about(group), client=group, source=Current())

    def _about(self, group: Receivers) -> Any:
        """What vLLM's trainer half is made from."""
        if self.backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=True)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return NCCLTrainerInitInfo(group.receivers[0].address, port, group.ranks + 1, rank=0)

    async def _beside(self, work: Callable[[], Any]) -> Any:
        """What a collective gives. It runs in a thread of its own that nobody joins: if a replica leaves in the middle,
        it never comes back."""
        import torch

        loop = asyncio.get_running_loop()
        made: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                result = work()
            except BaseException as error:
                loop.call_soon_threadsafe(_settle, made, None, error)
            else:
                loop.call_soon_threadsafe(_settle, made, result, None)

        threading.Thread(target=run, daemon=True, name="weight-transfer").start()
        try:
            return await asyncio.wait_for(made, self.limit_s)
        except TimeoutError:
            raise ReplicaError(
                f"not all replicas took part within {self.limit_s:g} s (execution.limits.transfer_s)"
            ) from None


def _settle(made: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if made.cancelled():
        return
    if error is not None:
        made.set_exception(error)
    else:
        made.set_result(result)
