"""What all policy-gradient algorithms share: their common settings, and how rollouts become advantages and losses.

An algorithm is one class. ``advantages`` turns the rollouts of a step into a weight for each token, ``token_loss``
turns weights and log-probs into a loss for each token, and ``aggregate`` names what their sum is divided by.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from agentrl.algorithms.base import Config, Minimised
from agentrl.rewards.length import over_limit
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.choice import OneOf
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.training.batch import Batch

ByToken = Sequence[Sequence[float] | np.ndarray]
"""A number for each token of each rollout."""

Aggregate = Literal["sequence", "token", "constant"]

WHOLE = ("whole", "joint", "agent")
"""Kinds of credit that blame no turn in particular."""


class KL(Config):
    """A pull towards the policy that training started from."""

    coef: float = Field(0.001, gt=0, description="weight of the divergence")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of the divergence from one sample (Schulman 2020)")
    where: Literal["loss", "reward"] = Field("loss", description="a term of each token's loss, or taken off its reward")

    @model_validator(mode="after")
    def _has_a_gradient(self) -> "KL":
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError("k1 in the loss has no gradient in expectation; use k2 or k3, or where: reward")
        return self


class OffPolicy(Config):
    """Corrections for rollouts of an older policy, or of another engine. Ratios are those of the policy before the
    update (the proximal policy) to the behaviour policy that sampled. A bound of None means no bound."""

    truncate: float | None = Field(None, gt=0, description="upper bound of a token's importance weight (TIS)")
    truncate_sequence: float | None = Field(None, gt=0, description="upper bound of a whole row's importance weight")
    truncate_prefix: Annotated[float | None, ADDED] = Field(
        None, gt=0, description="upper bound of the product of ratios over a row up to and including the token"
    )
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
        given = [
            name for name in ("truncate", "truncate_prefix", "truncate_sequence") if getattr(self, name) is not None
        ]
        if self.vtrace and given:
            raise ValueError(f"vtrace weighs by p/b itself; {' and '.join(given)} would correct twice")
        if self.vtrace and not 0 < self.vtrace[1] <= self.vtrace[0]:
            raise ValueError(f"vtrace {self.vtrace}: bounds are rho >= c > 0, such as [1.0, 1.0]")
        if self.band and not 0 <= self.band[0] < 1 < self.band[1]:
            raise ValueError(f"band {self.band} must hold 1, the ratio of a policy to itself: such as [0.5, 2.0]")
        if len(given) > 1:
            raise ValueError(
                f"set one of {' and '.join(given)}: the weight of a token is its own ratio, that of its prefix or that "
                "of its row; together they would correct twice"
            )
        return self


class Overlong(Config):
    """DAPO's soft punishment (Yu et al. 2025, equation 13): over the last ``buffer`` tokens before ``limit`` the reward
    falls by up to ``penalty``. Tokens are those of the response: all after the prompt."""

    limit: int | None = Field(
        None, ge=1, description="tokens after the prompt; null: those that the row's max_tokens leaves"
    )
    buffer: int | None = Field(None, ge=1, description="null is a fifth of the limit, as published")
    penalty: float = Field(1.0, gt=0, description="what a row of limit tokens loses")

    @model_validator(mode="after")
    def _buffer_fits(self) -> "Overlong":
        if self.limit and self.buffer and self.buffer > self.limit:
            raise ValueError(f"overlong.buffer {self.buffer} is longer than limit {self.limit}")
        return self

    def punishment(self, row: Trajectory) -> float:
        """What a rollout loses of its reward. Raises ValueError if there is no limit, and the rollout does not say what
        ``max_tokens`` it was sampled with."""
        return self.penalty * over_limit(row, self.limit, self.buffer)


@dataclass(frozen=True)
class Experience:
    """The rollouts of one step, and what algorithms turn into advantages.

    A rollout is a row, and an episode is one rollout unless its context was compressed or it has several agents: then
    ``whose`` [rollouts] is the number of each rollout's episode. ``groups`` names each episode's group, ``rewards``
    [episodes] are shaped, and ``penalties`` is what the divergence from a reference takes off the reward of each token.
    What only some algorithms need may be missing: ``values`` of a critic, log-probs of the ``proximal`` policy (the one
    that is about to be updated) and of a ``teacher``, and the reward of each group's ``greedy`` rollout. Stored
    rollouts, and the numbers of their tokens, are read when they are asked for, a few at a time: go through them once,
    in order.
    """

    rollouts: Sequence[Trajectory]
    groups: Sequence[str]
    rewards: np.ndarray
    penalties: ByToken
    values: ByToken | None = None
    proximal: ByToken | None = None
    greedy: dict[Any, float] = field(default_factory=dict)
    teacher: ByToken | None = None
    whose: np.ndarray | None = None

    def returns(self) -> list[float]:
        """Reward of each episode less its penalties, [episodes]."""
        taken = np.array([total(costs) for costs in self.penalties])
        if self.whose is not None:
            taken = np.bincount(self.whose, taken, len(self.rewards))
        return (self.rewards - taken).tolist()

    def of_rollouts(self, values: np.ndarray) -> np.ndarray:
        """A value for each episode [episodes] as the value of each of its rollouts, [rollouts]."""
        return values if self.whose is None else values[self.whose]

    def every_token(self, values: np.ndarray) -> list[np.ndarray]:
        """A value for each episode [episodes] as the value of each of its tokens, [rollouts][tokens]. The arrays cannot
        be written to, because all tokens of one share their number."""
        every = zip(self.of_rollouts(values), self.penalties, strict=True)
        return [np.broadcast_to(float(value), len(penalties)) for value, penalties in every]


def total(values: Sequence[float] | np.ndarray) -> float:
    """The sum, from the first number to the last; NumPy's own order would round differently."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


