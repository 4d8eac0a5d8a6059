"""A model spread over processes, through DeepSpeed."""

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.placement.limits import limits_of, sizes_of
from agentrl.training.backend import Result
from agentrl.training.batch import TrainingError
from agentrl.training.checkpoint import sync
from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig, parameter_groups
from agentrl.training.rendezvous import meet
from agentrl.training.resharded import load_resharded
from agentrl.training.sequence import SequenceGroup

LATEST = "latest"
"""The file of a folder of checkpoints that names the newest whole one."""

WRITERS = "ranks"
"""The file of a checkpoint that says how many ranks wrote it."""


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

    def state_dict(self, *given: Any, **named: Any) -> Any:
        """Without frozen parameters, which whoever goes on has from the start: adapters alone are written."""
        state = super().state_dict(*given, **named)
        for name in _frozen(self) & state.keys():
            del state[name]
        return state


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
        self._spread = spread
        groups = parameter_groups(model, config.weight_decay) if config else None
        self._engine: Any = _Work(model)  # without optimiser and shards, there is nothing to do for DeepSpeed
        if config or self.sharded:
            settings = spread.settings(config, limits_of(*sizes_of(model)))
            self._engine, *_ = deepspeed.initialize(model=self._engine, model_parameters=groups, config=settings)
        if spread.communication == "bfloat16":
            _keep_tables(model)
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

    @contextmanager
    def gathered(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        import deepspeed

        with _as_stored(parameters), deepspeed.zero.GatheredParameters(list(parameters)):
            yield

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
                backend._engine.save_checkpoint(str(path / tag), name, state, False, exclude_frozen_parameters=True)
        if self.rank == 0:
            (path / tag / WRITERS).write_text(str(self.world))
        for file in (path / tag).rglob("*"):
            if _writer(file) == self.rank:
                sync(file)
        dist.barrier()
        if self.rank == 0:
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
        try:
            writers = _writers(path / tag) if self._spread.zero else None
            progress = self._load(path / tag, "model", writers)
            if beside:
                beside._load(path / tag, "beside", writers)
        except (TrainingError, torch.OutOfMemoryError):
            raise
        except (OSError, RuntimeError, ValueError, LookupError, EOFError, UnpicklingError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise TrainingError(
                f"the checkpoint {path / tag} cannot be read ({reason}); remove {path} to train from the start"
            ) from error
        return progress

    def _load(self, folder: Path, name: str, writers: int | None) -> dict[str, Any]:
        if writers in (None, self.world):
            progress: dict[str, Any] = self._engine.load_checkpoint(str(folder), name, custom_load_fn=_restore)[1]
            return progress
        if "nvme" in (self._spread.offload_optimizer, self._spread.offload_parameters):
            raise TrainingError(
                f"the checkpoint {folder} was written by {writers} ranks with states on nvme, and {self.world} are to "
                "go on from it; run as many as before (deepspeed.processes, execution.gpus and execution.nodes), or "
                f"remove {folder.parent} to train from the start"
            )
        if self.rank == 0:
            note = f"{writers} ranks wrote the checkpoint {folder}, and {self.world} go on from it"
            warnings.warn(note, stacklevel=2)
        return load_resharded(self._engine, folder / name, writers, _restore)


@contextmanager
def _as_stored(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Within it, parameters are gathered as they are stored, in float32, whatever passes exchange."""
    noted = [(parameter, getattr(parameter, _DTYPE)) for parameter in parameters if hasattr(parameter, _DTYPE)]
    for parameter, _ in noted:
        delattr(parameter, _DTYPE)
    try:
        yield
    finally:
        for parameter, dtype in noted:
            setattr(parameter, _DTYPE, dtype)


def _keep_tables(model: torch.nn.Module) -> None:
    """Exchange in float32 what a linear layer shares with an embedding, whose values no product rounds."""
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear):
            for parameter in module.parameters(recurse=False):
                if hasattr(parameter, _DTYPE):
                    delattr(parameter, _DTYPE)


def _frozen(model: torch.nn.Module) -> set[str]:
    """All names of parameters that are not trained, also those that are tied to others."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _restore(src: dict[str, Any], dst: torch.nn.Module) -> None:
    """Load the state of a model without its frozen parameters. Raises TrainingError if any other is missing, or if the
    checkpoint has one that the model has not."""
    missing, unknown = dst.load_state_dict(src, strict=False)
    if odd := sorted({*missing} - _frozen(dst)) + sorted(unknown):
        raise TrainingError(
            f"the checkpoint is of another model: {len(odd)} parameters are in one of both alone, such as {odd[:3]}; "
            "remove its folder to train from the start"
        )


def _writer(file: Path) -> int:
    """The rank that writes a file of a checkpoint, by the names that DeepSpeed gives them; what has none is the first
    one's."""
    rank = re.search(r"zero_pp_rank_(\d+)_", file.name) or re.search(r"/offloaded_tensors/rank(\d+)", file.as_posix())
    return int(rank[1]) if rank else 0


def _writers(checkpoint: Path) -> int | None:
    """How many ranks wrote a checkpoint; None if a version wrote it that did not say so."""
    file = checkpoint / WRITERS
    return int(file.read_text()) if file.exists() else None


def _share_masters(optimizer: Any) -> None:
    """Let the weights that the optimiser of ZeRO 3 updates be those of the model. DeepSpeed means to share them if both
    are float32, but compares a device with its name, so that they never agree (0.19), and copies them: 4 bytes more to
    the 16 that a parameter needs."""
    both = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for weights, masters in both:
        if (weights.dtype, weights.device) == (masters.dtype, masters.device):
            masters.data = weights.data


_CPU = torch.device("cpu")

_DTYPE = "comm_dtype"
"""Where DeepSpeed (0.19, ``torch_autocast.py``) notes at a parameter in which dtype it is exchanged."""


def _latest(path: Path) -> str | None:
    file = path / LATEST
    return file.read_text() if file.exists() else None
