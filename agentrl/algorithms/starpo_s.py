"""StarPO-S."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, ClippedPolicyGradient, Experience


class StarPOS(ClippedPolicyGradient):
    """StarPO-S (RAGEN, Wang et al. 2025): keep the most uncertain quarter of the groups, clip higher, no KL."""

    type: Literal["starpo_s"] = "starpo_s"
    aggregate: Aggregate = "token"
    clip_high: float = Field(0.28, gt=0)
    keep_uncertain: float = Field(0.25, gt=0, le=1)

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(group_advantages(step.returns(), step.groups)[0]))
