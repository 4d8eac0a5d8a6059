"""Policy-gradient algorithms, a union discriminated by ``type``: choosing a type with no other key is the published
algorithm. Three parts make one: how rollouts become advantages (``estimator``), the loss of a token (``surrogate``),
and what sums are divided by (``aggregate``).
"""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.batch import Batch

Estimator = Literal["group", "centred", "leave_one_out", "batch", "remax", "gae"]
Surrogate = Literal["reinforce", "clip", "sequence_clip", "weight_clip"]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KL(_Config):
    """A pull towards the policy that training started from."""

    coef: float = Field(0.001, gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = Field("loss", description="a term of each token's loss, or taken off its reward")

    @model_validator(mode="after")
    def _has_a_gradient(self) -> "KL":
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("k1 in the loss has no gradient in expectation; use k2 or k3, or where: reward")
        return self


class OffPolicy(_Config):
    """Corrections for rollouts of an older policy, or of another engine. Ratios are those of the policy before the
    update (the proximal policy) to the behaviour policy that sampled; None of a bound is no bound."""

    truncate: float | None = Field(None, gt=0, description="upper bound of a token's importance weight (TIS)")
    truncate_sequence: float | None = Field(None, gt=0, description="upper bound of a whole row's importance weight")
    band: tuple[float, float] | None = Field(None, description="tokens whose ratio is outside are not trained on")
    max_staleness: int | None = Field(None, ge=0, description="rows of policies older by more versions are dropped")
    min_ess: float = Field(
        0.0, ge=0, le=1, description="effective sample size, as a share of rows, below which the guard acts"
    )
    guard: Literal["scale", "skip"] = Field(
        "scale", description="scale the learning rate by ess / min_ess, or skip the update"
    )
    vtrace: tuple[float, float] | None = Field(
        None, description="V-trace in place of GAE, with bounds of rho and c such as [1.0, 1.0]; needs a critic"
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> "OffPolicy":
        if self.vtrace and (self.truncate is not None or self.truncate_sequence is not None):
            raise ValueError("vtrace weights by p/b itself; truncate and truncate_sequence would correct twice")
        if self.vtrace and not 0 < self.vtrace[1] <= self.vtrace[0]:
            raise ValueError(f"vtrace {self.vtrace}: bounds are rho >= c > 0, such as [1.0, 1.0]")
        if self.band and not 0 <= self.band[0] < 1 < self.band[1]:
            raise ValueError(f"band {self.band} must hold 1, the ratio of a policy to itself: such as [0.5, 2.0]")
        if self.truncate is not None and self.truncate_sequence is not None:
            raise ValueError("set one of truncate (per token) and truncate_sequence; both would correct twice")
        return self


class Overlong(_Config):
    """DAPO's soft punishment (Yu et al. 2025, equation 13): over the last ``buffer`` tokens before ``limit`` the reward
    falls by up to ``penalty``."""

    limit: int = Field(192, ge=1, description="tokens of a whole row")
    buffer: int = Field(48, ge=1)
    penalty: float = Field(1.0, gt=0)


class PolicyGradient(_Config):
    """What all algorithms share."""

    estimator: ClassVar[Estimator]
    surrogate: ClassVar[Surrogate]
    needs_baseline: ClassVar[bool] = False

    aggregate: Literal["sequence", "token", "constant"] = Field(
        "sequence", description="divide by each row's action tokens and by rows; by all action tokens; by a constant"
    )
    constant_length: int = Field(64, ge=1, description="for aggregate constant: rows times this divides the sum")
    kl: KL | None = None
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus on action tokens")
    degenerate: Literal["drop", "keep"] = Field("drop", description="groups in which all rewards are equal")
    keep_uncertain: float = Field(1.0, gt=0, le=1, description="share of groups kept, highest reward variance first")
    resample: int = Field(0, ge=0, description="more rounds of rollouts, at most, until no group is degenerate")
    overlong: Overlong | None = None
    credit: Literal["whole", "first_divergence", "subgoal"] = Field(
        "whole",
        description="what a failed row is blamed for. first_divergence: from where it left its group's nearest success "
        "on; subgoal: the turns spent on the subgoal that failed first, where the environment reports subgoals",
    )
    per_level: bool = Field(False, description="bring rewards of each environment and level to mean 0 and std 1 first")
    off_policy: OffPolicy | None = None

    @model_validator(mode="after")
    def _vtrace_has_a_critic(self) -> "PolicyGradient":
        if self.off_policy and self.off_policy.vtrace and self.estimator != "gae":
            raise ValueError("off_policy.vtrace needs the values of a critic: algorithm type ppo or vapo")
        return self

    def count(self, batch: "Batch") -> float:
        if self.aggregate == "token":
            return float(batch.mask.sum().item())
        return batch.input_ids.shape[0] * (self.constant_length if self.aggregate == "constant" else 1.0)

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        """The surrogate's loss of each token, [rows, tokens]."""
        from agentrl.losses.reinforce import reinforce_loss

        return reinforce_loss(logprobs, batch.weights)

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, dict[str, float]]":
        losses = self.token_loss(logprobs, batch)
        if self.entropy:
            losses = losses - self.entropy * entropies
        sums: dict[str, Tensor] = {}
        if self.kl and self.kl.where == "loss":
            from agentrl.losses.kl import ESTIMATORS

            divergence = ESTIMATORS[self.kl.estimator](logprobs, batch.ref_logprobs)
            losses = losses + self.kl.coef * divergence
            sums["reference_kl"] = divergence.detach()
        log_ratio = (logprobs - batch.logprobs).detach()
        sums["behaviour_kl"] = log_ratio.expm1() - log_ratio
        sums["clip_share"] = self._clipped(log_ratio, batch).float()
        return self._sum(losses, batch), {name: self._sum(value, batch).item() for name, value in sums.items()}

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        """Which tokens' ratios to the behaviour policy are out of bounds, [rows, tokens]."""
        return log_ratio > float("inf")

    def _sum(self, values: "Tensor", batch: "Batch") -> "Tensor":
        """Sum [] over trained tokens, of which each row's have weight 1, or 1 / their number."""
        per_row = (values * batch.mask).sum(-1)
        if self.aggregate == "sequence":
            per_row = per_row / batch.mask.sum(-1).clamp(min=1)
        return per_row.sum()


class _Clipped(PolicyGradient):
    surrogate: ClassVar[Surrogate] = "clip"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0)

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        from agentrl.losses.ppo_clip import ppo_clip_loss

        return ppo_clip_loss(logprobs, batch.logprobs, batch.weights, self.clip_low, self.clip_high)

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        return (log_ratio.exp() > 1 + self.clip_high) | (log_ratio.exp() < 1 - self.clip_low)


