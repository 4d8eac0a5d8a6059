"""Clipped importance-sampling-weight policy optimisation."""

import torch
from torch import Tensor


def cispo_loss(logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_high: float) -> Tensor:
    """Loss of each token, [rows, tokens]: ``-stop_gradient(min(r, 1 + clip_high)) A log p`` (MiniMax-M1, Chen et al.
    2025, equations 4 and 5). Clipping bounds a token's weight and never drops its gradient.
    """
    weight = torch.exp(logprobs - behaviour_logprobs).clamp(max=1 + clip_high).detach()
    return -weight * advantages * logprobs
