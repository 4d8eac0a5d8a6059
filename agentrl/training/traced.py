"""A training step over tensors that have shapes and no values: what one process would hold, and what ranks would
exchange, of models that no machine here could hold. ``python -m agentrl.training.traced`` reads a
list of :class:`TracedJob` as JSON and prints a list of :class:`Trace`, each made in a process of its own.

The step's own code runs (:class:`agentrl.training.step.Trainer`, on the backend that trains), on PyTorch's fake tensors
and, for ranks, a process group that exchanges nothing. What needs values gets constants: numbers are 1, decisions are
no, norms are finite. So neither the probe of a model's passes nor a route that depends on values is run. What
it does not show: buffers of NCCL, what an allocator cannot use, and the workspace of CUDA's kernels.
"""

import contextlib
import hashlib
import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from pydantic import BaseModel, TypeAdapter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from agentrl.training.job import DeepSpeed
from agentrl.training.optimizer import OptimizerConfig

STEPS = 3
"""Moments are there from the second on, and DeepSpeed fetches ahead from the third equal pass on."""


class TracedJob(BaseModel):
    """``config`` is that of a model of transformers, of which ``layers`` are traced. ``rows`` are the lengths of the
    rows of a step: those that this process computes if they are its ``own``, else those of all ranks together.
    ``world`` is 0 for one process without DeepSpeed."""

    config: dict[str, Any]
    layers: int
    optimizer: OptimizerConfig
    rows: list[int]
    own: bool = True
    deepspeed: DeepSpeed | None = None
    rank: int = 0
    world: int = 0


class Trace(BaseModel):
    """Of the last step. ``peaks`` are bytes of live tensors, by phase; ``moved`` has for each kind of collective how
    often it is called and the bytes of its largest operand, summed; ``order`` is a hash of all collectives in order
    with their shapes, which must be equal on all ranks. ``ahead`` is how often DeepSpeed begins to gather weights
    before they are needed, in forward and in backward passes."""

    peaks: dict[str, int]
    moved: dict[str, tuple[int, int]]
    order: str
    ahead: dict[str, int]


class Storages:
    """Counts the bytes of storages until they are gone; ``peaks`` has the most that was held in each phase."""

    def __init__(self) -> None:
        self.held = 0
        self.phase = "loading"
        self.peaks: dict[str, int] = {}
        self._known: set[int] = set()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.held)

    def hold(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":  # has no bytes anywhere
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.held += size
        weakref.finalize(storage, self._free, key, size)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.held)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


