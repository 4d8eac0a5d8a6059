"""ReMax."""

from typing import ClassVar, Literal

from agentrl.advantages.group import remax_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, Experience, PolicyGradient


class ReMax(PolicyGradient):
    """The baseline is the reward of the greedy rollout of the same task (Li et al. 2023): one more rollout per task."""

    type: Literal["remax"] = "remax"
    needs_greedy: ClassVar[bool] = True
    aggregate: Aggregate = "constant"

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(remax_advantages(step.returns(), step.groups, step.greedy)))
