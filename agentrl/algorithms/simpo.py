"""Simple preference optimisation."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentrl.algorithms.preference import Preference

if TYPE_CHECKING:
    from torch import Tensor


class SimPO(Preference):
    """Mean log-probabilities, a margin and no reference (Meng et al. 2024)."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0, description="scale of the difference of the mean log-probabilities")
    margin: float = Field(1.0, ge=0, description="the paper's gamma: by how much the chosen side should win")
    length_normalized: Literal[True] = True
    reference: ClassVar[bool] = False

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        return simpo_loss(chosen, rejected, self.beta, self.margin)


def simpo_loss(chosen_logprob: "Tensor", rejected_logprob: "Tensor", beta: float, margin: float) -> "Tensor":
    """Loss of each pair, [pairs], from *mean* log-probabilities of the trained tokens, without a reference:
    ``-log sigmoid(beta (chosen - rejected) - margin)`` (Meng et al. 2024, equation 6)."""
    from torch.nn.functional import logsigmoid

    return -logsigmoid(beta * (chosen_logprob - rejected_logprob) - margin)
