"""Keep the trajectories that a judge likes."""

from typing import NamedTuple

import pyarrow as pa
from pydantic import Field

from agentrl.pipelines.handles import Table, Trajectories
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.schemas.trajectory import Trajectory


class ScoreConfig(StageConfig):
    threshold: float = Field(0.5, ge=0, le=1, description="lowest score that is kept")
    per_tool_call: float = Field(0.1, ge=0, description="what each call of a tool costs")


class Scored(NamedTuple):
    kept: Trajectories
    scores: Table


def score_one(row: Trajectory, per_tool_call: float) -> float:
    return max(0.0, row.scored_reward() - per_tool_call * row.n_tool_calls)


@stage("my_project.score", version=1)
def score(context: Context, config: ScoreConfig, trajectories: Trajectories) -> Scored:
    """Score every trajectory, and keep the good ones, best first."""
    rows = trajectories.read()
    scores = {}
    for number, row in enumerate(rows, 1):
        scores[row.trajectory_id] = score_one(row, config.per_tool_call)
        context.progress(number, len(rows))
    kept = sorted((name for name in scores if scores[name] >= config.threshold), key=lambda name: (-scores[name], name))
    context.metrics.update(kept=len(kept), mean=sum(scores.values()) / len(scores))
    table = pa.table({"trajectory_id": list(scores), "score": list(scores.values())})
    return Scored(context.select(kept, name="kept"), context.table(table, "scores"))
