"""The stage that cuts long rows into segments."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from agentrl.advantages.turns import acting
from agentrl.chat.codec import tokenize
from agentrl.pipelines.handles import Model, Trajectories
from agentrl.pipelines.parts.common import count, load_policy, refuse_measured
from agentrl.pipelines.parts.selected import check_tokenizer
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rollouts.compression import ASK, By, StepTooLongError, segments
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

ROWS_AT_ONCE = 256


class SegmentConfig(StageConfig):
    limit: int = Field(ge=32, description="tokens of a segment, prompt and observations included")
    keep_last: int = Field(1, ge=0, description="steps before a segment that stand in it again, not trained on")
    by: By = Field(
        "drop",
        description="what stands for steps that are left out: nothing, a line for each call, or a scripted summary, "
        "which is trained on where it is given",
    )
    ask: Annotated[str, ADDED] = Field(ASK, min_length=1, description="how a summary is asked for")


@stage("trajectories.segment", version=1)
def segment(context: Context, config: SegmentConfig, trajectories: list[Trajectories], model: Model) -> Trajectories:
    """Rows that are longer than ``limit`` as segments, which are rows of one episode; shorter rows as they are. A
    segment begins with the prompt, what stands for the steps before it, and the last of these. Each sampled turn is
    trained on in one segment.

    Segments are encoded anew with the tokenizer of ``model``, and their log-probs are NaN: they are for supervised
    training alone. A row with a step that does not fit, or without a turn, is left out and counted. Rows of other
    splits than train are refused.
    """
    policy = load_policy(model)
    counts = Counter(fitting=0, cut=0, step_too_long=0, no_turns=0)
    for selection in trajectories:
        refuse_measured(dict(zip(*selection.table(["trajectory_id", "split"]).to_pydict().values(), strict=True)))
    made: list[Trajectory] = []
    chosen: list[tuple[str, float]] = []
    for row, weight in _rows(trajectories):
        if not acting(row.messages):
            counts["no_turns"] += 1
            continue
        if row.input_ids:
            check_tokenizer(row.trajectory_id, row.tokenizer, policy)
        parts = _parts(row, policy, config, counts)
        if parts is None:
            chosen.append((row.trajectory_id, weight))
            continue
        for part in parts:
            name = context.trajectory_id(len(made))
            made.append(part.model_copy(update={"trajectory_id": name}))
            chosen.append((name, weight))
    context.append(made)
    count(context, {**counts, "segments": len(made)})
    return context.select([name for name, _ in chosen], [weight for _, weight in chosen])


def _rows(trajectories: list[Trajectories]) -> Iterator[tuple[Trajectory, float]]:
    for selection in trajectories:
        ids, weights = selection.selection().columns
        for start in range(0, len(ids), ROWS_AT_ONCE):
            rows = selection.rows(ids.slice(start, ROWS_AT_ONCE))
            yield from zip(rows, weights.slice(start, ROWS_AT_ONCE).to_pylist(), strict=True)


def _parts(row: Trajectory, policy: "Policy", config: SegmentConfig, counts: Counter[str]) -> list[Trajectory] | None:
    """The segments of a row, none if a step does not fit; None if the row itself fits."""
    tokenizer = policy.tokenizer_fingerprint
    if tokenize(row, policy.codec, tokenizer).n_tokens <= config.limit:
        counts["fitting"] += 1
        return None
    try:
        parts = segments(row, policy.codec, tokenizer, config.limit, config.keep_last, config.by, config.ask)
    except StepTooLongError:
        counts["step_too_long"] += 1
        return []
    counts["cut"] += 1
    return parts
