"""Supervised fine-tuning."""

from typing import TYPE_CHECKING, Literal

from agentrl.algorithms.base import AtRest, Sums

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class SFT(AtRest):
    """Weighted mean over tokens of the negative log-likelihood. A negative weight makes a token less likely (a negative
    example); in the mean it counts with its absolute value."""

    type: Literal["sft"] = "sft"

    def count(self, batch: "Batch") -> float:
        return (batch.weights.abs() * batch.mask).sum().item()

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        return nll_loss(logprobs, batch.weights * batch.mask).sum(), {}


def nll_loss(logprobs: "Tensor", weights: "Tensor") -> "Tensor":
    """Weighted negative log-likelihood of each token: ``-w log p``. All [rows, tokens]; zero weight trains nothing."""
    return -weights * logprobs
