"""Stages that make preference pairs."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from agentrl.advantages.turns import acting
from agentrl.chat.codec import tokenize
from agentrl.pipelines.handles import Model, Pairs, Scores, Steps, Trajectories
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.pipelines.stages.common import count, refuse_measured, tagged_as_not_trained
from agentrl.pipelines.stages.scores import ByScorer, under
from agentrl.pipelines.stages.values import values_by_one
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.pair import Pair
from agentrl.schemas.trajectory import Trajectory
from agentrl.search.agentq import by_task, outcome_pairs, step_pairs, trajectory_pairs


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
    given = _tokenised(context, trajectories, model)
    read = [row for row in given if row.input_ids]
    count(context, {"text": len(given) - len(read)})
    scored = [row for row in read if row.reward is not None]
    groups = by_task(scored)
    left_out: Counter[str] = Counter()
    if config.kind == "trajectory":
        groups = by_task(_whole(context, scored))
        rows = [
            pair
            for group in groups.values()
            for pair in trajectory_pairs(group, config.margin, config.per_task, left_out)
        ]
    else:
        policies = {row.trajectory_id: row.policy for row in scored}
        known = values_by_one(values, policies, config.other_prover) if values else None
        limits = config.margin, config.per_task, known, config.apart, left_out
        rows = [pair for group in groups.values() for pair in step_pairs(group, *limits)]
    left = sum(tagged_as_not_trained(selection) for selection in trajectories)
    context.metrics.update(tasks=len(groups), pairs=len(rows), unscored=len(read) - len(scored), not_trained=left)
    count(context, left_out)
    return context.pairs(_weighted(rows, trajectories))


class OutcomeConfig(StageConfig):
    cut: int | None = Field(
        5, ge=0, description="a failure is cut to the turns of the success and so many more; null: it is kept whole"
    )
    per_task: int = Field(4, ge=1, description="at most this many pairs of each task")


@stage("pairs.outcome", version=1)
def outcome(
    context: Context, config: OutcomeConfig, trajectories: list[Trajectories], model: Model | None = None
) -> Pairs:
    """Preference pairs of whole rollouts, a success against a failure of the same task (ETO: Song et al. 2024): of the
    policy's own, or an expert's against the policy's. Text is tokenised for ``model``, which is needed for it.
    Unscored rows, rows without a turn, and rows that are tagged as not trained on, are left out and counted. Rows of
    other splits than train are refused."""
    read = _tokenised(context, trajectories, model)
    if text := [row.trajectory_id for row in read if not row.input_ids]:
        raise ValueError(f"{text[0]} is text; wire inputs.model, for which it is tokenised")
    scored = [row for row in read if row.success is not None and row.reward is not None]
    groups = by_task(_whole(context, scored))
    left_out: Counter[str] = Counter()
    rows = [pair for group in groups.values() for pair in outcome_pairs(group, config.cut, config.per_task, left_out)]
    left = sum(tagged_as_not_trained(selection) for selection in trajectories)
    both = sum(len({row.success for row in group}) == 2 for group in groups.values())
    context.metrics.update(
        tasks=len(groups), mixed_tasks=both, pairs=len(rows), unscored=len(read) - len(scored), not_trained=left
    )
    count(context, left_out)
    return context.pairs(_weighted(rows, trajectories))


def _whole(context: Context, rows: list[Trajectory]) -> list[Trajectory]:
    """Rows that are whole episodes. Others are left out and counted: segments begin with different prompts."""
    parts = Counter(row.episode_id or row.trajectory_id for row in rows)
    found = [row for row in rows if not row.segment and parts[row.episode_id or row.trajectory_id] == 1]
    if len(found) < len(rows):
        context.metrics["segments_left_out"] = len(rows) - len(found)
    return found


def _tokenised(context: Context, trajectories: list[Trajectories], model: Model | None) -> list[Trajectory]:
    """Rows that are trained on, and have a turn. Text is tokenised for the model, if there is one.

    Raises ValueError that names a row of another split than train.
    """
    from agentrl.models.policy import Tokenizing

    given = [row for selection in trajectories for row in selection.trained_on()]
    refuse_measured({row.trajectory_id: row.split for row in given})
    rows = [row for row in given if acting(row.messages)]
    count(context, {"no_turns": len(given) - len(rows)})
    if model is None:
        return rows
    speaker = Tokenizing(model.path, model.name)
    return [row if row.input_ids else tokenize(row, speaker.codec, speaker.tokenizer_fingerprint) for row in rows]


def _weighted(pairs: list[Pair], trajectories: list[Trajectories]) -> Iterator[Pair]:
    """Pairs that count by the product of their rows' weights. Raises ValueError if they are of several tokenizers."""
    tokenizers = {pair.tokenizer for pair in pairs}
    if len(tokenizers) > 1:
        raise ValueError(f"rollouts of {len(tokenizers)} tokenizers cannot be paired; give those of one policy family")
    weights = {name: weight for selection in trajectories for name, weight in _weights(selection)}
    return (pair.model_copy(update={"weight": weights[pair.chosen_id] * weights[pair.rejected_id]}) for pair in pairs)


def _weights(selection: Trajectories) -> Iterator[tuple[str, float]]:
    """(id, weight) of each row."""
    return zip(*selection.selection().to_pydict().values(), strict=True)
