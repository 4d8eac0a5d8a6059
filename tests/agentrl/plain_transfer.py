"""A backend of vLLM's weight transfer that needs no GPU: tensors go through vLLM's own store over TCP.

vLLM loads it as a plugin in its child processes. Everything but the transport is vLLM's own: the calls, their order,
and how workers load what they receive.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "plain"


@dataclass
class InitInfo(WeightTransferInitInfo):
    port: int = 0
    world_size: int = 0
    rank_offset: int = 0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str] = field(default_factory=list)


class Plain(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.group = StatelessProcessGroup.create(
            "127.0.0.1", init_info.port, init_info.rank_offset, init_info.world_size
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        for name in update_info.names:
            self.model.load_weights([(name, self.group.broadcast_obj(None, 0))])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


@dataclass
class TrainerInfo(TrainerInitInfo):
    backend: ClassVar[str] = NAME
    port: int
    world_size: int


class PlainTrainer(TrainerWeightTransferEngine[TrainerInfo]):
    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> "PlainTrainer":
        made = cls(client=client, source=source)
        about = asdict(InitInfo(init_info.port, init_info.world_size, 1))
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(client.init_weight_transfer_engine, about)
            made.group = StatelessProcessGroup.create("127.0.0.1", init_info.port, 0, init_info.world_size)
            told.result()
        return made

    def send_weights(self) -> None:
        assert self.source is not None
        names = [entry.name for entry in self.source.metadata()]
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            told = pool.submit(self.client.update_weights, {"names": names})
            for _, tensor in self.source:
                self.group.broadcast_obj(tensor.cpu().clone(), 0)
            told.result()
        self.client.finish_weight_update()


def register() -> None:
    """What vLLM calls in each of its processes."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Plain)
        WeightTransferTrainerFactory.register_engine(NAME, PlainTrainer)
