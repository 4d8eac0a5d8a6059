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
        from agentrl.losses.ipo import ipo_loss

        return ipo_loss(chosen, rejected, self.beta)
