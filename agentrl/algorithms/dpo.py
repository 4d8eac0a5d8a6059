"""Direct preference optimisation."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentrl.algorithms.preference import Preference

if TYPE_CHECKING:
    from torch import Tensor


class DPO(Preference):
    """The log-sigmoid of the difference of both sides' log-ratios (Rafailov et al. 2023)."""

    type: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, gt=0, description="strength of the pull towards the reference policy")

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        return dpo_loss(chosen, rejected, self.beta)


def dpo_loss(chosen_logratio: "Tensor", rejected_logratio: "Tensor", beta: float) -> "Tensor":
    """Loss of each pair, [pairs]: ``-log sigmoid(beta (chosen - rejected))`` (Rafailov et al. 2023, equation 7).

    A log-ratio is the sum over the trained tokens of one side of ``log policy - log reference``, [pairs]. With masks on
    one step only it is the step-level loss of Agent Q (Putta et al. 2024).
    """
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * (chosen_logratio - rejected_logratio))
