"""Where the model of a training step is computed: the interface, and one process."""

import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from agentrl.engines.quantized import restore, without_quantized
from agentrl.training.checkpoint import load_checkpoint, save_checkpoint
from agentrl.training.optimizer import OptimizerConfig, parameter_groups

if TYPE_CHECKING:
    from agentrl.training.sequence import SequenceGroup

Result = TypeVar("Result")


class Backend(Protocol):
    """One model, in one process or on many ranks, of which this is rank ``rank`` of ``world``. It computes every
    ``shares``-th micro batch, from number ``share`` on: alone, or with the other ranks of its ``sequence`` group.
    ``keeps_weights`` is true if a step that is refused leaves the weights as they were. ``sharded`` is true if each
    rank holds only a part of each weight: then all ranks must compute equally often."""

    rank: int
    world: int
    share: int
    shares: int
    sequence: "SequenceGroup | None"
    device: torch.device
    model: torch.nn.Module
    keeps_weights: bool
    sharded: bool

    def run(self, work: Callable[[], Result]) -> Result:
        """What ``work`` computes with the model. Outside of it, weights may not be there."""
        ...

    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Within it, these parameters are whole, to be read."""
        ...

    def collected(self, values: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """What all ranks found, by number."""
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of a loss, summed over ranks. ``last`` is true for the last micro batch of a step."""
        ...

    def total(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics summed over ranks; those of a sequence group found the same, and count once."""
        ...

    def update(self, lr: float, config: OptimizerConfig) -> float:
        """Clip the gradients, take the optimiser step and forget the gradients. Returns their norm before clipping."""
        ...

    def discard(self) -> None:
        """Forget the gradients."""
        ...

    def save(self, path: Path, progress: dict[str, Any], beside: "Any | None" = None) -> None:
        """Write a checkpoint: ``progress``, weights and optimiser, and those of the backend ``beside`` this one."""
        ...

    def load(self, path: Path, beside: "Any | None" = None) -> dict[str, Any] | None:
        """Go back to a checkpoint and return its ``progress``; None if there is no checkpoint."""
        ...


class OneProcess:
    """A model in this process, trained by torch's AdamW; without ``config`` it is only computed. See
    :class:`Backend`."""

    rank, world = 0, 1
    share, shares = 0, 1
    sequence: "SequenceGroup | None" = None
    keeps_weights = True
    sharded = False

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig | None = None) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if config:
            groups = parameter_groups(model, config.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)

    def run(self, work: Callable[[], Result]) -> Result:
        return work()

    def gathered(self, parameters: Sequence[Tensor]) -> AbstractContextManager[Any]:
        return nullcontext()

    def collected(self, values: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        return values

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def total(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    def update(self, lr: float, config: OptimizerConfig) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.clip_norm)
        if norm.isfinite():
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.discard()
        return norm.item()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, path: Path, progress: dict[str, Any], beside: "OneProcess | None" = None) -> None:
        save_checkpoint(path, {**progress, **self._state(), "beside": beside and beside._state()})

    def load(self, path: Path, beside: "OneProcess | None" = None) -> dict[str, Any] | None:
        saved = load_checkpoint(path)
        if saved is not None:
            self._restore(saved)
            other = saved.pop("beside", None)
            if beside:
                beside._restore(other)
        return saved

    def _state(self) -> dict[str, Any]:
        trained = without_quantized(self.model, self.model.state_dict())
        return {"model": trained, "optimizer": self.optimizer.state_dict()}

    def _restore(self, state: dict[str, Any]) -> None:
        restore(self.model, state.pop("model"))
        self.optimizer.load_state_dict(state.pop("optimizer"))


def peak_gib(device: torch.device) -> float:
    """The most memory, in GiB, that this process has held so far: of a GPU if that is its device, else of the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
