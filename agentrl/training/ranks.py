"""Training spread over processes, through DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.models.policy import Policy
from agentrl.training.batch import Batch
from agentrl.training.job import TrainingJob
from agentrl.training.logprobs import token_logprobs
from agentrl.training.lora import merge_lora
from agentrl.training.optimizer import OptimizerConfig, parameter_groups


class _Logprobs(torch.nn.Module):
    """The model as DeepSpeed wraps it: its forward pass is :func:`agentrl.training.logprobs.token_logprobs`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model: Any = policy.model
        self.policy = policy

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self.policy.autocast():
            return token_logprobs(self.model, batch.input_ids, batch.mask, batch.packing, bool(self.policy.plain))


class DeepSpeedRanks:
    """This process's share of the micro batches, in a DeepSpeed engine; see
    :class:`agentrl.training.step.Backend`. DeepSpeed clips the gradients. Weights are float32 and products are in the
    policy's precision, as in one process. DeepSpeed's own bf16 would cast the whole model, unlike the reference."""

    keeps_weights = False

    def __init__(self, policy: Policy, job: TrainingJob) -> None:
        import deepspeed

        # no operator is built for reductions in shared memory: they serve inference alone, and building takes a minute
        deepspeed.ops.__compatible_ops__ = {}
        self.policy = policy
        trained = parameter_groups(policy.model, job.optimizer.weight_decay)
        self.model, *_ = deepspeed.initialize(
            model=_Logprobs(policy), model_parameters=trained, config=job.deepspeed_config()
        )
        self.device: torch.device = self.model.device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def forward(self, batch: Batch, config: OptimizerConfig) -> tuple[Tensor, Tensor]:
        return self.model(batch)

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        self.model.backward(loss * self.world)  # DeepSpeed averages gradients over ranks; the sum is wanted
        if not last:
            self.model.step()  # counts the micro batch without an update

    def total(self, metrics: dict[str, float]) -> dict[str, float]:
        names = sorted(metrics)
        values = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def update(self, lr: float, config: OptimizerConfig) -> float:
        for group in self.model.optimizer.param_groups:
            group["lr"] = lr
        self.model.step()
        return float(self.model.get_global_grad_norm() or 0.0)

    def discard(self) -> None:
        self.model.zero_grad()

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        self.model.save_checkpoint(str(path), client_state=progress)

    def load(self, path: Path) -> dict[str, Any] | None:
        if not (path / "latest").exists():
            return None
        return self.model.load_checkpoint(str(path))[1]

    def export(self, path: Path) -> None:
        """Gather sharded weights, merge adapters into them, and write a plain model folder. No training may follow."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.policy.model.parameters()), modifier_rank=0):
            if self.rank == 0:
                merge_lora(self.policy)
                self.policy.save(path)
        dist.barrier()
