"""Faults of tools, injected on purpose: too many requests, server errors, time-outs, and answers that are cut short.

Whether a call fails depends on the task and on the number of the call alone. So every sample of a task meets the same
faults at the same calls, a recorded episode can be replayed, and a retry is a new call with a new chance.
"""

from dataclasses import replace
from random import Random

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.environments.base import Observation

SERVER_ERRORS = ("500 internal server error", "502 bad gateway", "503 service unavailable")


class Faults(BaseModel):
    """Probabilities for one call. A call that fails has not been made, except that the answer of a truncated one is
    cut after the call."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate_limit: float = Field(0.0, ge=0, le=1, description="429 too many requests, with the seconds to wait")
    server_error: float = Field(0.0, ge=0, le=1, description="500, 502 or 503")
    timeout: float = Field(0.0, ge=0, le=1, description="no answer in time")
    truncated: float = Field(0.0, ge=0, le=1, description="the answer ends after its first part")
    seed: int = Field(0, description="other seeds fail at other calls")

    @model_validator(mode="after")
    def _is_a_distribution(self) -> "Faults":
        whole = self.rate_limit + self.server_error + self.timeout + self.truncated
        if whole > 1:
            raise ValueError(f"the probabilities of all faults together are {whole:g}; at most 1 is allowed")
        return self

    def __bool__(self) -> bool:
        return bool(self.rate_limit or self.server_error or self.timeout or self.truncated)

    def draw(self, task_id: str, number: int) -> str | None:
        """The name of the fault that the ``number``-th call at a task meets, or None."""
        if not self:
            return None
        left = self._random(task_id, number).random()
        for name in ("rate_limit", "server_error", "timeout", "truncated"):
            left -= getattr(self, name)
            if left < 0:
                return name
        return None

    def refusal(self, fault: str, task_id: str, number: int) -> Observation:
        """What the policy reads in place of an answer."""
        random = self._random(task_id, number)
        random.random()
        text = {
            "rate_limit": f"429 too many requests; retry-after: {random.choice((1, 2, 5, 10))}",
            "server_error": random.choice(SERVER_ERRORS),
            "timeout": "504 gateway time-out: no answer within 30 s",
        }[fault]
        return Observation(text, error=True)

    @staticmethod
    def cut(observation: Observation) -> Observation:
        """An answer that ends after its first part, and says so."""
        if len(observation.content) < 8:
            return observation
        kept = observation.content[: len(observation.content) // 2]
        return replace(observation, content=f"{kept}\n[truncated; ask again for all of it]")

    def _random(self, task_id: str, number: int) -> Random:
        return Random(f"faults-{self.seed}-{task_id}-{number}")
