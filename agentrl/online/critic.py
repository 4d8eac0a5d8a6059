"""A value head, which estimates the return from a state, for PPO with a critic."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.ppo import Critic
from agentrl.losses.value import value_loss
from agentrl.models.policy import Policy
from agentrl.training.batch import collate, micro_batches
from agentrl.training.packing import can_pack, packed
from agentrl.training.rows import TrainingRows


class ValueHead(torch.nn.Module):
    """A copy of the policy's backbone with one linear output, so that values and policy share no weights."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.backbone: Any = copy.deepcopy(policy.model.base_model)
        self.head = torch.nn.Linear(policy.model.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.to(policy.model.device)

    def forward(self, batch: Any) -> Tensor:
        """Value [rows, tokens] of the state in which each token is chosen, which is the tokens before it."""
        packing = batch.packing
        if packing is None:
            hidden = self.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        else:
            flat = self.backbone(
                input_ids=packing.input_ids, position_ids=packing.positions, packing=packing, use_cache=False
            ).last_hidden_state[0]
            hidden = flat[packing.places]
        values = self.head(hidden.float())[..., 0]
        return torch.nn.functional.pad(values[:, :-1], (1, 0))


class CriticTrainer:
    """Fits a value head to returns."""

    def __init__(self, policy: Policy, config: Critic, micro_tokens: int) -> None:
        self.config = config
        self.micro_tokens = micro_tokens
        self.net = ValueHead(policy)
        self.packs = can_pack(self.net.backbone)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=config.lr, weight_decay=0.0)

    @torch.no_grad()
    def values(self, rows: TrainingRows) -> list[list[float]]:
        """Value of the state before each token, [tokens], of each row, in order."""
        lengths = np.diff(rows.lists("input_ids")[0])
        found: dict[int, list[float]] = {}
        with packed(self.net.backbone, self.packs):
            for part in micro_batches(rows, _alone(rows), self.micro_tokens):
                values = self.net(collate(rows.take(part), self.packs).to(self.net.head.weight.device)).cpu()
                for row, one in zip(part, values.tolist(), strict=True):
                    found[row] = one[: lengths[row]]
        return [found[row] for row in range(len(rows))]

    def step(self, rows: TrainingRows) -> dict[str, float]:
        """``epochs`` steps towards each row's ``weights``, its value targets; ``logprobs`` hold the old values.

        Returns the mean loss and the share of the targets' variance that the old values explain.
        """
        n_tokens = int(rows.lists("mask")[1].sum())
        total = 0.0
        with packed(self.net.backbone, self.packs):
            for _ in range(self.config.epochs):
                total = 0.0
                for part in micro_batches(rows, _alone(rows), self.micro_tokens):
                    batch = collate(rows.take(part), self.packs).to(self.net.head.weight.device)
                    losses = value_loss(self.net(batch), batch.logprobs, batch.weights, self.config.clip)
                    loss = (losses * batch.mask).sum() / n_tokens
                    loss.backward()
                    total += loss.item()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return {"value_loss": total, "explained_variance": _explained(rows)}

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def _alone(rows: TrainingRows) -> list[list[int]]:
    return [[row] for row in range(len(rows))]


def _explained(rows: TrainingRows) -> float:
    mask = rows.lists("mask")[1]
    pairs = np.stack([rows.lists(name)[1][mask] for name in ("weights", "logprobs")], -1)
    target, old = torch.from_numpy(pairs).unbind(-1)
    variance = target.var(correction=0).item()
    return 1 - (target - old).var(correction=0).item() / variance if variance > 0 else 0.0