@dataclass(frozen=True)
class Advantages:
    """The advantage of each token, and if there is a critic, the ``targets`` that its value head is fitted to."""

    tokens: ByToken
    targets: list[TrainingRow] = field(default_factory=list)


class AdvantageEstimator(Config):
    """What takes the place of an algorithm's own advantages. The fields of a class that is derived from this one are
    its settings."""

    type: str

    @abstractmethod
    def advantages(self, step: Experience) -> Advantages:
        """The advantage of each token of the step's rollouts."""


if TYPE_CHECKING:
    OwnEstimator = AdvantageEstimator
else:
    OwnEstimator = Annotated[Any, OneOf("advantage", {}, AdvantageEstimator)]


class PolicyGradient(Minimised):
    """The settings that all policy-gradient algorithms have. ``needs_critic``, ``needs_greedy`` and ``needs_teacher``
    say what an algorithm asks for besides its rollouts."""

    type: str
    metrics_by_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    of_returns: ClassVar[bool] = False
    """Whether the class's ``advantages`` gives all tokens of a rollout one number, from ``returns`` and ``groups``."""

    aggregate: Aggregate = Field(
        "sequence",
        description="divide by each row's action tokens and by rows; by all action tokens; by a constant. The segments "
        "of one episode are one row",
    )
    constant_length: int = Field(64, ge=1, description="for aggregate constant: rows times this divides the sum")
    advantage: OwnEstimator | None = Field(
        None, description="an estimator of your own, {type: module:Class, ...}, in place of the algorithm's"
    )
    kl: KL | None = None
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus on action tokens")
    degenerate: Literal["drop", "keep"] = Field(
        "keep", description="groups of equal rewards: kept, they count in what the loss is divided by"
    )
    keep_uncertain: float = Field(1.0, gt=0, le=1, description="share of groups kept, highest reward variance first")
    resample: int = Field(
        0,
        ge=0,
        description="groups of equal rewards are replaced by those of other tasks, up to this many times the tasks",
    )
    overlong: Overlong | None = None
    credit: Literal["whole", "first_divergence", "subgoal", "values", "fork_turn", "joint", "agent"] = Field(
        "whole",
        description="what a failed row is blamed for. first_divergence: all from the turn in which it differs from its "
        "group's nearest success; subgoal: the turns spent on the subgoal that failed first; the environment must "
        "report subgoals. values, for stored rows: in a row with values, a turn's advantage is what it added to the "
        "value, and turns without a value have none. fork_turn: of a continuation, the advantage is that of its first "
        "turn alone, the alternative that was tried there. All rows of an episode in one "
        "group share its reward, those of several agents too, and count once; joint: and have to be in one group; "
        "agent: the rows of each agent have a reward of their own, and are compared with those of the same agent alone",
    )
    per_level: bool = Field(False, description="bring rewards of each environment and level to mean 0 and std 1 first")
    off_policy: OffPolicy | None = None

    @model_validator(mode="after")
    def _vtrace_has_a_critic(self) -> "PolicyGradient":
        if self.off_policy and self.off_policy.vtrace and not self.needs_critic:
            raise ValueError("off_policy.vtrace needs the values of a critic: algorithm type ppo or vapo")
        return self

    @model_validator(mode="after")
    def _critic_learns_from_its_own_advantages(self) -> "PolicyGradient":
        if self.advantage and self.needs_critic:
            raise ValueError(f"advantage: {self.type} makes its critic's targets with its own; derive a class from it")
        return self

    @property
    def credits_returns(self) -> bool:
        """Whether the advantages of a rollout are one number, which follows from returns and groups alone."""
        owner = next(owner_class for owner_class in type(self).__mro__ if "advantages" in vars(owner_class))
        return bool(vars(owner).get("of_returns")) and not self.advantage

    @property
    def credits_whole_rows(self) -> bool:
        """Whether what a rollout's tokens weigh follows from rewards and groups alone. Then no token is looked at."""
        in_reward = self.kl and self.kl.where == "reward"
        return self.credits_returns and not (self.off_policy or self.credit not in WHOLE or in_reward)

    @property
    def acts_on_every_row(self) -> bool:
        """Whether rows without advantage have a gradient too."""
        return self.entropy > 0 or (self.kl is not None and self.kl.where == "loss")

    @abstractmethod
    def advantages(self, step: Experience) -> Advantages:
        """The advantage of each token of the step's rollouts."""

    def count(self, batch: "Batch") -> float:
        if self.aggregate == "token":
            return float(batch.mask.sum().item())
        episodes = int((batch.of_episodes(batch.mask.sum(-1)) > 0).sum())  # others have only the second stream
        return episodes * (self.constant_length if self.aggregate == "constant" else 1.0)

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        """Loss of each token, [rows, tokens]: the plain policy gradient, unless an algorithm has its own."""
        return reinforce_loss(logprobs, batch.weights)

    def loss(
        self, logprobs: "Tensor", entropies: "Tensor", batch: "Batch", baseline: float = 0.0
    ) -> "tuple[Tensor, dict[str, float]]":
        losses = self.token_loss(logprobs, batch)
        if self.entropy:
            losses = losses - self.entropy * entropies
        sums: dict[str, Tensor] = {}
        if self.kl and self.kl.where == "loss":
            from agentrl.algorithms.kl import ESTIMATORS

            divergence = ESTIMATORS[self.kl.estimator](logprobs, batch.ref_logprobs)
            losses = losses + self.kl.coef * divergence
            sums["reference_kl"] = divergence.detach()
        log_ratio = (logprobs - batch.logprobs).detach()
        sums["behaviour_kl"] = log_ratio.expm1() - log_ratio
        sums["clip_share"] = self._clipped(log_ratio, batch).float()
        return self._sum(losses, batch), {name: (value * batch.mask).sum().item() for name, value in sums.items()}

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        """Which tokens' ratios to the behaviour policy are out of bounds, [rows, tokens]."""
        return log_ratio > float("inf")

    def _sum(self, values: "Tensor", batch: "Batch") -> "Tensor":
        """Sum [] over trained tokens. Each has the weight 1, or 1 / the number of trained tokens in its episode."""
        per_episode = batch.of_episodes((values * batch.mask).sum(-1))
        if self.aggregate == "sequence":
            per_episode = per_episode / batch.of_episodes(batch.mask.sum(-1)).clamp(min=1)
        return per_episode.sum()


