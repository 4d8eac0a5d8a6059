"""The stage that mixes agents' rows with general ones by a share (AgentTuning: Zeng et al. 2023)."""

import numpy as np
import pyarrow as pa
from pydantic import Field

from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.stage import Context, StageConfig, stage


class MixConfig(StageConfig):
    share: float = Field(0.2, gt=0, lt=1, description="of the weight that the agents' rows have together; eta")


@stage("trajectories.mix", version=1)
def mix(context: Context, config: MixConfig, agent: list[Trajectories], general: list[Trajectories]) -> Trajectories:
    """All rows of both sides, with weights by which the rows of ``agent`` count ``share`` of the whole and those of
    ``general`` the rest: of n rows, one of the agents' side weighs share n w / sum(w), and one of the other side
    (1 - share) n w / sum(w), where w is its weight in its selection and the sum is over its side. In expectation, a
    step of ``train.sft`` then minimises eta E_agent[-log p] + (1 - eta) E_general[-log p] (AgentTuning: Zeng et al.
    2023, section 2.2), up to a factor. ``effective`` is the share of rows that as many rows of equal weight would be
    worth (Kish): where it is small, give the smaller side more rows.

    Raises ValueError if a row is on both sides, or a side has no row of positive weight.
    """
    sides = {"agent": (agent, config.share), "general": (general, 1 - config.share)}
    tables = {name: pa.concat_tables([rows_of.selection() for rows_of in side]) for name, (side, _) in sides.items()}
    if both := set(tables["agent"]["trajectory_id"].to_pylist()) & set(tables["general"]["trajectory_id"].to_pylist()):
        raise ValueError(f"{len(both)} rows are on both sides, such as {min(both)}; wire each to one of them")
    rows = sum(table.num_rows for table in tables.values())
    weights = []
    for name, (_, share) in sides.items():
        given = tables[name]["weight"].to_numpy().astype(np.float64)
        if not given.sum() > 0:
            raise ValueError(f"inputs.{name} has no row of positive weight, so there is nothing to mix")
        weights.append(share * rows * given / given.sum())
    every = np.concatenate(weights)
    context.metrics.update(
        agent=tables["agent"].num_rows,
        general=tables["general"].num_rows,
        effective=float(every.sum() ** 2 / (every**2).sum() / rows),
    )
    ids = pa.concat_tables(tables.values())["trajectory_id"]
    return context.select(ids.to_pylist(), every.tolist())