class Shapes(FakeTensorMode):
    """Tensors without values; counts their ``storages``, and what is exchanged. Operations on real tensors alone, such
    as masks, are carried out."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.storages = Storages()
        self.begin()

    def begin(self) -> None:
        """Forget what was seen; what is held is still there."""
        self.storages.peaks = {}
        self.moved: dict[str, tuple[int, int]] = {}
        self.order = hashlib.blake2b(digest_size=8)
        self.ahead = {"forward": 0, "backward": 0}

    def count_ahead(self, event: str) -> None:
        """Count an event of DeepSpeed's if it begins to gather ahead."""
        direction, _, kind = event.partition("_")
        if kind == "prefetch_submit":
            self.ahead[direction] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._C._distributed_c10d import FakeWork

        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if func is torch.ops.aten._local_scalar_dense.default and fake:
            return {torch.bool: False}.get(fake[0].dtype, 1.0 if fake[0].is_floating_point() else 1)
        if func.namespace in ("c10d", "deepspeed"):  # DeepSpeed's is the exchange of sequence parallelism
            self._exchange(func, tensors)
        if func.namespace == "c10d":
            done = FakeWork().boxed()
            return (args[0], done) if len(func._schema.returns) == 2 else done
        if tensors and not fake:
            return func(*args, **kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self.storages.hold(leaf)
        return result

    def _exchange(self, func: Any, tensors: list[torch.Tensor]) -> None:
        name = func._schema.name.partition("::")[2].strip("_")
        calls, size = self.moved.get(name, (0, 0))
        self.moved[name] = calls + 1, size + max((tensor.nbytes for tensor in tensors), default=0)
        shapes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
        self.order.update(f"{name} {shapes}\n".encode())


def trace(job: TracedJob) -> Trace:
    """What the rank of a job holds and exchanges. A process can trace one job, since it joins ranks that are not there.

    Raises ValueError if the model's code asks for values that a trace does not have.
    """
    if job.deepspeed:
        _join(job)
    shapes = Shapes()
    with _without_values(job, shapes):
        try:
            _steps(job, shapes)
        except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
            raise ValueError(f"{job.config.get('model_type')} cannot be traced: {error}") from error
    return Trace(peaks=shapes.storages.peaks, moved=shapes.moved, order=shapes.order.hexdigest(), ahead=shapes.ahead)


def _steps(job: TracedJob, shapes: Shapes) -> None:
    from agentrl.algorithms.sft import SFT
    from agentrl.models.policy import Policy
    from agentrl.training.step import Trainer

    rows = _rows(job)
    with shapes:
        policy = Policy(_model(job), None, "traced", plain=False)  # type: ignore[arg-type]
        trainer = Trainer(policy, SFT(), job.optimizer, STEPS, _backend(job))
        if job.own:
            trainer.backend.share, trainer.backend.shares = 0, 1
        _name_phases(trainer.backend, shapes.storages)
        for _ in range(STEPS):
            shapes.begin()
            trainer.step(rows)


def _rows(job: TracedJob) -> Any:
    """Rows that begin differently, so that no two share a token."""
    from agentrl.schemas.training import TrainingRow
    from agentrl.training.rows import TrainingRows

    rows = [
        TrainingRow(
            row_id=str(number),
            unit=number,
            label=1,
            input_ids=[number] + [0] * (length - 1),
            mask=[False] + [True] * (length - 1),
            weights=[1.0] * length,
        )
        for number, length in enumerate(job.rows)
    ]
    return TrainingRows.of(rows)


def _model(job: TracedJob) -> Any:
    """The model of the config, with fewer layers and weights that were never made."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**job.config)
    text = config.get_text_config()
    text.num_hidden_layers = job.layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: job.layers]
    with ExitStack() as stack:
        if job.deepspeed and job.deepspeed.zero == 3:
            import deepspeed

            settings = job.deepspeed.settings(job.optimizer)
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=settings))
        stack.enter_context(no_init_weights())
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model.eval()


def _backend(job: TracedJob) -> Any:
    from agentrl.training.backend import OneProcess
    from agentrl.training.ranks import DeepSpeedRanks

    spread = job.deepspeed
    if spread is None:
        return OneProcess
    return lambda model, config: DeepSpeedRanks(model, config, spread)


def _join(job: TracedJob) -> None:
    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": str(job.rank), "WORLD_SIZE": str(job.world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    deepspeed.ops.__compatible_ops__ = {}
    dist.init_process_group("fake", rank=job.rank, world_size=job.world, store=FakeStore())
    deepspeed.init_distributed(dist_backend="fake")


def _name_phases(backend: Any, storages: Storages) -> None:
    """Have a backend's calls name the phase that they begin."""

    def named(phase: str, call: Any) -> Any:
        def begin(*args: Any, **given: Any) -> Any:
            storages.enter(phase)
            return call(*args, **given)

        return begin

    for name, phase in {"run": "forward", "backward": "backward", "update": "optimizer"}.items():
        setattr(backend, name, named(phase, getattr(backend, name)))


@contextmanager
def _without_values(job: TracedJob, shapes: Shapes) -> Iterator[None]:
    """What asks for values of other ranks, moves tensors that are not there or decides by numbers does nothing,
    attention is that of a GPU, and ``shapes`` hears of what DeepSpeed gathers ahead."""
    from transformers.integrations import moe

    from agentrl.models import policy
    from agentrl.training import packing, step

    collate = step.collate

    def collate_values(*args: Any, **given: Any) -> Any:
        with unset_fake_temporarily():
            return collate(*args, **given)

    def finite(norm: torch.Tensor) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.tensor(True)

    def on_gpu(query: torch.Tensor) -> bool:
        return query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")

    with ExitStack() as stack:
        stack.enter_context(patch.object(step, "collate", collate_values))
        stack.enter_context(patch.object(policy, "processor_has_bfloat16", lambda: True))
        stack.enter_context(patch.object(packing, "_keeps_scores_of_groups", on_gpu))
        stack.enter_context(patch.object(torch.Tensor, "isfinite", finite))
        # what grouped products give has a shape in bfloat16 alone; their other way has one in all types
        stack.enter_context(patch.object(moe, "_can_use_grouped_mm", lambda *given: False))
        for name in ("to", "float"):
            stack.enter_context(patch.object(torch.nn.Module, name, lambda module, *args, **given: module))
        if job.deepspeed:
            from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
            from deepspeed.runtime.zero.partitioned_param_profiler import PartitionedParameterProfiler

            events = patch.object(PartitionedParameterProfiler, "start_event", lambda _, name: shapes.count_ahead(name))
            stack.enter_context(events)
            for module in (partitioned_param_coordinator, parameter_offload):
                if hasattr(module, "assert_ints_same_as_other_ranks"):
                    stack.enter_context(patch.object(module, "assert_ints_same_as_other_ranks", lambda ints: None))
        yield


def _warm(job: TracedJob) -> None:
    """Import once what each trace needs: most of its time otherwise."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import agentrl.training.step  # noqa: F401

    if job.deepspeed:
        import deepspeed  # noqa: F401
    config = AutoConfig.for_model(**job.config)
    config.get_text_config().num_hidden_layers = 1
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(config)


def main() -> None:
    jobs = TypeAdapter(list[TracedJob]).validate_json(sys.stdin.read())
    with contextlib.redirect_stdout(sys.stderr):  # libraries write to it
        os.environ["DS_ACCELERATOR"] = "cpu"
        _warm(jobs[0])
        with get_context("fork").Pool(len(jobs), maxtasksperchild=1) as pool:
            traces = pool.map(trace, jobs, chunksize=1)
    print(json.dumps([traced.model_dump() for traced in traces]))


if __name__ == "__main__":
    main()
