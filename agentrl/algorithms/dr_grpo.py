"""GRPO "done right"."""

from typing import ClassVar, Literal

from agentrl.advantages.group import centred_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, ClippedPolicyGradient, Experience


class DrGRPO(ClippedPolicyGradient):
    """GRPO "done right" (Liu et al. 2025): no division by the group's standard deviation nor by a row's length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregate: Aggregate = "constant"

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(centred_advantages(step.returns(), step.groups)))
