"""A reward model: the backbone of a policy with a linear head, whose sigmoid at a token says how likely what has
happened up to that token ends in success."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from agentrl.algorithms.base import AtRest, Sums
from agentrl.models.policy import Policy, Precision
from agentrl.schemas.permissions import readable
from agentrl.training.backend import OneProcess
from agentrl.training.probe import packs, plain_pass
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import Passes, alone

if TYPE_CHECKING:
    from agentrl.training.batch import Batch

HEAD, ABOUT = "reward_head.safetensors", "reward_model.json"
"""Files in the folder of a reward model, beside those of its backbone."""


class RewardCard(BaseModel):
    """What a reward model is. ``base`` is the policy that it began as, and ``base_digest`` that of its folder;
    ``prover`` is the policy whose values it learned, and empty for outcomes. ``error`` is what 95 % of the errors on
    held-out tasks are below; None if nothing was held out. ``gamma`` is the discount of an inverse one."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["orm", "prm", "inverse"]
    base: str
    base_digest: str
    tokenizer: str
    prover: str = ""
    precision: Precision = "float32"
    error: float | None = None
    gamma: float | None = None


class RewardNet:
    """``policy``, whose model is the backbone, with a ``head``. The output matrix of the model is not used."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.head = torch.nn.Linear(policy.model.config.get_text_config().hidden_size, 1, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.head.to(policy.model.device)

    @classmethod
    def load(cls, path: Path, name: str) -> "tuple[RewardNet, RewardCard]":
        """The reward model of a folder that :meth:`save` filled, and what it is."""
        from safetensors.torch import load_file

        about = RewardCard.model_validate_json((path / ABOUT).read_text())
        net = cls(Policy.load(path, name).prepare(about.precision))
        net.head.load_state_dict(load_file(path / HEAD))
        return net, about

    def save(self, path: Path, about: RewardCard) -> None:
        """Write backbone, tokenizer, head and ``about`` into ``path``."""
        from safetensors.torch import save_file

        self.policy.save(path)
        save_file({name: value.detach().cpu() for name, value in self.head.state_dict().items()}, path / HEAD)
        (path / ABOUT).write_text(about.model_dump_json(indent=2))
        readable(path)

    def logits(self, batch: "Batch") -> Tensor:
        """What the head gives after each token whose mask is true, [rows, tokens] in float32; 0 elsewhere."""
        backbone = self.policy.model.base_model
        rows, places = batch.mask.nonzero(as_tuple=True)
        with self.policy.autocast():
            if batch.packing is None:
                hidden = backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state[rows, places]
            else:
                hidden = batch.packing.hidden(backbone).index_select(0, batch.packing.places[rows, places])
        values = self.head(hidden.float())[:, 0]
        return torch.zeros(batch.input_ids.shape, device=values.device).index_put((rows, places), values)

    def scores(self, rows: TrainingRows, micro_tokens: int, gamma: float | None = None) -> list[np.ndarray]:
        """The probability of success after each token whose mask is true, [such tokens], of each row, in order. It does
        not depend on which rows share a batch, but for rounding. With ``gamma`` it is that of :class:`Inverse`, that
        what happened up to that token since the one before is a demonstrator's."""
        model = self.policy.model.eval()
        backend = OneProcess(model)
        passes = Passes(backend, model, micro_tokens, packs(model, backend, plain_pass(self.policy, backend)))
        by_token = passes.by_row(rows, alone(rows), self.logits)
        offsets, mask = rows.lists("mask")
        masks = np.split(mask, offsets[1:-1])
        by_row = [torch.from_numpy(values[own]) for values, own in zip(by_token, masks, strict=True)]
        if gamma is not None:
            by_row = [values - gamma * torch.cat([values[1:], values.new_zeros(1)]) for values in by_row]
        return [values.sigmoid().numpy() for values in by_row]


class SoftLabels(AtRest):
    """Cross-entropy of the sigmoid of a logit with a label q in [0, 1]: ``-[q log s + (1 - q) log (1 - s)]``, the mean
    over labelled tokens by their ``weights`` (Math-Shepherd: Wang et al. 2023, with the hard or soft labels of its
    equations 3 and 4; AgentPRM: Choudhury 2025). The ``logprobs`` of a batch are the labels, and what the training
    step calls log-probs are logits."""

    type: Literal["soft_labels"] = "soft_labels"

    def count(self, batch: "Batch") -> float:
        return (batch.weights * batch.mask).sum().item()

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: "Batch", baseline: float = 0.0) -> tuple[Tensor, Sums]:
        losses = binary_cross_entropy_with_logits(logprobs, batch.logprobs, reduction="none")
        return (losses * batch.weights * batch.mask).sum(), {}


class Inverse(SoftLabels):
    """InversePRM (Choudhury 2025, arXiv 2502.10325, section 3): a value Q whose differences tell the turns of a
    demonstrator, labelled 1, from a learner's, labelled 0: the cross-entropy of ``sigmoid(Q_t - gamma Q_t+1)``, where Q
    is 0 after the last turn. Q stands at the tokens whose mask is true."""

    type: Literal["inverse"] = "inverse"  # type: ignore[assignment]
    gamma: float = 1.0

    def loss(self, logprobs: Tensor, entropies: Tensor, batch: "Batch", baseline: float = 0.0) -> tuple[Tensor, Sums]:
        rows, places = batch.mask.nonzero(as_tuple=True)
        values = logprobs[rows, places]
        following = torch.cat([values[1:], values.new_zeros(1)])
        goes_on = torch.cat([rows[1:] == rows[:-1], rows.new_zeros(1, dtype=torch.bool)])
        rewards = values - self.gamma * following.where(goes_on, 0.0)
        losses = binary_cross_entropy_with_logits(rewards, batch.logprobs[rows, places], reduction="none")
        return (losses * batch.weights[rows, places]).sum(), {}
