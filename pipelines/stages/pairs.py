"""Stages that make preference pairs."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from agentrl.search.agentq import by_task, step_pairs, trajectory_pairs
from pipelines.handles import Pairs, Scores, Trajectories
from pipelines.stage import Context, stage
from pipelines.stages.common import warn_of_splits
from pipelines.stages.scores import ByScorer, under
from schemas.trajectory import NOT_TRAINED


class PairsConfig(ByScorer):
    kind: Literal["step", "trajectory"] = Field("step", description="what the loss covers")
    margin: float = Field(0.25, gt=0, description="smallest difference of value between the two sides")
    per_task: int = Field(4, ge=1, description="at most this many pairs of each task")


@stage("pairs.agentq", version=1)
def agentq(
    context: Context,
    config: PairsConfig,
    trajectories: list[Trajectories],
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Pairs:
    """Preference pairs from rollouts of the same task: at the steps where they diverge, or of whole rollouts.
    Unscored rows, and rows that are tagged as not trained on, are left out and counted. A pair counts by the product of
    its rows' weights in the selection."""
    trajectories = under(trajectories, scores, config.scorer)
    make = step_pairs if config.kind == "step" else trajectory_pairs
    weights = {name: weight for selection in trajectories for name, weight in _weights(selection)}
    read = [row for selection in trajectories for row in selection.trained_on() if row.input_ids]
    warn_of_splits(Counter(row.split for row in read), "rows")
    scored = [row for row in read if row.reward is not None]
    groups = by_task(scored)
    rows = [pair for group in groups.values() for pair in make(group, config.margin, config.per_task)]
    tokenizers = Counter(pair.tokenizer for pair in rows)
    if len(tokenizers) > 1:
        raise ValueError(f"rollouts of {len(tokenizers)} tokenizers cannot be paired; give those of one policy family")
    left = sum(tagged_as_not_trained(selection) for selection in trajectories)
    context.metrics.update(tasks=len(groups), pairs=len(rows), unscored=len(read) - len(scored), not_trained=left)
    weighted = (
        pair.model_copy(update={"weight": weights[pair.chosen_id] * weights[pair.rejected_id]}) for pair in rows
    )
    return context.pairs(weighted)


def tagged_as_not_trained(selection: Trajectories) -> int:
    """How many rows of a selection are tagged as not trained on."""
    return sum(NOT_TRAINED in tags for tags in selection.table(["tags"])["tags"].to_pylist())


def _weights(selection: Trajectories) -> Iterator[tuple[str, float]]:
    """(id, weight) of each row."""
    return zip(*selection.selection().to_pydict().values(), strict=True)
