"""Off-policy corrections: importance weights of rollouts that an older policy, or another engine, sampled.

Log-ratios are ``log p - log b`` of each token, 0 outside the mask; ``b`` is the behaviour policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from agentrl.training.rows import TrainingRows

if TYPE_CHECKING:
    from agentrl.algorithms.policy_gradient import ByToken, OffPolicy
    from agentrl.schemas.trajectory import Trajectory


def truncated_token_weights(log_ratio: Tensor, bound: float) -> Tensor:
    """``min(p/b, bound)`` of each token, [rows, tokens] (TIS: Yao et al. 2025; Ionides 2008)."""
    return log_ratio.exp().clamp(max=bound)


def truncated_sequence_weights(log_ratio: Tensor, mask: Tensor, bound: float) -> Tensor:
    """``min(product of p/b over a row's action tokens, bound)``, [rows, 1]: unbiased for whole rows, except
    for the bound."""
    return (log_ratio * mask).sum(-1, keepdim=True).exp().clamp(max=bound)


def truncated_prefix_weights(log_ratio: Tensor, mask: Tensor, bound: float) -> Tensor:
    """``min(product of p/b over the row's action tokens up to this one, bound)``, [rows, tokens]: how much likelier the
    policy is than the one that sampled to come to this token and to take it (per-decision importance sampling: Precup
    et al. 2000, section 3). Without the bound the policy gradient is exact if a token's advantage is the policy's own,
    as a critic's; the variance grows with the length."""
    return (log_ratio * mask).cumsum(-1).exp().clamp(max=bound)


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


def importance_weights(config: "OffPolicy", log_ratio: Tensor, mask: Tensor) -> Tensor:
    """What each token's advantage is multiplied by, [rows, tokens]: the importance weight of decoupled PPO (Hilton et
    al. 2022). ``p_proximal / p_behaviour`` is a constant of the update, and the clipped ratio is that to the proximal
    policy."""
    if config.vtrace:
        importance = torch.ones_like(log_ratio)  # it is in the advantages
    elif config.truncate_sequence is not None:
        importance = truncated_sequence_weights(log_ratio, mask, config.truncate_sequence).expand_as(log_ratio)
    elif config.truncate_prefix is not None:
        importance = truncated_prefix_weights(log_ratio, mask, config.truncate_prefix)
    elif config.truncate is not None:
        importance = truncated_token_weights(log_ratio, config.truncate)
    else:
        importance = log_ratio.exp()
    return importance * band_mask(log_ratio, *config.band) if config.band else importance


@dataclass(frozen=True)
class RatioSums:
    """Sums over the action tokens of each row, each [rows]: of log-ratios, of importance weights, of tokens that weigh
    nothing, and of tokens."""

    log_ratio: np.ndarray
    importance: np.ndarray
    masked: np.ndarray
    tokens: np.ndarray

    @classmethod
    def concat(cls, parts: "Sequence[RatioSums]") -> "RatioSums":
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))


def ratio_sums(log_ratio: Tensor, mask: Tensor, importance: Tensor) -> RatioSums:
    """See :class:`RatioSums`; all [rows, tokens]."""
    inside = (log_ratio * mask, importance * mask, (importance == 0) & mask, mask)
    return RatioSums(*(values.sum(-1).numpy() for values in inside))


def guarded(
    config: "OffPolicy", sums: RatioSums, staleness: np.ndarray, keep: np.ndarray
) -> tuple[np.ndarray, dict[str, float], float]:
    """Which rows are kept, [rows], metrics, and what the learning rate is scaled by; 0 skips the update. ``staleness``
    [rows] counts the versions between the policy that sampled and the one to be updated."""
    if config.max_staleness is not None:
        keep = keep & (staleness <= config.max_staleness)
    # the effective number of rows follows from the ratios of whole rows
    weights = np.exp(np.clip(sums.log_ratio, -20, 20))
    ess = effective_sample_size(weights[keep].tolist()) if keep.any() else 1.0
    scale = 1.0
    if ess < config.min_ess:
        scale = 0.0 if config.guard == "skip" else ess / config.min_ess
    tokens = sums.tokens.sum()
    metrics = {
        "ess": ess,
        "lr_scale": scale,
        "staleness": float(staleness.mean()),
        "max_staleness": float(staleness.max()),
        "mean_importance": float(sums.importance.sum() / tokens),
        "masked_share": float(sums.masked.sum() / tokens),
    }
    return keep, metrics, scale


def correct(
    config: "OffPolicy",
    rollouts: "Sequence[Trajectory]",
    weights: "ByToken",
    keep: np.ndarray,
    proximal: "ByToken",
    version: int,
) -> "tuple[ByToken, np.ndarray, dict[str, float], float]":
    """Weights times the importance of each token, which rows are kept, metrics, and the scale of the learning rate."""
    ratio, mask = as_tensors([row.action_mask for row in rollouts], [row.logprobs for row in rollouts], proximal)
    importance = importance_weights(config, ratio, mask)
    factors = importance.double().numpy()
    corrected = [
        np.multiply(weights_of_row, factor[: len(weights_of_row)])
        for weights_of_row, factor in zip(weights, factors, strict=True)
    ]
    staleness = np.array([version - row.policy_version for row in rollouts])
    keep, metrics, scale = guarded(config, ratio_sums(ratio, mask, importance), staleness, keep)
    return corrected, keep, metrics, scale


def divergence(sampled: Sequence[TrainingRows], trained: Sequence[TrainingRows]) -> float:
    """The k3 estimate of the divergence between the policy that is trained and the one that sampled, from log-probs of
    the same rows by both, as a mean over action tokens. They differ by rounding, or because the weights differ."""
    total, tokens = 0.0, 0
    for before, other in zip(sampled, trained, strict=True):
        mask = before.lists("mask")[1].astype(bool)
        ratio = other.lists("logprobs")[1][mask].astype(np.float64) - before.lists("logprobs")[1][mask]
        total += float((np.expm1(ratio) - ratio).sum())
        tokens += int(mask.sum())
    return total / max(1, tokens)


def as_tensors(
    masks: Sequence[Sequence[bool]], behaviour: Sequence[Sequence[float]], proximal: "ByToken"
) -> tuple[Tensor, Tensor]:
    """Padded log-ratios of proximal to behaviour policy, 0 outside the mask, and the mask, both [rows, tokens]."""
    width = max(len(mask) for mask in masks)
    ratios = torch.zeros(len(masks), width)
    padded = torch.zeros(len(masks), width, dtype=torch.bool)
    for row, (mask, old, new) in enumerate(zip(masks, behaviour, proximal, strict=True)):
        padded[row, : len(mask)] = torch.tensor(mask)
        ratios[row, : len(mask)] = torch.as_tensor(new, dtype=torch.float32) - torch.tensor(old)
    return ratios.masked_fill(~padded, 0.0), padded
