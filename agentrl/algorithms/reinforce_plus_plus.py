"""REINFORCE++ with a baseline."""

from typing import ClassVar, Literal

from agentrl.advantages.group import batch_advantages
from agentrl.algorithms.policy_gradient import KL, Advantages, Aggregate, ClippedPolicyGradient, Experience


class ReinforcePlusPlus(ClippedPolicyGradient):
    """Clipped surrogate with the group's mean taken off and the whole batch normalised, and the k2 estimate of the
    divergence from the reference in the loss (Hu 2025, REINFORCE++-baseline). Examples in its authors' code
    weigh the divergence by 1e-5 to 1e-3; ours is the smallest of these."""

    type: Literal["reinforce++"] = "reinforce++"
    aggregate: Aggregate = "token"
    kl: KL | None = KL(coef=1e-5, estimator="k2")

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(batch_advantages(step.returns(), step.groups)))