class Reinforce(PolicyGradient):
    """The plain policy gradient with the mean reward of the group as its baseline (Williams 1992)."""

    type: Literal["reinforce"] = "reinforce"
    estimator: ClassVar[Estimator] = "centred"
    surrogate: ClassVar[Surrogate] = "reinforce"
    aggregate: Literal["sequence", "token", "constant"] = "constant"


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out: the baseline of a row is the mean reward of the *others* of its group (Ahmadian et al.
    2024)."""

    type: Literal["rloo"] = "rloo"
    estimator: ClassVar[Estimator] = "leave_one_out"
    surrogate: ClassVar[Surrogate] = "reinforce"
    aggregate: Literal["sequence", "token", "constant"] = "constant"


class ReMax(PolicyGradient):
    """The baseline is the reward of the greedy rollout of the same task (Li et al. 2023): one more rollout per task."""

    type: Literal["remax"] = "remax"
    estimator: ClassVar[Estimator] = "remax"
    surrogate: ClassVar[Surrogate] = "reinforce"
    aggregate: Literal["sequence", "token", "constant"] = "constant"


class ReinforcePlusPlus(_Clipped):
    """Clipped surrogate with the group's mean taken off and the whole batch normalised (Hu 2025,
    REINFORCE++-baseline)."""

    type: Literal["reinforce++"] = "reinforce++"
    estimator: ClassVar[Estimator] = "batch"
    aggregate: Literal["sequence", "token", "constant"] = "token"


class GRPO(_Clipped):
    """Group relative policy optimisation (Shao et al. 2024, equation 3), without its KL term unless ``kl`` is set."""

    type: Literal["grpo"] = "grpo"
    estimator: ClassVar[Estimator] = "group"


class DrGRPO(_Clipped):
    """GRPO "done right" (Liu et al. 2025): no division by the group's standard deviation nor by a row's length."""

    type: Literal["dr_grpo"] = "dr_grpo"
    estimator: ClassVar[Estimator] = "centred"
    aggregate: Literal["sequence", "token", "constant"] = "constant"


class DAPO(_Clipped):
    """Clip-higher, token-level mean, dynamic sampling and overlong shaping (Yu et al. 2025)."""

    type: Literal["dapo"] = "dapo"
    estimator: ClassVar[Estimator] = "group"
    aggregate: Literal["sequence", "token", "constant"] = "token"
    clip_high: float = Field(0.28, gt=0)
    resample: int = Field(2, ge=0, description="more rounds of rollouts, at most, until no group is degenerate")
    overlong: Overlong | None = Overlong()


class GSPO(_Clipped):
    """Clipped surrogate with the ratio of whole sequences, normalised by length (Zheng et al. 2025)."""

    type: Literal["gspo"] = "gspo"
    estimator: ClassVar[Estimator] = "group"
    surrogate: ClassVar[Surrogate] = "sequence_clip"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    clip_high: float = Field(4e-4, gt=0)

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        from agentrl.losses.gspo import gspo_loss

        return gspo_loss(logprobs, batch.logprobs, batch.weights, batch.mask, self.clip_low, self.clip_high)

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        length = batch.mask.sum(-1, keepdim=True).clamp(min=1)
        whole = (log_ratio * batch.mask).sum(-1, keepdim=True) / length
        return super()._clipped(whole.expand_as(log_ratio), batch)


class CISPO(PolicyGradient):
    """REINFORCE with a clipped, detached importance weight (MiniMax-M1, Chen et al. 2025)."""

    type: Literal["cispo"] = "cispo"
    estimator: ClassVar[Estimator] = "group"
    surrogate: ClassVar[Surrogate] = "weight_clip"
    aggregate: Literal["sequence", "token", "constant"] = "token"
    clip_high: float = Field(2.0, gt=0, description="weights are at most 1 + clip_high")

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        from agentrl.losses.cispo import cispo_loss

        return cispo_loss(logprobs, batch.logprobs, batch.weights, self.clip_high)

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        return log_ratio.exp() > 1 + self.clip_high


class StarPOS(_Clipped):
    """StarPO-S (RAGEN, Wang et al. 2025): keep the most uncertain quarter of the groups, clip higher, no KL."""

    type: Literal["starpo_s"] = "starpo_s"
    estimator: ClassVar[Estimator] = "group"
    aggregate: Literal["sequence", "token", "constant"] = "token"
    clip_high: float = Field(0.28, gt=0)
    keep_uncertain: float = Field(0.25, gt=0, le=1)


class Critic(_Config):
    """A value head on a copy of the policy's backbone, with an optimiser of its own."""

    lr: float = Field(1e-3, gt=0)
    pretrain: int = Field(0, ge=0, description="first iterations that fit the value head alone (VAPO, VC-PPO)")
    epochs: int = Field(1, ge=1, description="passes over an iteration's rollouts")
    clip: float | None = Field(0.2, gt=0, description="how far a value may move from the old one; null is no bound")


