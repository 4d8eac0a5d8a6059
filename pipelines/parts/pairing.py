"""What stages that make preference pairs share: rows that can be paired, and the pair of two sides."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agentrl.advantages.turns import acting
from agentrl.chat.codec import tokenize
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.parts.common import count, refuse_measured
from agentrl.pipelines.parts.distinct import weights_of
from agentrl.pipelines.stage import Context
from agentrl.schemas.pair import Pair, PairKind
from agentrl.schemas.trajectory import Trajectory


@dataclass(frozen=True)
class SideOfPair:
    """A rollout up to the token ``end`` (exclusive). What counts of it are its action tokens from ``start`` on."""

    trajectory: Trajectory
    start: int
    end: int


def pair_of(
    number: int, kind: PairKind, chosen: SideOfPair, rejected: SideOfPair, values: tuple[float, float], by: str
) -> Pair:
    """The pair ``number`` of a task. ``values`` are those of the two sides, ``by`` is the method that made it."""
    first, second = chosen.trajectory, rejected.trajectory

    def side(turn: SideOfPair) -> tuple[list[int], list[bool]]:
        mask = turn.trajectory.action_mask[: turn.end]
        return turn.trajectory.input_ids[: turn.end], [False] * turn.start + mask[turn.start :]

    chosen_ids, chosen_mask = side(chosen)
    rejected_ids, rejected_mask = side(rejected)
    shared = next(
        (i for i, (a, b) in enumerate(zip(chosen_ids, rejected_ids, strict=False)) if a != b),
        min(len(chosen_ids), len(rejected_ids)),
    )
    return Pair(
        pair_id=f"{first.task_id}-{kind}-{number}",
        task_id=first.task_id,
        kind=kind,
        chosen_id=first.trajectory_id,
        rejected_id=second.trajectory_id,
        method=by,
        chosen_reward=values[0],
        rejected_reward=values[1],
        shared_prefix=shared,
        tokenizer=first.tokenizer,
        chosen_ids=chosen_ids,
        chosen_mask=chosen_mask,
        rejected_ids=rejected_ids,
        rejected_mask=rejected_mask,
    )


def whole_episodes(context: Context, rows: list[Trajectory]) -> list[Trajectory]:
    """Rows that are whole episodes. Others are left out and counted: segments begin with different prompts."""
    parts = Counter(row.episode_id or row.trajectory_id for row in rows)
    whole = [row for row in rows if not row.segment and parts[row.episode_id or row.trajectory_id] == 1]
    if len(whole) < len(rows):
        context.metrics["segments_left_out"] = len(rows) - len(whole)
    return whole


def tokenised(context: Context, trajectories: list[Trajectories], model: Model | None) -> list[Trajectory]:
    """Rows that are trained on, and have a turn, each once. Text is tokenised for the model, if there is one.

    Raises ValueError that names a row of another split than train.
    """
    from agentrl.models.policy import Tokenizing

    given = {row.trajectory_id: row for selection in trajectories for row in selection.trained_on()}.values()
    refuse_measured({row.trajectory_id: row.split for row in given})
    rows = [row for row in given if acting(row.messages)]
    count(context, {"no_turns": len(given) - len(rows)})
    if model is None:
        return rows
    speaker = Tokenizing(model.path, model.name)
    return [row if row.input_ids else tokenize(row, speaker.codec, speaker.tokenizer_fingerprint) for row in rows]


def weighted(pairs: list[Pair], trajectories: list[Trajectories]) -> Iterator[Pair]:
    """Pairs that count by the product of their rows' weights. Raises ValueError if they are of several tokenizers."""
    tokenizers = {pair.tokenizer for pair in pairs}
    if len(tokenizers) > 1:
        raise ValueError(f"rollouts of {len(tokenizers)} tokenizers cannot be paired; give those of one policy family")
    weights = weights_of(trajectories)
    return (pair.model_copy(update={"weight": weights[pair.chosen_id] * weights[pair.rejected_id]}) for pair in pairs)


def by_task(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories grouped by task, in order of first appearance. Other settings of an environment may have drawn
    another question under the same id, which is another task."""
    groups: dict[tuple[str, str], list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.task_id, trajectory.prompt].append(trajectory)
    return list(groups.values())
