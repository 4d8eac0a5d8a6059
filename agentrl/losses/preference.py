"""Preference losses beside DPO. A log-ratio is the sum (or mean) over the trained tokens of one side of
``log policy - log reference``, [pairs]."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def ipo_loss(chosen_logratio: Tensor, rejected_logratio: Tensor, beta: float) -> Tensor:
    """Loss of each pair, [pairs]: ``(chosen - rejected - 1 / (2 beta))^2`` (Azar et al. 2023, equation 17).

    The authors' results, and TRL, use log-ratios averaged over tokens; so does :class:`agentrl.objectives.IPO`.
    """
    return (chosen_logratio - rejected_logratio - 1 / (2 * beta)) ** 2


def simpo_loss(chosen_logprob: Tensor, rejected_logprob: Tensor, beta: float, margin: float) -> Tensor:
    """Loss of each pair, [pairs], from *mean* log-probabilities of the trained tokens, without a reference:
    ``-log sigmoid(beta (chosen - rejected) - margin)`` (Meng et al. 2024, equation 6)."""
    return -logsigmoid(beta * (chosen_logprob - rejected_logprob) - margin)


def kto_loss(logratio: Tensor, label: Tensor, baseline: Tensor | float, beta: float) -> Tensor:
    """Loss of each row, [rows]: ``1 - sigmoid(beta (logratio - z))`` where ``label`` > 0 and
    ``1 - sigmoid(beta (z - logratio))`` elsewhere, with ``z`` the baseline, an estimate of the divergence from the
    reference, not below 0 (Ethayarajh et al. 2024, equation 8)."""
    sign = (label > 0) * 2.0 - 1.0
    return 1 - (beta * sign * (logratio - baseline)).sigmoid()
