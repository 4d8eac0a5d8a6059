"""What rollouts do to see more than a policy shows by itself: turns that are sampled again, reasoning that is ended,
and calls at random."""

from collections.abc import Sequence
from random import Random
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl.engines.base import Sampling
from agentrl.environments.base import Episode
from agentrl.environments.scripted import random_call
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.trajectory import Message

RESAMPLED = "resampled"
"""How a row's tags begin that count turns that were sampled again. Its log-probs are not those of its tokens: a turn
that was refused is left out of them."""


class Resample(BaseModel):
    """Turns that go on as the one before did are sampled again (T2PO, arXiv 2605.02178): those whose uncertainty M
    differs by less than ``eta`` from that of the turn before.

    M is the mean of -log p over the tokens of a turn, in nats, which estimates the mean entropy of the policy there.
    The paper mixes entropy with the confidence in the most likely tokens, both scaled to their range in the episode;
    engines give the log-probs of the tokens that they drew, and nothing of the others. What is drawn last is taken.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    eta: float = Field(0.3, ge=0, description="a turn is sampled again if its M differs by less; 0: none is")
    tries: int = Field(2, ge=1, description="how often a turn is sampled again at most")

    def wants(self, now: float | None, before: float | None) -> bool:
        """Whether a turn of this uncertainty is sampled again. The first turn is not."""
        return now is not None and before is not None and abs(now - before) < self.eta


ENDED_THINKING = "thinking_ended"
"""Counts reasoning that was ended."""
OPENS, CLOSES = "<think>", "</think>"
END_OF_THINKING = f"\n{CLOSES}\n\n"


class EndThinking(BaseModel):
    """Reasoning that gets nowhere is ended (T2PO, arXiv 2605.02178): after each ``window`` tokens of a turn in which
    ``<think>`` is open, if M of these differs by less than ``eta`` from M of the window before, ``</think>`` is written
    and the policy goes on from there. It is written once in a turn at most, and not trained on.

    Whether it is written follows from what was sampled, so all sampled tokens are draws of the policy, and ratios hold.
    The paper's M is another one; see :class:`Resample`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    eta: float = Field(0.05, ge=0, description="in nats: reasoning is ended if M changes by less between two windows")
    window: int = Field(32, ge=1, description="tokens after which the reasoning is looked at")

    def wants(self, logprobs: Sequence[float]) -> bool:
        """Whether a turn of which the last tokens have these ``logprobs`` is to go on without reasoning."""
        before, now = logprobs[-2 * self.window : -self.window], logprobs[-self.window :]
        return len(before) == self.window and abs(sum(now) - sum(before)) < self.eta * self.window


class Explore(BaseModel):
    """How rollouts explore, beside sampling at temperature 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    resample: Resample | None = Field(None, description="sample turns again that bring nothing new; None: none")
    thinking: Annotated[EndThinking | None, ADDED] = Field(
        None, description="end reasoning in <think> tags that gets nowhere; None: it ends when the policy ends it"
    )
    temperature: tuple[float, float] | None = Field(
        None,
        description="temperatures of the first and the last iteration of online training, with equal steps between, as "
        "in [1.2, 0.7]; None: 1",
    )
    tool: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="probability that a random call of a random tool takes the place of the policy's turn; it is not "
        "trained on",
    )

    @field_validator("temperature")
    @classmethod
    def _samples(cls, temperature: tuple[float, float] | None) -> tuple[float, float] | None:
        if temperature is not None and min(temperature) <= 0:
            raise ValueError(f"temperatures are above 0, at which nothing is drawn; these are {list(temperature)}")
        return temperature

    @property
    def changes_draws(self) -> str:
        """The setting by which turns are no longer draws of the policy; none if it is empty."""
        if self.temperature is not None:
            return "explore.temperature"
        return "explore.resample" if self.resample is not None and self.resample.eta > 0 else ""

    def sampling(self, plain: Sampling, iteration: int, iterations: int) -> Sampling | None:
        """How an iteration, from 0, of so many samples; None if it is as ``plain``."""
        if self.temperature is None:
            return None
        first, last = self.temperature
        step = min(iteration, iterations - 1) / max(1, iterations - 1)
        return plain.model_copy(update={"temperature": first + (last - first) * step})

    def call(self, episode: Episode, messages: Sequence[Message], random: Random) -> Message | None:
        """A random call in place of the policy's turn, if it is drawn and the episode has tools."""
        if random.random() >= self.tool:
            return None
        return random_call(episode, random, " ".join(message.content for message in messages))


NO_EXPLORATION = Explore()


def uncertainty(logprobs: Sequence[float]) -> float | None:
    """M of a turn; None if it has no tokens."""
    return -sum(logprobs) / len(logprobs) if logprobs else None
