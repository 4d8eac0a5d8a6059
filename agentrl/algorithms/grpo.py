"""Group relative policy optimisation."""

from typing import ClassVar, Literal

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import Advantages, ClippedPolicyGradient, Experience


class GRPO(ClippedPolicyGradient):
    """Group relative policy optimisation (Shao et al. 2024, equation 3), without its KL term unless ``kl`` is set."""

    type: Literal["grpo"] = "grpo"

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(group_advantages(step.returns(), step.groups)[0]))
