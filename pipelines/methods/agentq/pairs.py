"""Agent Q's pairs, as a stage."""

from collections import Counter
from typing import Annotated, Literal

from pydantic import Field

from agentrl.pipelines.handles import Model, Pairs, Scores, Steps, Trajectories
from agentrl.pipelines.methods.agentq.preferences import step_pairs, trajectory_pairs
from agentrl.pipelines.parts.common import count, tagged_as_not_trained
from agentrl.pipelines.parts.pairing import by_task, tokenised, weighted, whole_episodes
from agentrl.pipelines.parts.scores import ByScorer, under
from agentrl.pipelines.parts.values import values_by_one
from agentrl.pipelines.stage import Context, stage
from agentrl.schemas.annotations import ADDED


class PairsConfig(ByScorer):
    kind: Literal["step", "trajectory"] = Field("step", description="what the loss covers")
    margin: float = Field(0.25, gt=0, description="smallest difference of value between the two sides")
    per_task: int = Field(4, ge=1, description="at most this many pairs of each task")
    apart: Annotated[bool, ADDED] = Field(
        True, description="for inputs.values: the intervals of the two sides must not overlap"
    )
    other_prover: Annotated[bool, ADDED] = Field(
        False, description="for inputs.values: take those of a policy that sampled none of the rows"
    )


@stage("pairs.agentq", version=1)
def agentq(
    context: Context,
    config: PairsConfig,
    trajectories: list[Trajectories],
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
    values: list[Steps] = [],  # noqa: B006  (an input that may be left out)
    model: Model | None = None,
) -> Pairs:
    """Preference pairs from rollouts of the same task: at the steps where they diverge, or of whole rollouts.
    Unscored rows, rows without a turn, and rows that are tagged as not trained on, are left out and counted; so are
    steps without a value, pairs that differ by less than ``margin`` (or whose intervals overlap), and pairs beyond
    ``per_task``. A pair counts by the product of its rows' weights in the selection. Text is tokenised for ``model``,
    and without it left out and counted. Rows of other splits than train are refused.

    With ``values`` the worth of a step is what they say, and not the mean reward of the rollouts through it: a pair's
    steps differ by ``margin``, and their intervals do not overlap unless ``apart`` is false."""
    trajectories = under(trajectories, scores, config.scorer)
    if values and config.kind == "trajectory":
        raise ValueError("inputs.values are those of steps; set kind: step, or leave inputs.values out")
    given = tokenised(context, trajectories, model)
    read = [row for row in given if row.input_ids]
    count(context, {"text": len(given) - len(read)})
    scored = [row for row in read if row.reward is not None]
    groups = by_task(scored)
    left_out: Counter[str] = Counter()
    if config.kind == "trajectory":
        groups = by_task(whole_episodes(context, scored))
        rows = [pair for group in groups for pair in trajectory_pairs(group, config.margin, config.per_task, left_out)]
    else:
        policies = {row.trajectory_id: row.policy for row in scored}
        known = values_by_one(values, policies, config.other_prover) if values else None
        limits = config.margin, config.per_task, known, config.apart, left_out
        rows = [pair for group in groups for pair in step_pairs(group, *limits)]
    left = sum(tagged_as_not_trained(selection) for selection in trajectories)
    context.metrics.update(tasks=len(groups), pairs=len(rows), unscored=len(read) - len(scored), not_trained=left)
    count(context, left_out)
    return context.pairs(weighted(rows, trajectories))
