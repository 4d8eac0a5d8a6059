"""Clipped importance-sampling-weight policy optimisation."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, Experience, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class CISPO(PolicyGradient):
    """REINFORCE with a clipped, detached importance weight (MiniMax-M1, Chen et al. 2025)."""

    type: Literal["cispo"] = "cispo"
    aggregate: Aggregate = "token"
    degenerate: Literal["drop", "keep"] = "drop"
    clip_high: float = Field(2.0, gt=0, description="weights are at most 1 + clip_high")

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(group_advantages(step.returns(), step.groups)[0]))

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        return cispo_loss(logprobs, batch.logprobs, batch.weights, self.clip_high)

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        return log_ratio.exp() > 1 + self.clip_high


def cispo_loss(logprobs: "Tensor", behaviour_logprobs: "Tensor", advantages: "Tensor", clip_high: float) -> "Tensor":
    """Loss of each token, [rows, tokens]: ``-stop_gradient(min(r, 1 + clip_high)) A log p`` (MiniMax-M1, Chen et al.
    2025, equations 4 and 5). Clipping bounds a token's weight and never drops its gradient.
    """
    weight = (logprobs - behaviour_logprobs).exp().clamp(max=1 + clip_high).detach()
    return -weight * advantages * logprobs
