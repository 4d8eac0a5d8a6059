"""The reward that a scorer gives a trajectory. Scores are tables beside the buffer: no score rewrites a row."""

from pydantic import BaseModel, ConfigDict

from agentrl.schemas.arrow import arrow_schema
from agentrl.schemas.trajectory import RewardComponent

SCORE_VERSION = 1


class TrajectoryScore(BaseModel):
    """One row of a table of scores. ``reward`` is None if the scorer could not score the trajectory, and ``why`` says
    why; ``success`` is None if it is not known."""

    model_config = ConfigDict(extra="forbid")

    trajectory_id: str
    scorer: str
    reward: float | None
    success: bool | None
    components: list[RewardComponent] = []
    why: str = ""


SCORE_SCHEMA = arrow_schema(TrajectoryScore, SCORE_VERSION)
