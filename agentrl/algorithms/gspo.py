"""Group sequence policy optimisation."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import Advantages, ClippedPolicyGradient, Experience

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class GSPO(ClippedPolicyGradient):
    """Clipped surrogate with the ratio of whole sequences, normalised by length (Zheng et al. 2025)."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1, description="1 - clip_low is the least ratio that is not clipped")
    clip_high: float = Field(4e-4, gt=0, description="1 + clip_high is the greatest ratio that is not clipped")

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(group_advantages(step.returns(), step.groups)[0]))

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        return gspo_loss(logprobs, batch.logprobs, batch.weights, batch.mask, self.clip_low, self.clip_high)

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
        whole = (log_ratio * batch.mask).sum(-1, keepdim=True) / length
        return super()._clipped(whole.expand_as(log_ratio), batch)


def gspo_loss(
    logprobs: "Tensor",
    behaviour_logprobs: "Tensor",
    advantages: "Tensor",
    mask: "Tensor",
    clip_low: float,
    clip_high: float,
) -> "Tensor":
    """Loss of each token, [rows, tokens]: the clipped surrogate with one ratio for the sequence,
    ``s = exp(mean over its action tokens of (log p - log p_behaviour))`` (Zheng et al. 2025, equations 5 and 7).

    The mean over a sequence is GSPO. If advantages differ between tokens of a row, each is clipped with the same ratio.
    """
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = (((logprobs - behaviour_logprobs) * mask).sum(-1, keepdim=True) / length).exp()
    return -(ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