class PPO(_Clipped):
    """Proximal policy optimisation with a value head and generalised advantage estimation (Schulman et al. 2016, 2017).

    ``level: turn`` makes a whole assistant turn one action: the discount and the trace are per turn, and all tokens of
    a turn share its advantage.
    """

    type: Literal["ppo"] = "ppo"
    estimator: ClassVar[Estimator] = "gae"
    aggregate: Literal["sequence", "token", "constant"] = "token"
    degenerate: Literal["drop", "keep"] = "keep"
    level: Literal["token", "turn"] = "token"
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token, or per turn")
    lam: float = Field(0.95, ge=0, le=1, description="trace of the policy's advantages")
    critic_lam: float | None = Field(None, ge=0, le=1, description="trace of the value targets; null is lam")
    adaptive_alpha: float | None = Field(
        None, gt=0, description="lam becomes 1 - 1 / (alpha x action tokens), VAPO's equation 9"
    )
    whiten: bool = Field(True, description="bring the advantages of a step to mean 0 and std 1")
    critic: Critic = Critic()


class VAPO(PPO):
    """Value-based augmented PPO (Yue et al. 2025): value pre-training, decoupled and length-adaptive traces,
    clip-higher, token-level mean."""

    type: Literal["vapo"] = "vapo"  # type: ignore[assignment]
    clip_high: float = Field(0.28, gt=0)
    critic_lam: float | None = Field(1.0, ge=0, le=1)
    adaptive_alpha: float | None = Field(0.05, gt=0)
    critic: Critic = Critic(pretrain=5)


Algorithm = Annotated[
    Reinforce | RLOO | ReMax | ReinforcePlusPlus | GRPO | DrGRPO | DAPO | GSPO | CISPO | StarPOS | PPO | VAPO,
    Field(discriminator="type"),
]
"""How rollouts update the policy."""
