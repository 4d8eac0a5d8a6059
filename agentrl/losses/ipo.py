"""Identity preference optimisation."""

from torch import Tensor


def ipo_loss(chosen_logratio: Tensor, rejected_logratio: Tensor, beta: float) -> Tensor:
    """Loss of each pair, [pairs]: ``(chosen - rejected - 1 / (2 beta))^2`` (Azar et al. 2023, equation 17).

    A log-ratio is that of one side, ``log policy - log reference``, [pairs]. The authors and TRL average it over the
    trained tokens, and so does :class:`agentrl.algorithms.ipo.IPO`.
    """
    return (chosen_logratio - rejected_logratio - 1 / (2 * beta)) ** 2
