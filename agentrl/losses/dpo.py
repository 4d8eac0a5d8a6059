"""Direct preference optimisation."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(chosen_logratio: Tensor, rejected_logratio: Tensor, beta: float) -> Tensor:
    """Loss of each pair, [pairs]: ``-log sigmoid(beta (chosen - rejected))`` (Rafailov et al. 2023, equation 7).

    A log-ratio is the sum over the trained tokens of one side of ``log policy - log reference``, [pairs]. With masks on
    one step only it is the step-level loss of Agent Q (Putta et al. 2024).
    """
    return -logsigmoid(beta * (chosen_logratio - rejected_logratio))
