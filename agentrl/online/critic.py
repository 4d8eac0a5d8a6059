"""A value head, which estimates the return from a state, for PPO with a critic."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.ppo import Critic
from agentrl.models.policy import Policy
from agentrl.training.backend import Backend, OneProcess
from agentrl.training.batch import collate, micro_batches
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.packing import packed
from agentrl.training.probe import packs
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import Passes, alone


class ValueHead(torch.nn.Module):
    """The backbone of a copy of the policy with one linear output, so that values and policy share no weights."""

    def __init__(self, copy: Policy) -> None:
        super().__init__()
        self.backbone: Any = copy.model.base_model
        self.config = copy.model.config
        self.head = torch.nn.Linear(copy.model.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.to(copy.model.device)

    def forward(self, batch: Any) -> Tensor:
        """Value [rows, tokens] of the state in which each token is chosen, which is the tokens before it."""
        packing = batch.packing
        if packing is None:
            hidden = self.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
            values = self.head(hidden.float())[..., 0]
        else:
            nodes = self.head(packing.hidden(self.backbone).float())[..., 0]
            if group := packing.sequence:
                own, number = group.own(packing), packing.input_ids.shape[1]
                nodes = group.summed(torch.nn.functional.pad(nodes, (own.start, number - own.stop)))
            values = nodes[packing.places]
        return torch.nn.functional.pad(values[:, :-1], (1, 0))


class CriticTrainer:
    """Fits a value head on a ``copy`` of the policy to returns."""

    def __init__(
        self,
        copy: Policy,
        config: Critic,
        optimizer: OptimizerConfig,
        backend: Callable[[torch.nn.Module, OptimizerConfig], Backend] = OneProcess,
    ) -> None:
        self.config = config
        self.optimizer = OptimizerConfig(lr=config.lr, micro_tokens=optimizer.micro_tokens)
        self.net = ValueHead(copy)
        self.backend = backend(self.net, self.optimizer)
        self.packs = packs(self.net.backbone, self.backend)

    def values(self, rows: TrainingRows) -> list[np.ndarray]:
        """Value of the state before each token, [tokens], of each row, in order."""
        passes = Passes(self.backend, self.net.backbone, self.optimizer.micro_tokens, self.packs)
        return passes.by_row(rows, alone(rows), self.net)

    def step(self, rows: TrainingRows) -> dict[str, float]:
        """``epochs`` steps towards each row's ``weights``, its value targets; ``logprobs`` hold the old values.

        Returns the mean loss and the share of the targets' variance that the old values explain.
        """
        n_tokens = int(rows.lists("mask")[1].sum())
        parts = list(micro_batches(rows, alone(rows), self.optimizer.micro_tokens))
        shares = self.backend.shares
        rounds = math.ceil(len(parts) / shares)
        total = 0.0
        with packed(self.net.backbone, self.packs):
            for _ in range(self.config.epochs):
                total = 0.0
                for number in range(rounds):
                    index = number * shares + self.backend.share
                    counts = index < len(parts)  # otherwise this rank only takes part
                    part = parts[index] if counts else parts[0][:1]
                    batch = collate(rows.take(part), self.packs, self.backend.sequence).to(self.backend.device)
                    values = self.backend.run(partial(self.net, batch))
                    losses = value_loss(values, batch.logprobs, batch.weights, self.config.clip)
                    loss = (losses * batch.mask).sum() / n_tokens * counts
                    self.backend.backward(loss, last=number == rounds - 1)
                    total += loss.item()
                self.backend.update(self.config.lr, self.optimizer)
        return {**self.backend.total({"value_loss": total}), "explained_variance": _explained(rows)}


def _explained(rows: TrainingRows) -> float:
    mask = rows.lists("mask")[1]
    pairs = np.stack([rows.lists(name)[1][mask] for name in ("weights", "logprobs")], -1)
    target, old = torch.from_numpy(pairs).unbind(-1)
    variance = target.var(correction=0).item()
    return 1 - (target - old).var(correction=0).item() / variance if variance > 0 else 0.0


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Loss of each token, [rows, tokens]: ``(V - R)^2 / 2``; with ``clip``, the larger of that and the loss of ``V``
    moved to within ``clip`` of the old value (the PPO of Schulman et al. 2017 as published in its code)."""
    loss = (values - returns) ** 2
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return loss / 2
