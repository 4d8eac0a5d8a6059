"""REINFORCE leave-one-out."""

from typing import ClassVar, Literal

from agentrl.advantages.group import leave_one_out_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, Experience, PolicyGradient


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out: the baseline of a row is the mean reward of the *others* of its group (Ahmadian et al.
    2024)."""

    type: Literal["rloo"] = "rloo"
    aggregate: Aggregate = "constant"

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(leave_one_out_advantages(step.returns(), step.groups)))
