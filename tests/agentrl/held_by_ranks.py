"""What two real ranks under ZeRO 3 hold, in bytes of live storages: ``python held_by_ranks.py FOLDER``.

The folder has a model in ``start``. Prints
``{"float32": {"full": ..., "adapters": ...}, "bfloat16": ...}``, by what ranks exchange and what is
trained, each with ``states`` between two steps and ``peak`` of forward and backward passes.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from agentrl.algorithms.sft import SFT
from agentrl.models import policy as policies
from agentrl.placement import limits
from agentrl.schemas.training import TrainingRow
from agentrl.training.job import DeepSpeed
from agentrl.training.launch import _import_what_ranks_need
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.traced import Storages

TOKENS, RANKS, REDUCED = 8, 2, 200_000


class Live(TorchDispatchMode):
    """Counts storages that operations made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.storages, self.off = Storages(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and not self.off:
                self.storages.hold(tensor)
        return result

    @property
    def peak(self) -> int:
        """The most that was held since :meth:`begin`."""
        return max(self.storages.peaks.values())

    def begin(self) -> None:
        self.storages.peaks = {}

    def without(self, function: Any) -> Any:
        """``function``, of which nothing is counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        return call

    @contextmanager
    def paused(self) -> Any:
        before, self.off = self.off, True
        yield
        self.off = before


def rows() -> TrainingRows:
    made = [[(7 * index + 31 * number) % 500 for index in range(TOKENS)] for number in range(4)]
    mask = [False] + [True] * (TOKENS - 1)
    return TrainingRows.of(
        [
            TrainingRow(row_id=f"r{number}", unit=number, label=1, input_ids=ids, mask=mask, weights=[1.0] * TOKENS)
            for number, ids in enumerate(made)
        ]
    )


def settings(communication: Any, adapters: bool) -> tuple[OptimizerConfig, DeepSpeed]:
    lora = LoRA(rank=4) if adapters else None
    optimizer = OptimizerConfig(micro_tokens=TOKENS, precision="bfloat16", gradient_checkpointing=True, lora=lora)
    return optimizer, DeepSpeed(zero=3, processes=RANKS, communication=communication)


def rank(number: int, folder: Path, communication: Any, adapters: bool) -> None:
    live = Live()
    # gloo copies what it sums, which NCCL does not
    dist.reduce_scatter_tensor = live.without(dist.reduce_scatter_tensor)
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    meet = f"file://{folder}/meet-{communication}-{adapters}"
    dist.init_process_group("gloo", init_method=meet, rank=number, world_size=RANKS)
    import deepspeed

    from agentrl.training.partitioned import load_partitioned
    from agentrl.training.rank import backend_of
    from agentrl.training.step import Trainer

    deepspeed.init_distributed("gloo")
    optimizer, spread = settings(communication, adapters)
    with live:
        policy = load_partitioned(folder / "start", spread.settings(optimizer))
        backend: Any = backend_of(SimpleNamespace(deepspeed=spread))  # type: ignore[arg-type]
        trainer: Any = Trainer(policy, SFT(), optimizer, 4, backend, 0)
        for step in range(4):
            if step == 2:  # moments are there, and DeepSpeed knows what to fetch ahead
                trainer.backend.update = live.without(trainer.backend.update)
                states = live.storages.held
                live.begin()
            trainer.step(rows())
    if number == 0:
        (folder / "held.json").write_text(json.dumps({"states": states, "peak": live.peak}))
    dist.barrier()


def held(folder: Path, communication: str, adapters: bool) -> Any:
    start_processes(rank, (folder, communication, adapters), nprocs=RANKS, start_method="fork")
    return json.loads((folder / "held.json").read_text())


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    policies.processor_has_bfloat16 = lambda: True  # type: ignore[assignment]  # it rounds, which takes as much memory
    limits.SMALL, limits.REDUCED = 0, REDUCED
    _import_what_ranks_need(["agentrl.training.step"])
    print(
        json.dumps(
            {
                communication: {
                    "full": held(Path(sys.argv[1]), communication, False),
                    "adapters": held(Path(sys.argv[1]), communication, True),
                }
                for communication in ("float32", "bfloat16")
            }
        )
    )
