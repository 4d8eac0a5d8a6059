"""Simple preference optimisation."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def simpo_loss(chosen_logprob: Tensor, rejected_logprob: Tensor, beta: float, margin: float) -> Tensor:
    """Loss of each pair, [pairs], from *mean* log-probabilities of the trained tokens, without a reference:
    ``-log sigmoid(beta (chosen - rejected) - margin)`` (Meng et al. 2024, equation 6)."""
    return -logsigmoid(beta * (chosen_logprob - rejected_logprob) - margin)
