"""Kahneman-Tversky optimisation."""

from torch import Tensor


def kto_loss(logratio: Tensor, label: Tensor, baseline: Tensor | float, beta: float) -> Tensor:
    """Loss of each row, [rows]: ``1 - sigmoid(beta (logratio - z))`` if ``label`` > 0, else
    ``1 - sigmoid(beta (z - logratio))`` (Ethayarajh et al. 2024, equation 8).

    ``logratio`` [rows] is the sum over a row's trained tokens of ``log policy - log reference``. ``z`` is ``baseline``,
    an estimate of the policy's divergence from the reference, at least 0.
    """
    sign = (label > 0) * 2.0 - 1.0
    return 1 - (beta * sign * (logratio - baseline)).sigmoid()
