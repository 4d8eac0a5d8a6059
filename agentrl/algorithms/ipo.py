"""Identity preference optimisation."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentrl.algorithms.preference import Preference

if TYPE_CHECKING:
    from torch import Tensor


class IPO(Preference):
    """The squared distance of the difference of log-ratios from a target (Azar et al. 2023). Log-ratios are averaged
    over tokens, as the authors do."""

    type: Literal["ipo"] = "ipo"
    beta: float = Field(0.1, gt=0, description="the paper's tau: log-ratios differ by 1 / (2 beta) at the optimum")
    length_normalized: bool = True

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        return ipo_loss(chosen, rejected, self.beta)


def ipo_loss(chosen_logratio: "Tensor", rejected_logratio: "Tensor", beta: float) -> "Tensor":
    """Loss of each pair, [pairs]: ``(chosen - rejected - 1 / (2 beta))^2`` (Azar et al. 2023, equation 17).

    A log-ratio is that of one side, ``log policy - log reference``, [pairs]. The authors and TRL average it over the
    trained tokens, and so does :class:`agentrl.algorithms.ipo.IPO`.
    """
    return (chosen_logratio - rejected_logratio - 1 / (2 * beta)) ** 2
