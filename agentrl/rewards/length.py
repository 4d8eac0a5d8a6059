"""What a long rollout costs. Tokens are those of the policy; of rows without tokens, words and calls are counted."""

import json
import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from pydantic import Field

from agentrl.rewards.component import Grade, Reward
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Trajectory


def spoken(rollout: Trajectory) -> int:
    """Tokens of the policy, or if the row has no tokens, the words that it wrote."""
    if rollout.n_action_tokens:
        return rollout.n_action_tokens
    turns = [message for message in rollout.messages if message.role is Role.ASSISTANT]
    texts = [turn.content + " " + (turn.reasoning or "") for turn in turns]
    texts += [f"{call.name} {call.arguments}" for turn in turns for call in turn.tool_calls]
    return sum(len(text.split()) for text in texts)


class _OfGroup(Reward):
    """A component whose values depend on the whole group."""

    def value(self, rollout: Trajectory, task: Task) -> float:
        return self._values([rollout])[0]

    async def grades(self, group: Sequence[Trajectory], task: Task) -> list[Grade]:
        return [Grade(value) for value in self._values(group)]

    def _values(self, group: Sequence[Trajectory]) -> list[float]:
        raise NotImplementedError


class LinearLength(_OfGroup):
    """Kimi k1.5's length reward (Kimi Team 2025, section 2.3.3): for a success of length l, with the shortest and the
    longest rollout of the group, 0.5 - (l - min) / (max - min); for a failure no more than 0 of that; 0 if all are
    equally long."""

    type: Literal["length_linear"] = "length_linear"

    def _values(self, group: Sequence[Trajectory]) -> list[float]:
        lengths = [spoken(rollout) for rollout in group]
        least, most = min(lengths), max(lengths)
        if least == most:
            return [0.0] * len(group)
        linear = [0.5 - (length - least) / (most - least) for length in lengths]
        return [value if rollout.success else min(0.0, value) for value, rollout in zip(linear, group, strict=True)]


class SigmoidLength(_OfGroup):
    """The penalty of Arora and Zanette (2025, section 3): a success loses sigmoid((l - mean) / deviation), both over
    the successes of the group; a failure loses nothing."""

    type: Literal["length_sigmoid"] = "length_sigmoid"

    def _values(self, group: Sequence[Trajectory]) -> list[float]:
        right = [spoken(rollout) for rollout in group if rollout.success]
        if not right:
            return [0.0] * len(group)
        mean, deviation = fmean(right), pstdev(right)
        return [
            -_sigmoid((spoken(rollout) - mean) / deviation if deviation else 0.0) if rollout.success else 0.0
            for rollout in group
        ]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class OverlongPunishment(Reward):
    """DAPO's soft punishment (Yu et al. 2025, equation 13): 0 up to ``limit - buffer`` tokens of the response (all
    after the prompt), then falling to -1 at ``limit``. Algorithms have it as ``overlong`` too; name it once."""

    type: Literal["overlong"] = "overlong"
    limit: int | None = Field(
        None, ge=1, description="tokens after the prompt; null: those that the row's max_tokens leaves"
    )
    buffer: int | None = Field(None, ge=1, description="null is a fifth of the limit, as published")

    def value(self, rollout: Trajectory, task: Task) -> float:
        return -over_limit(rollout, self.limit, self.buffer)


def over_limit(row: Trajectory, limit: int | None, buffer: int | None) -> float:
    """How far a response is over ``limit - buffer`` tokens, in parts of the buffer, from 0 to 1. Raises ValueError if
    there is no limit, and the rollout does not say what ``max_tokens`` it was sampled with."""
    prompt = row.action_mask.index(True) if True in row.action_mask else row.n_tokens
    if limit is None:
        allowed = json.loads(row.sampling or "{}").get("max_tokens")
        if allowed is None:
            raise ValueError(f"{row.trajectory_id} has no max_tokens in its sampling: set overlong.limit")
        limit = max(1, allowed - prompt)
    room = buffer or max(1, limit // 5)
    return min(1.0, max(0.0, (row.n_tokens - prompt - (limit - room)) / room))
