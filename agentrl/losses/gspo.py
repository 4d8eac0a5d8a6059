"""Group sequence policy optimisation."""

import torch
from torch import Tensor


def gspo_loss(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Loss of each token, [rows, tokens]: the clipped surrogate with one ratio for the sequence,
    ``s = exp(mean over its action tokens of (log p - log p_behaviour))`` (Zheng et al. 2025, equations 5 and 7).

    The mean over a sequence is GSPO. If advantages differ between tokens of a row, each is clipped with the same ratio.
    """
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(((logprobs - behaviour_logprobs) * mask).sum(-1, keepdim=True) / length)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