class ClippedPolicyGradient(PolicyGradient):
    """A policy gradient with PPO's clipped ratio of policy to behaviour policy."""

    clip_low: float = Field(0.2, gt=0, lt=1, description="1 - clip_low is the least ratio that is not clipped")
    clip_high: float = Field(0.2, gt=0, description="1 + clip_high is the greatest ratio that is not clipped")

    def token_loss(self, logprobs: "Tensor", batch: "Batch") -> "Tensor":
        return ppo_clip_loss(logprobs, batch.logprobs, batch.weights, self.clip_low, self.clip_high)

    def _clipped(self, log_ratio: "Tensor", batch: "Batch") -> "Tensor":
        return (log_ratio.exp() > 1 + self.clip_high) | (log_ratio.exp() < 1 - self.clip_low)


def reinforce_loss(logprobs: "Tensor", advantages: "Tensor") -> "Tensor":
    """Loss of each token, [rows, tokens]: ``-A log p`` (Williams 1992). Its gradient is that of the clipped surrogate
    at the policy that sampled."""
    return -advantages * logprobs


def ppo_clip_loss(
    logprobs: "Tensor", behaviour_logprobs: "Tensor", advantages: "Tensor", clip_low: float, clip_high: float
) -> "Tensor":
    """Loss of each token, [rows, tokens]: ``-min(r A, clip(r, 1 - low, 1 + high) A)`` with ``r`` the ratio of policy to
    behaviour policy (Schulman et al. 2017, equation 7; two bounds as in DAPO, Yu et al. 2025).
    """
    ratio = (logprobs - behaviour_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -(ratio * advantages).minimum(clipped * advantages)
