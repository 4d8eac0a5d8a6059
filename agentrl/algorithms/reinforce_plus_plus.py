"""REINFORCE++ with a baseline."""

from typing import Literal

from agentrl.advantages.group import batch_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, ClippedPolicyGradient, Experience


class ReinforcePlusPlus(ClippedPolicyGradient):
    """Clipped surrogate with the group's mean taken off and the whole batch normalised (Hu 2025,
    REINFORCE++-baseline)."""

    type: Literal["reinforce++"] = "reinforce++"
    aggregate: Aggregate = "token"

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(batch_advantages(step.returns(), step.groups)))
