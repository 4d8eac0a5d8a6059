"""The protocol of generation engines: tokens in, tokens and log-probabilities out, over several turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field


class Sampling(BaseModel):
    """How tokens are drawn. Recorded log-probabilities are those of the distribution that tokens were drawn
    from, after temperature, top-k and top-p. ``temperature`` 0 is greedy, with log-probability 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens")
    max_turn_tokens: int = Field(40, ge=1, description="sampled tokens in one turn")
    max_tokens: int = Field(192, ge=1, description="all tokens of a row, prompt and observations included")


@dataclass
class Generation:
    """One row: ``logprobs[t]`` belongs to ``ids[t]`` and is NaN if ``mask[t]`` is false (prompt and observations).

    ``truncated`` is true if a limit of :class:`Sampling` ended the last turn.
    """

    ids: list[int]
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    truncated: bool = False

    def __post_init__(self) -> None:
        self.mask = self.mask or [False] * len(self.ids)
        self.logprobs = self.logprobs or [float("nan")] * len(self.ids)

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not choose."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [float("nan")] * len(ids)

    def act(self, token: int, logprob: float) -> None:
        """Append one sampled token."""
        self.ids.append(token)
        self.mask.append(True)
        self.logprobs.append(logprob)


Respond = Callable[[int, list[int]], list[int] | None]
"""Called with a row's number and the ids of the turn that it has just finished; returns the ids to feed before its next
turn, or None when the row is done."""


class Engine(Protocol):
    """Samples turns of many rows from one model."""

    def generate(
        self, prompts: Sequence[list[int]], respond: Respond, sampling: Sampling, stop_id: int, seed: int
    ) -> list[Generation]:
        """Sample turns for each prompt until ``respond`` returns None or a limit is reached. The same seed gives the
        same tokens."""
        ...
