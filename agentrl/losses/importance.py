"""The policy gradient with importance weights."""

from torch import Tensor


def importance_loss(logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Loss of each token, [rows, tokens]: ``-r A`` with the ratio ``r`` of policy to behaviour policy (Ionides 2008),
    without a bound. Its gradient is that of ``-A log p`` at the policy that sampled."""
    return -(logprobs - behaviour_logprobs).exp() * advantages
