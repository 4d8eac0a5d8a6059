"""One optimiser step over training rows, by any algorithm."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from agentrl.algorithms.base import Objective
from agentrl.models.policy import Policy
from agentrl.training.batch import Batch, TrainingError, collate, micro_batches, units
from agentrl.training.logprobs import token_logprobs
from agentrl.training.lora import add_lora
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.packing import can_pack, packed
from schemas.training import TrainingRow

Metrics = dict[str, float]


class Trainer:
    """Updates ``policy`` in place to minimise ``objective`` over ``total`` optimiser steps."""

    def __init__(self, policy: Policy, objective: Objective, config: OptimizerConfig, total: int) -> None:
        self.policy = policy
        self.objective = objective
        self.config = config
        self.total = total
        self.done = 0
        if config.lora:
            add_lora(policy, config.lora)
        if config.gradient_checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.packs = can_pack(policy.model)
        self.parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def step(self, rows: Sequence[TrainingRow], lr_scale: float = 1.0) -> Metrics:
        """One optimiser step over all ``rows``; gradients accumulate over micro batches without changing the result.

        Raises TrainingError, with the policy unchanged, where nothing can be trained on or the loss is not finite.
        """
        norm, totals = self.gradients(rows)
        if not math.isfinite(totals["loss"]) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.done}: loss {totals['loss']}, gradient norm {norm}; lower lr, or look for broken rows "
                f"among {[row.row_id for row in rows][:5]}",
                rows,
            )
        lr = self.config.lr_at(self.done, self.total) * lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return {**totals, "grad_norm": norm, "lr": lr}

    def gradients(self, rows: Sequence[TrainingRow]) -> tuple[float, Metrics]:
        """Gradients of one step over ``rows``, clipped, left on the parameters; their norm before, and metrics.

        Raises TrainingError where nothing can be trained on.
        """
        model = self.policy.model.train()
        parts = micro_batches(units(rows), self.config.micro_tokens)
        batches = [collate(part, self.packs).to(model.device) for part in parts]
        count = sum(self.objective.count(batch) for batch in batches)
        n_tokens = sum(int(batch.mask.sum()) for batch in batches)
        if count <= 0 or n_tokens == 0:
            raise TrainingError(f"no token to train on in rows {[row.row_id for row in rows][:5]}; check their masks")
        totals: Metrics = {"loss": 0.0, "entropy": 0.0}
        with packed(model, self.packs):
            baseline = self._baseline(batches) if self.objective.needs_baseline else 0.0
            for batch in batches:
                with self._autocast():
                    logprobs, entropy = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)
                total, sums = self.objective.loss(logprobs, entropy, batch, baseline)
                (total / count).backward()
                for name, value in {"loss": total.item(), **sums}.items():
                    totals[name] = totals.get(name, 0.0) + value / count
                totals["entropy"] += entropy.detach().sum().item() / n_tokens
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm).item()
        return norm, {**totals, "tokens": float(n_tokens)}

    def _autocast(self) -> AbstractContextManager[Any]:
        bfloat16 = self.config.precision == "bfloat16"
        return torch.autocast(self.policy.model.device.type, torch.bfloat16, enabled=bfloat16)

    @torch.no_grad()
    def _baseline(self, batches: Sequence[Batch]) -> float:
        """Mean over the rows of the step of the log-ratio of policy to reference."""
        total, rows = 0.0, 0
        for batch in batches:
            with self._autocast():
                logprobs, _ = token_logprobs(self.policy.model, batch.input_ids, batch.mask, batch.packing)
            total += ((logprobs - batch.ref_logprobs) * batch.mask).sum().item()
            rows += len(batch.label)
        return total / rows

    def state(self) -> dict[str, Any]:
        """Everything that :meth:`restore` needs to go on as if nothing had happened."""
        return {"done": self.done, "model": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
