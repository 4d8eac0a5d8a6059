"""A policy gradient with a soft gate in place of a clipped ratio, and advantages from the median of a group."""

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import AdvantageEstimator, Advantages, Experience, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class SoftGate(PolicyGradient):
    """Soft adaptive policy optimisation (Gao et al. 2025): a token's ratio passes a sigmoid, so that its gradient fades
    the further the policy has moved, and faster if its advantage is negative."""

    tau_positive: float = Field(1.0, gt=0, description="how fast the gradient fades, advantage above 0")
    tau_negative: float = Field(1.05, gt=0, description="how fast the gradient fades, advantage below 0")

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(group_advantages(step.returns(), step.groups)[0]))

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        ratio = (logprobs - batch.logprobs).exp()
        tau = (batch.weights > 0) * self.tau_positive + (batch.weights <= 0) * self.tau_negative
        return -batch.weights * (tau * (ratio - 1)).sigmoid() * 4 / tau


class MedianBaseline(AdvantageEstimator):
    """A rollout's reward less the median of its group: one outlier does not move what the others are compared with."""

    scale: float = Field(1.0, gt=0)

    def advantages(self, step: Experience) -> Advantages:
        rewards, groups = np.array(step.returns()), np.array(step.groups)
        medians = {group: np.median(rewards[groups == group]) for group in set(step.groups)}
        centred = rewards - np.array([medians[group] for group in step.groups])
        return Advantages(step.every_token(self.scale * centred))
