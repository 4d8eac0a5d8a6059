"""The plain policy gradient."""

from torch import Tensor


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Loss of each token, [rows, tokens]: ``-A log p`` (Williams 1992). Its gradient is that of the clipped surrogate
    at the policy that sampled."""
    return -advantages * logprobs
