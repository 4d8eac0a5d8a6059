"""How many episodes are under way at once, and how long each part of one may take."""

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits of episodes. A tool that takes too long is answered by an observation that says so. A turn or an episode
    that takes too long is cut: its row is kept, with ``termination: time_limit``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    in_flight: int = Field(256, ge=1, description="episodes under way at once")
    tool_s: float = Field(60.0, gt=0, description="seconds of one tool call")
    turn_s: float = Field(600.0, gt=0, description="seconds of one turn of the policy")
    episode_s: float = Field(3600.0, gt=0, description="seconds of one episode, from its start to its last turn")
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


DEFAULT_LIMITS = Limits()
