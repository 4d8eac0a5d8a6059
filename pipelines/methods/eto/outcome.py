"""Outcome pairs (ETO: Song et al. 2024): a success is preferred to a failure at the same task."""

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from agentrl.advantages.turns import turn_spans
from agentrl.pipelines.handles import Model, Pairs, Scores, Trajectories
from agentrl.pipelines.parts.common import count, tagged_as_not_trained
from agentrl.pipelines.parts.pairing import SideOfPair, by_task, pair_of, tokenised, weighted, whole_episodes
from agentrl.pipelines.parts.scores import ByScorer, under
from agentrl.pipelines.stage import Context, stage
from agentrl.schemas.pair import Pair, PairKind
from agentrl.schemas.trajectory import Trajectory


class OutcomeConfig(ByScorer):
    cut: int | None = Field(
        5, ge=0, description="a failure is cut to the turns of the success and so many more; null: it is kept whole"
    )
    per_task: int = Field(4, ge=1, description="at most this many pairs of each task")


@stage("pairs.outcome", version=1)
def outcome(
    context: Context,
    config: OutcomeConfig,
    trajectories: list[Trajectories],
    model: Model | None = None,
    scores: list[Scores] = [],  # noqa: B006  (an input that may be left out)
) -> Pairs:
    """Preference pairs of whole rollouts, a success against a failure of the same task (ETO: Song et al. 2024): of the
    policy's own, or an expert's against the policy's. Text is tokenised for ``model``, which is needed for it.
    With a ``scorer``, it says what is a success.
    Unscored rows, rows without a turn, and rows that are tagged as not trained on, are left out and counted. Rows of
    other splits than train are refused."""
    trajectories = under(trajectories, scores, config.scorer)
    read = tokenised(context, trajectories, model)
    if text := [row.trajectory_id for row in read if not row.input_ids]:
        raise ValueError(f"{text[0]} is text; wire inputs.model, for which it is tokenised")
    scored = [row for row in read if row.success is not None and row.reward is not None]
    groups = by_task(whole_episodes(context, scored))
    left_out: Counter[str] = Counter()
    rows = [pair for group in groups for pair in outcome_pairs(group, config.cut, config.per_task, left_out)]
    left = sum(tagged_as_not_trained(selection) for selection in trajectories)
    both = sum(len({row.success for row in group}) == 2 for group in groups)
    context.metrics.update(
        tasks=len(groups), mixed_tasks=both, pairs=len(rows), unscored=len(read) - len(scored), not_trained=left
    )
    count(context, left_out)
    return context.pairs(weighted(rows, trajectories))


def outcome_pairs(
    rollouts: Sequence[Trajectory], cut: int | None, limit: int, counts: Counter[str] | None = None
) -> list[Pair]:
    """ETO's pairs of *one* task (Song et al. 2024): successes against failures. The failure is cut to as many turns as
    the success has and ``cut`` more; None keeps it whole. Each failure is rejected once, the longest shared prefix
    first, against the success that shares the longest prefix with it, then the shortest; at most ``limit``. ``counts``
    is told of ``pairs_beyond_per_task``."""
    successes = [row for row in rollouts if row.scored_success()]
    pairs = []
    for failure in rollouts:
        if failure.scored_success() or not successes:
            continue
        success = min(successes, key=lambda row: (-_shared(row, failure), row.n_tokens, row.trajectory_id))
        spans = turn_spans(failure.messages, failure.action_mask)
        turns = len(turn_spans(success.messages, success.action_mask)) + cut if cut is not None else len(spans)
        end = spans[turns - 1][1] if turns < len(spans) else failure.n_tokens
        if end > failure.fork_at:
            pairs.append((_shared(success, failure), success, failure, end))
    pairs.sort(key=lambda pair: (-pair[0], pair[2].trajectory_id))
    if counts is not None:
        counts["pairs_beyond_per_task"] += max(0, len(pairs) - limit)
    return [
        pair_of(
            number,
            PairKind.TRAJECTORY,
            SideOfPair(success, 0, success.n_tokens),
            SideOfPair(failure, 0, end),
            (success.scored_reward(), failure.scored_reward()),
            "eto",
        )
        for number, (_, success, failure, end) in enumerate(pairs[:limit])
    ]


def _shared(first: Trajectory, other: Trajectory) -> int:
    """The number of leading tokens that two rows share."""
    both = zip(first.input_ids, other.input_ids, strict=False)
    return next((index for index, (a, b) in enumerate(both) if a != b), min(first.n_tokens, other.n_tokens))
