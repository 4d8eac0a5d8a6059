"""Simple preference optimisation."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentrl.algorithms.preference import Preference

if TYPE_CHECKING:
    from torch import Tensor


class SimPO(Preference):
    """Mean log-probabilities, a margin and no reference (Meng et al. 2024)."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    margin: float = Field(1.0, ge=0, description="the paper's gamma: by how much the chosen side should win")
    length_normalized: Literal[True] = True
    reference: ClassVar[bool] = False

    def pair_loss(self, chosen: "Tensor", rejected: "Tensor") -> "Tensor":
        from agentrl.losses.simpo import simpo_loss

        return simpo_loss(chosen, rejected, self.beta, self.margin)
