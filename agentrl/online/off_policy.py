"""Off-policy corrections: importance weights of rollouts that an older policy, or another engine, sampled.

Log-ratios are ``log p - log b`` of each token, 0 outside the mask; ``b`` is the behaviour policy.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.training.rows import TrainingRows


def truncated_token_weights(log_ratio: Tensor, bound: float) -> Tensor:
    """``min(p/b, bound)`` of each token, [rows, tokens] (TIS: Yao et al. 2025; Ionides 2008)."""
    return log_ratio.exp().clamp(max=bound)


def truncated_sequence_weights(log_ratio: Tensor, mask: Tensor, bound: float) -> Tensor:
    """``min(product of p/b over a row's action tokens, bound)``, [rows, 1]: unbiased for whole rows, except
    for the bound."""
    return (log_ratio * mask).sum(-1, keepdim=True).exp().clamp(max=bound)


def band_mask(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """Whether the ratio of each token is within ``[low, high]``, [rows, tokens]; others are not trained on (IcePop,
    Ling team 2025)."""
    ratio = log_ratio.exp()
    return (ratio >= low) & (ratio <= high)


def effective_sample_size(weights: Sequence[float]) -> float:
    """Kish's ``(sum w)^2 / sum w^2`` as a share of the rows, in (0, 1]: 1 if all weights are equal."""
    w = np.asarray(weights, dtype=np.float64)
    w = w / w.max()
    return float(w.sum() ** 2 / (w**2).sum() / len(w))


def divergence(sampled: Sequence[TrainingRows], trained: Sequence[TrainingRows]) -> float:
    """The k3 estimate of the divergence between the policy that is trained and the one that sampled, from log-probs of
    the same rows by both, as a mean over action tokens. They differ by rounding, or because the weights differ."""
    total, tokens = 0.0, 0
    for one, other in zip(sampled, trained, strict=True):
        mask = one.lists("mask")[1].astype(bool)
        ratio = other.lists("logprobs")[1][mask].astype(np.float64) - one.lists("logprobs")[1][mask]
        total += float((np.expm1(ratio) - ratio).sum())
        tokens += int(mask.sum())
    return total / max(1, tokens)


def as_tensors(
    masks: Sequence[Sequence[bool]], behaviour: Sequence[Sequence[float]], proximal: Sequence[Sequence[float]]
) -> tuple[Tensor, Tensor]:
    """Padded log-ratios of proximal to behaviour policy, 0 outside the mask, and the mask, both [rows, tokens]."""
    width = max(len(mask) for mask in masks)
    ratios = torch.zeros(len(masks), width)
    padded = torch.zeros(len(masks), width, dtype=torch.bool)
    for row, (mask, old, new) in enumerate(zip(masks, behaviour, proximal, strict=True)):
        padded[row, : len(mask)] = torch.tensor(mask)
        ratios[row, : len(mask)] = torch.tensor(new) - torch.tensor(old)
    return ratios.masked_fill(~padded, 0.0), padded
