"""Value-based augmented PPO."""

from typing import Literal

from pydantic import Field

from agentrl.algorithms.ppo import PPO, Critic


class VAPO(PPO):
    """PPO with value pre-training, decoupled and length-adaptive traces, clip-higher and a token-level mean (Yue et al.
    2025)."""

    type: Literal["vapo"] = "vapo"  # type: ignore[assignment]
    clip_high: float = Field(0.28, gt=0)
    critic_lam: float | None = Field(1.0, ge=0, le=1)
    adaptive_alpha: float | None = Field(0.05, gt=0)
    critic: Critic = Critic(pretrain=5)
