"""REINFORCE, the plain policy gradient."""

from typing import ClassVar, Literal

from agentrl.advantages.group import centred_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, Experience, PolicyGradient


class Reinforce(PolicyGradient):
    """The plain policy gradient with the mean reward of the group as its baseline (Williams 1992)."""

    type: Literal["reinforce"] = "reinforce"
    aggregate: Aggregate = "constant"

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(centred_advantages(step.returns(), step.groups)))
