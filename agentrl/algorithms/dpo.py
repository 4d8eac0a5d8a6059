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
        from agentrl.losses.dpo import dpo_loss

        return dpo_loss(chosen, rejected, self.beta)
