"""A model spread over processes, through DeepSpeed."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.placement.limits import limits_of, sizes_of
from agentrl.training.backend import Result
from agentrl.training.checkpoint import sync
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig, parameter_groups
from agentrl.training.rendezvous import meet
from agentrl.training.sequence import SequenceGroup

LATEST = "latest"
"""The file of a folder of checkpoints that names the newest whole one."""


def join_ranks() -> None:
    """Choose this process's device, before anything is allocated, and join the other ranks. Raises RendezvousError with
    the reason if that fails."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # no operator is built for reductions in shared memory: they serve inference alone, and building takes a minute
    deepspeed.ops.__compatible_ops__ = {}
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = get_accelerator().communication_backend_name()
    meet(backend)
    deepspeed.init_distributed(dist_backend=backend)


class _Work(torch.nn.Module):
    """The model as DeepSpeed wraps it: its forward pass is whatever is to be computed with the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Result]) -> Result:
        return work()


class DeepSpeedRanks:
    """This process's part of a model, in a DeepSpeed engine; without ``config`` it is only computed. See
    :class:`agentrl.training.backend.Backend`.

    DeepSpeed clips the gradients. Weights are float32 and products are in the policy's precision, as in one process.
    DeepSpeed's own bf16 would cast the whole model, unlike the reference.
    """

    keeps_weights = False

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig | None, spread: DeepSpeed) -> None:
        import deepspeed

        self.model = model
        self.sharded = spread.zero == 3
        groups = parameter_groups(model, config.weight_decay) if config else None
        self._engine: Any = _Work(model)  # without optimiser and shards, there is nothing to do for DeepSpeed
        if config or self.sharded:
            settings = spread.settings(config, limits_of(*sizes_of(model)))
            self._engine, *_ = deepspeed.initialize(model=self._engine, model_parameters=groups, config=settings)
        if config and self.sharded and not (spread.offload_optimizer or spread.offload_parameters):
            _share_masters(self._engine.optimizer)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        together = spread.sequence_parallel
        self.share, self.shares = self.rank // together, self.world // together
        self.sequence = SequenceGroup(together, model.config) if together > 1 else None
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU

    def run(self, work: Callable[[], Result]) -> Result:
        result: Result = self._engine(work)
        return result

    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
        import deepspeed

        gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(parameters))
        return gathered

    def collected(self, values: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, values)
        return {number: values for part in parts for number, values in part.items()}

    def backward(self, loss: Tensor, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world)  # DeepSpeed averages gradients over ranks; the sum is wanted
        if not last:
            self._engine.step()  # counts the micro batch without an update

    def total(self, metrics: dict[str, float]) -> dict[str, float]:
        names = sorted(metrics)
        values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=self.device)
        if self.sequence and self.sequence.rank:
            values.zero_()
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def update(self, lr: float, config: OptimizerConfig) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        return float(self._engine.get_global_grad_norm() or 0.0)

    def discard(self) -> None:
        self._engine.zero_grad()

    # -- checkpoints: a folder for each, in which every rank writes its own part, and a file that names the newest

    def save(self, path: Path, progress: dict[str, Any], beside: "DeepSpeedRanks | None" = None) -> None:
        tag = f"step-{progress['done']}"
        before = _latest(path)
        if before == tag:  # nothing is written over a checkpoint that may be needed
            tag = f"{tag}-again"
        for name, backend in (("model", self), ("beside", beside)):
            if backend:
                state = progress if backend is self else {}
                backend._engine.save_checkpoint(str(path / tag), name, state, False, exclude_frozen_parameters=False)
        dist.barrier()
        if self.rank == 0:
            for file in (path / tag).rglob("*"):
                sync(file)
            partial = path / f"{LATEST}.partial"
            partial.write_text(tag)
            os.replace(partial, path / LATEST)
            sync(path)
            for other in path.iterdir():
                if other.is_dir() and other.name not in (tag, before):
                    shutil.rmtree(other)
        dist.barrier()

    def load(self, path: Path, beside: "DeepSpeedRanks | None" = None) -> dict[str, Any] | None:
        tag = _latest(path)
        if tag is None:
            return None
        progress: dict[str, Any] = self._engine.load_checkpoint(str(path / tag), "model")[1]
        if beside:
            beside._engine.load_checkpoint(str(path / tag), "beside")
        return progress


def _share_masters(optimizer: Any) -> None:
    """Let the weights that the optimiser of ZeRO 3 updates be those of the model. DeepSpeed means to share them if both
    are float32, but compares a device with its name, so that they never agree (0.19), and copies them: 4 bytes more to
    the 16 that a parameter needs."""
    both = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for weights, masters in both:
        if (weights.dtype, weights.device) == (masters.dtype, masters.device):
            masters.data = weights.data


_CPU = torch.device("cpu")


def _latest(path: Path) -> str | None:
    file = path / LATEST
    return file.read_text() if file.exists() else None
