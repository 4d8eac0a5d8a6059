"""Decoupled clip and dynamic sampling policy optimisation."""

from typing import ClassVar, Literal

from pydantic import Field

from agentrl.advantages.group import group_advantages
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, ClippedPolicyGradient, Experience, Overlong


class DAPO(ClippedPolicyGradient):
    """Clip-higher, token-level mean, dynamic sampling and overlong shaping (Yu et al. 2025)."""

    type: Literal["dapo"] = "dapo"
    aggregate: Aggregate = "token"
    degenerate: Literal["drop", "keep"] = "drop"
    clip_high: float = Field(0.28, gt=0)
    resample: int = Field(2, ge=0, description="groups of equal rewards are replaced, up to this many times the tasks")
    overlong: Overlong | None = Overlong()

    of_returns: ClassVar[bool] = True

    def advantages(self, step: Experience) -> Advantages:
        return Advantages(step.every_token(group_advantages(step.returns(), step.groups)[0]))
