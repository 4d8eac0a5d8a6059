"""How many episodes are under way at once, and how long each part of one may take."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from agentrl.schemas.annotations import ADDED

_LONGEST_PAUSE_S = 300.0


class Retry(BaseModel):
    """How often an episode is begun again that failed by no doing of the policy: its environment, a tool's server, the
    sandbox, an endpoint or the network did. It is sampled with the same seed, and what an attempt would only repeat (a
    request that is refused, a replay that diverged) is not begun again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    attempts: int = Field(2, ge=1, description="of one episode in all; 1: none is made again")
    backoff_s: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds before the second attempt; each later wait is twice as long",
    )
    tool_timeouts: bool = Field(
        False,
        description="a tool that takes longer than tool_s fails the attempt, as infra_error; false: the policy reads "
        "that it took too long",
    )

    def pause(self, failed: int) -> float:
        """Seconds to wait after the attempt number ``failed``, from 1."""
        return float(min(_LONGEST_PAUSE_S, self.backoff_s * 2 ** min(failed - 1, 32)))


class Limits(BaseModel):
    """Limits of episodes. A tool that takes too long is answered by an observation that says so. A turn or an episode
    that takes too long is cut: its row is kept, with ``termination: time_limit``. Turns of an engine that is
    reproducible (embedded, ``schedule: exact``) take as long as they take, so that rows do not depend on the machine;
    an agent program has its time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    in_flight: int = Field(256, ge=1, description="episodes under way at once")
    tool_s: float = Field(60.0, gt=0, description="seconds of one tool call")
    turn_s: float = Field(
        600.0, gt=0, description="seconds of one turn of the policy; none for an embedded engine with schedule: exact"
    )
    episode_s: float = Field(
        3600.0,
        gt=0,
        description="seconds of one episode, from its start to its last turn; turns without a turn_s do not count",
    )
    environment_s: float = Field(300.0, gt=0, description="seconds of starting, scoring and closing an episode, each")
    max_steps: int | None = Field(
        None, ge=1, description="assistant messages of an episode; None: what the environment says"
    )
    format_retries: int | None = Field(
        None,
        ge=0,
        description="turns with calls that cannot be read, each answered by what is wrong; the next one ends the "
        "episode; None: what the environment says, or 0",
    )
    observation_chars: int = Field(100_000, ge=100, description="characters of one tool's answer; the rest is cut")
    observation_tokens: int | None = Field(
        None, ge=64, description="tokens of one tool's answer, for engines with token ids; the rest is cut. None: any"
    )
    processes: int = Field(
        0, ge=0, description="synchronous environments act in this many processes, one per episode; 0: in threads"
    )
    retry: Annotated[Retry, ADDED] = Field(
        Retry(), description="how often an episode is begun again that failed by no doing of the policy"
    )


DEFAULT_LIMITS = Limits()
