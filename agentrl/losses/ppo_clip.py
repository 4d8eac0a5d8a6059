"""The clipped surrogate of PPO, which GRPO uses too."""

import torch
from torch import Tensor


def ppo_clip_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Loss of each token, [rows, tokens]: ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r`` the ratio of policy to
    behaviour policy (Schulman et al. 2017, equation 7; two bounds as in DAPO, Yu et al. 2025).
    """
    ratio = torch.exp(logprobs - behaviour_logprobs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
