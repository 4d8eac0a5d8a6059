"""Training in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.models.policy import Policy
from agentrl.training.batch import Batch
from agentrl.training.checkpoint import load_checkpoint, save_checkpoint
from agentrl.training.logprobs import token_logprobs
from agentrl.training.optimizer import OptimizerConfig, parameter_groups


class OneProcess:
    """All micro batches in this process, with torch's AdamW; see :class:`agentrl.training.step.Backend`."""

    rank, world = 0, 1
    keeps_weights = True

    def __init__(self, policy: Policy, config: OptimizerConfig) -> None:
        self.policy = policy
        self.model: torch.nn.Module = policy.model
        self.device = policy.model.device
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        groups = parameter_groups(policy.model, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)

    def forward(self, batch: Batch, config: OptimizerConfig) -> tuple[Tensor, Tensor]:
        with self.policy.autocast():
            return token_logprobs(
                self.policy.model, batch.input_ids, batch.mask, batch.packing, bool(self.policy.plain)
            )

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

    def save(self, path: Path, progress: dict[str, Any]) -> None:
        weights = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        save_checkpoint(path, {**progress, **weights})

    def load(self, path: Path) -> dict[str, Any] | None:
        saved = load_checkpoint(path)
        if saved is not None:
            self.model.load_state_dict(saved.pop("model"))
            self.optimizer.load_state_dict(saved.pop("optimizer"))
        return saved
