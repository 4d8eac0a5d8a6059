"""Value-based augmented PPO."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from agentrl.algorithms.base import Sums
from agentrl.algorithms.ppo import PPO, Critic

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch


class VAPO(PPO):
    """PPO with value pre-training, decoupled and length-adaptive traces, clip-higher, a token-level mean, and the
    negative log-likelihood of successful rollouts (Yue et al. 2025)."""

    type: Literal["vapo"] = "vapo"  # type: ignore[assignment]
    clip_high: float = Field(0.28, gt=0)
    critic_lam: float | None = Field(1.0, ge=0, le=1)
    adaptive_alpha: float | None = Field(0.05, gt=0)
    critic: Critic = Critic(pretrain=5)
    positive_nll: float = Field(0.1, ge=0, description="the paper's mu: weight of the mean over tokens of successes")

    @property
    def acts_on_every_row(self) -> bool:
        return self.positive_nll > 0 or super().acts_on_every_row

    def step_sums(self, batch: "Batch") -> Sums:
        return {"successes": float(_successes(batch).sum().item())}

    def over_step(self, sums: Sums) -> float:
        """What turns a sum over the tokens of successes, divided by the step's count, into their mean."""
        return sums["count"] / max(1.0, sums["successes"])

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, Sums]":
        total, sums = super().loss(logprobs, entropies, batch)
        if self.positive_nll:
            total = total - self.positive_nll * baseline * (logprobs * _successes(batch)).sum()
        return total, sums


def _successes(batch: "Batch") -> "Tensor":
    """Trained tokens of successful rollouts, [rows, tokens]."""
    return batch.mask & (batch.label > 0)[:, None]
