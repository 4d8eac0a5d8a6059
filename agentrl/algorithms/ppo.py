"""Proximal policy optimisation with a critic."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from agentrl.advantages.gae import adaptive_lambda, gae
from agentrl.advantages.turns import Span, spread, turn_rewards, turn_spans
from agentrl.advantages.vtrace import vtrace
from agentrl.algorithms.base import Config
from agentrl.algorithms.policy_gradient import Advantages, Aggregate, ByToken, ClippedPolicyGradient, Experience
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory


class Critic(Config):
    """A value head on a copy of the policy's backbone, with an optimiser of its own."""

    lr: float = Field(1e-3, gt=0, description="learning rate of the value head's optimiser")
    pretrain: int = Field(0, ge=0, description="first iterations that fit the value head alone (VAPO, VC-PPO)")
    epochs: int = Field(1, ge=1, description="passes over an iteration's rollouts")
    clip: float | None = Field(0.2, gt=0, description="how far a value may move from the old one; null is no bound")


class PPO(ClippedPolicyGradient):
    """Proximal policy optimisation with a value head and generalised advantage estimation (Schulman et al. 2016, 2017).

    With ``level: turn`` a whole assistant turn is one action: the discount and the trace are per turn, and all tokens
    of a turn have the same advantage.
    """

    type: Literal["ppo"] = "ppo"
    needs_critic: ClassVar[bool] = True
    aggregate: Aggregate = "token"
    level: Literal["token", "turn"] = Field("token", description="what one action is")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token, or per turn")
    lam: float = Field(0.95, ge=0, le=1, description="trace of the policy's advantages")
    critic_lam: float | None = Field(None, ge=0, le=1, description="trace of the value targets; null is lam")
    adaptive_alpha: float | None = Field(
        None, gt=0, description="lam becomes 1 - 1 / (alpha x action tokens), VAPO's equation 9"
    )
    whiten: bool = Field(True, description="bring the advantages of a step to mean 0 and std 1")
    critic: Critic = Critic()

    def advantages(self, step: Experience) -> Advantages:
        """Advantages of tokens by GAE, or V-trace, over the values of the critic, and the value targets: rows with the
        targets as weights and the old values as logprobs, with the first token of each action as mask.

        Raises ValueError if the values of a critic are missing, or for V-trace the log-probs of the proximal policy.
        """
        if step.values is None:
            raise ValueError(f"{self.type} needs the values of a critic")
        if len(step.rewards) != len(step.values):
            raise ValueError(f"{self.type} values episodes of one row; sample without compress, or use grpo")
        traced, targets, importance = list[list[float]](), list[TrainingRow](), list[list[float]]()
        for number, (row, values) in enumerate(zip(step.rollouts, step.values, strict=True)):
            spans = self._actions(row)
            states = [start for start, _ in spans]
            firsts = [(start, start + 1) for start in states]
            gained = _step_rewards(row, float(step.rewards[number]), spans)
            reward = [gain - sum(step.penalties[number][a:b]) for gain, (a, b) in zip(gained, spans, strict=True)]
            value = [values[state] for state in states]
            if self.off_policy and self.off_policy.vtrace:
                advantages, returns, rho = self._vtraced(step, number, reward, value, spans, self.off_policy.vtrace)
                importance.append(spread(rho, spans, len(row.input_ids)))
            else:
                advantages, returns = self._traced(reward, value)
            traced.append(spread(advantages, spans, len(row.input_ids)))
            targets.append(
                TrainingRow(
                    row_id=row.trajectory_id,
                    unit=number,
                    input_ids=row.input_ids,
                    mask=[bool(is_action) for is_action in spread(np.ones(len(states)), firsts, len(row.input_ids))],
                    weights=spread(returns, firsts, len(row.input_ids)),
                    logprobs=values,
                )
            )
        weights: ByToken = _whiten(traced, step.rollouts) if self.whiten else traced
        if importance:
            weights = [np.multiply(*pair) for pair in zip(weights, importance, strict=True)]
        return Advantages(weights, targets)

    def _actions(self, row: Trajectory) -> list[Span]:
        """The tokens of each action: of each turn that was sampled in this row, or each token by itself."""
        turns = turn_spans(row.messages, row.action_mask)
        spans = [(start, end) for start, end in turns if any(row.action_mask[start:end])]
        if self.level == "turn":
            return spans
        return [(position, position + 1) for start, end in spans for position in range(start, end)]

    def _traced(self, reward: Sequence[float], value: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and value targets of a row's actions by GAE, both [actions]."""
        lam = self.lam
        if self.adaptive_alpha is not None:
            lam = adaptive_lambda(len(value), self.adaptive_alpha)
        critic_lam = lam if self.critic_lam is None else self.critic_lam
        return gae(reward, value, self.gamma, lam)[0], gae(reward, value, self.gamma, critic_lam)[1]

    def _vtraced(
        self,
        step: Experience,
        number: int,
        reward: Sequence[float],
        value: Sequence[float],
        spans: Sequence[Span],
        bounds: tuple[float, float],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Advantages without their importance weights, value targets, and the importance weights, all [actions].

        The weights are apart because they multiply the advantages after whitening, which subtracts a mean.
        """
        if step.proximal is None:
            raise ValueError("vtrace needs the log-probs of the proximal policy")
        pairs = list(zip(step.proximal[number], step.rollouts[number].logprobs, strict=True))
        log_ratio = [sum(new - old for new, old in pairs[a:b]) for a, b in spans]
        returns, advantages = vtrace(reward, value, log_ratio, self.gamma, *bounds)
        rho = np.minimum(np.exp(log_ratio), bounds[0])
        return np.divide(advantages, rho, out=np.zeros(len(rho)), where=rho > 0), returns, rho


def _step_rewards(row: Trajectory, final: float, spans: Sequence[Span]) -> list[float]:
    """Reward of each action, [actions]. If an action is a token, the last token of a turn has the turn's reward."""
    by_turn = turn_rewards(row.messages, row.action_mask, final)
    ends = {end: reward for (_, end), reward in zip(turn_spans(row.messages, row.action_mask), by_turn, strict=True)}
    return [ends.get(end, 0.0) for _, end in spans]


def _whiten(weights: ByToken, rollouts: Sequence[Trajectory]) -> list[np.ndarray]:
    """Advantages at mean 0 and std 1 over the action tokens of the step."""
    pairs = zip(weights, rollouts, strict=True)
    flat = np.array([w for values, row in pairs for w, m in zip(values, row.action_mask, strict=False) if m])
    mean, std = flat.mean(), flat.std() + 1e-8
    return [(np.array(values) - mean) / std for values in weights]
