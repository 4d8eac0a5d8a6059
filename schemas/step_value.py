"""What the turns of trajectories are worth. Values are tables beside the buffer: no value rewrites a row."""

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import Int32, arrow_schema

STEP_VERSION = 1


class StepValue(BaseModel):
    """One row of a table of values: turn number ``turn`` (from 0) of a trajectory, whose tokens are
    ``input_ids[token_start:token_end]``.

    ``v`` is what the state before the turn is worth and ``q`` what the state after it is, both the mean reward of what
    ``policy`` (the prover) reaches from there; ``n`` is the number of continuations behind ``q``, and ``low`` and
    ``high`` its 95 % interval. ``by`` says how they were found.
    """

    model_config = ConfigDict(extra="forbid")

    trajectory_id: str
    turn: Int32
    token_start: Int32
    token_end: Int32
    v: float
    q: float
    n: Int32
    low: float
    high: float
    by: str
    policy: str

    @property
    def progress(self) -> float:
        """What the turn added."""
        return self.q - self.v


STEP_SCHEMA = arrow_schema(StepValue, STEP_VERSION)
