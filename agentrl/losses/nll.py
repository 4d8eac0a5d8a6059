"""Negative log-likelihood, for supervised fine-tuning."""

from torch import Tensor


def nll_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Weighted negative log-likelihood of each token: ``-w log p``. All [rows, tokens]; zero weight trains nothing."""
    return -weights * logprobs
