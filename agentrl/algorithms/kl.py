"""Estimators of the divergence KL(policy || reference) from tokens sampled by the policy (Schulman 2020)."""

import torch
from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log p - log q`` of each token, [rows, tokens]: unbiased, high variance, and may be negative. For rewards: as a
    loss its expected gradient is zero."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2`` of each token, [rows, tokens]: biased, low variance, and as a loss its expected
    gradient is that of the divergence."""
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)`` of each token, [rows, tokens]: unbiased and never negative (GRPO: Shao et al. 2024,
    equation 4)."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
