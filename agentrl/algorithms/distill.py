"""On-policy distillation."""

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, Experience, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class Distill(PolicyGradient):
    """The advantage of a token that the student sampled is ``coef (log p_teacher - log p_behaviour)``, without discount
    (Lu 2025, "On-policy distillation"; Agarwal et al. 2023, with the reverse KL): the expected gradient is that of the
    reverse KL from student to teacher, token by token. ``outcome`` times GRPO's advantage is added."""

    type: Literal["distill"] = "distill"
    needs_teacher: ClassVar[bool] = True
    aggregate: Aggregate = "token"
    coef: float = Field(1.0, gt=0, description="weight of the teacher's advantages")
    outcome: float = Field(0.0, ge=0, description="weight of the group advantages of rewards, which are added")

    def advantages(self, step: Experience) -> Advantages:
        """Raises ValueError if the log-probs of a teacher are missing."""
        if step.teacher is None:
            raise ValueError(f"{self.type} needs the log-probs of a teacher")
        rewarded = np.zeros(len(step.rewards))
        if self.outcome:
            rewarded = self.outcome * group_advantages(step.returns(), step.groups)[0]
        tokens = [
            np.where(row.action_mask, self.coef * (np.asarray(taught) - np.array(row.logprobs)) + own, 0.0)
            for row, taught, own in zip(step.rollouts, step.teacher, step.of_rollouts(rewarded), strict=True)
        ]
        return Advantages(tokens)

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        return importance_loss(logprobs, batch.logprobs, batch.weights)


def importance_loss(logprobs: "Tensor", behaviour_logprobs: "Tensor", advantages: "Tensor") -> "Tensor":
    """Loss of each token, [rows, tokens]: ``-r A`` with the ratio ``r`` of policy to behaviour policy (Ionides 2008),
    without a bound. Its gradient is that of ``-A log p`` at the policy that sampled."""
    return -(logprobs - behaviour_logprobs).exp() * advantages
