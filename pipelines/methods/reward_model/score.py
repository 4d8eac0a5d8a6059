"""The stage that lets a reward model score stored rows, and pick one of several attempts at each task."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from pydantic import Field

from agentrl.advantages.turns import Span, turn_spans
from agentrl.chat.codec import tokenize
from agentrl.pipelines.handles import RewardModel, Scores, Steps, Trajectories
from agentrl.pipelines.methods.reward_model.measured import ScoredLabels, measures
from agentrl.pipelines.methods.reward_model.picked import ScoredAttempt, best_rows, by_task, picked
from agentrl.pipelines.parts.selected import TEXT_ROWS, check_tokenizer
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards.answers import Declared, final_answer
from agentrl.rollouts.segments import by_attempt
from agentrl.schemas.arrow import to_table
from agentrl.schemas.score import SCORE_SCHEMA, TrajectoryScore
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import INFRASTRUCTURE, RewardComponent, Trajectory

if TYPE_CHECKING:
    from agentrl.training.reward_model import RewardCard, RewardNet

OVER: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "last": lambda scores: scores[-1],
    "mean": fmean,
    "product": prod,
}
"""How scores of turns become that of a row."""


class RewardScoreConfig(StageConfig):
    scorer: str | None = Field(None, description="what stages that read the scores call them; null: the stage's name")
    weight: float = Field(
        0.5,
        gt=0,
        le=1,
        description="the reward of the scores is the stored one plus this times the score: the outcome leads, so at "
        "most 1",
    )
    over: Literal["min", "last", "mean", "product"] = Field(
        "min", description="what a row gets of its turns' scores, for kinds prm and inverse"
    )
    declared: Declared = Field("message", description="where the answer stands that majority votes on")
    micro_tokens: int = Field(8192, ge=1, description="tokens in one pass over the model")


class ScoredRows(NamedTuple):
    scores: Scores
    steps: Steps
    best: Trajectories


class Judged(NamedTuple):
    """A row without its tokens, the spans of its turns, and the scores: of the state before the first turn and after
    each (prm), of each turn (inverse), or after the last action (orm)."""

    row: Trajectory
    spans: list[Span]
    scores: list[float]


@stage("rewards.score", version=1)
def score(
    context: Context, config: RewardScoreConfig, reward_model: RewardModel, trajectories: list[Trajectories]
) -> ScoredRows:
    """Score rows by a reward model: a table of scores as ``trajectories.score`` makes it, for ``prm`` also one of the
    values of turns, and the rows of the attempt at each task that has the highest score. Success stays what it was.

    Rows that the model cannot score, and their reasons, are in the table and counted. Raises ValueError if rows are of
    another tokenizer than the model's.
    """
    from agentrl.training.reward_model import RewardNet

    net, about = RewardNet.load(reward_model.path, f"{reward_model.stage}/{reward_model.fingerprint[:8]}")
    scorer = config.scorer or context.stage
    judged: list[Judged] = []
    scores: list[TrajectoryScore] = []
    total = sum(len(selection.ids()) for selection in trajectories)
    for rows in _parts(trajectories):
        for result in _judged(net, about, rows, config.micro_tokens):
            if isinstance(result, Judged):
                judged.append(result)
            scores.append(_score(result, about, config, scorer))
        context.progress(len(scores), total)
    values = [step for each in judged if about.kind != "orm" for step in _steps(each, about)]
    tasks = by_task(_attempts(judged, about, config))
    known = [each for each in judged if each.row.success is not None]
    context.metrics.update(
        rows=len(scores),
        unscored=len(scores) - len(judged),
        without_outcome=len(judged) - len(known),
        score=fmean(_of_row(each, about, config) for each in judged) if judged else None,
        **measures(
            ScoredLabels(
                [_of_row(each, about, config) for each in known],
                [float(bool(each.row.success)) for each in known],
                [f"{each.row.env} {each.row.task_id}" for each in known],
            )
        ),
        **picked(tasks),
    )
    return ScoredRows(
        context.scores(to_table(scores, SCORE_SCHEMA)),
        context.steps(values),
        context.select(best_rows(tasks), name="best"),
    )


def _parts(trajectories: Sequence[Trajectories]) -> Iterator[list[Trajectory]]:
    """Whole rows, each once, a few at a time, in the order of the selections."""
    seen: set[str] = set()
    for selection in trajectories:
        ids = selection.selection()["trajectory_id"]
        for start in range(0, len(ids), TEXT_ROWS):
            rows = [row for row in selection.rows(ids.slice(start, TEXT_ROWS)) if row.trajectory_id not in seen]
            rows = list({row.trajectory_id: row for row in rows}.values())
            seen.update(row.trajectory_id for row in rows)
            yield rows


def _judged(
    net: "RewardNet", about: "RewardCard", rows: Sequence[Trajectory], micro_tokens: int
) -> "Iterator[Judged | tuple[Trajectory, str]]":
    """What the model says of each row, in order; of those that it cannot score, why."""
    from agentrl.training.rows import TrainingRows

    results: list[Judged | tuple[Trajectory, str]] = []
    marked: list[TrainingRow] = []
    for row in rows:
        if row.termination in INFRASTRUCTURE:
            results.append((row, f"it ended by {row.termination}, which is no doing of the policy"))
            continue
        row = tokenize(row, net.policy.codec, net.policy.tokenizer_fingerprint)
        check_tokenizer(row.trajectory_id, row.tokenizer, net.policy)
        spans = turn_spans(row.messages, row.action_mask)
        if not any(row.action_mask) or not spans or spans[0][0] < 2:
            results.append((row, "it has no action after an opening"))
            continue
        places = _places(about.kind, spans, row.action_mask)
        mask = np.zeros(len(row.input_ids), bool)
        mask[places] = True
        empty = [0.0] * len(mask)
        marked.append(TrainingRow(row_id=row.trajectory_id, input_ids=row.input_ids, mask=mask.tolist(), weights=empty))
        results.append(Judged(row.model_copy(update={"input_ids": [], "action_mask": [], "logprobs": []}), spans, []))
    scores = iter(net.scores(TrainingRows.of(marked), micro_tokens, about.gamma) if marked else [])
    for result in results:
        yield result._replace(scores=next(scores).tolist()) if isinstance(result, Judged) else result


def _places(kind: str, spans: Sequence[Span], mask: Sequence[bool]) -> list[int]:
    """The tokens after which the head speaks: before the first turn and at the end of each (``prm``), at the last token
    of each turn that the policy sampled (``inverse``), or of the row (``orm``)."""
    if kind == "prm":
        return [spans[0][0] - 1, *(end - 1 for _, end in spans)]
    acting = np.flatnonzero(mask)
    if kind == "orm":
        return acting[-1:].tolist()
    owns = [acting[(acting >= start) & (acting < end)] for start, end in spans]
    return [int(own[-1]) if len(own) else end - 1 for own, (_, end) in zip(owns, spans, strict=True)]


def _of_row(judged: Judged, about: "RewardCard", config: RewardScoreConfig) -> float:
    """The score of a row: of an orm the only one, of others that of its turns."""
    turns = judged.scores[1:] if about.kind == "prm" else judged.scores
    return judged.scores[0] if about.kind == "orm" else float(OVER[config.over](turns))


def _score(
    result: "Judged | tuple[Trajectory, str]", about: "RewardCard", config: RewardScoreConfig, scorer: str
) -> TrajectoryScore:
    """The entry of a row in the table. Without a stored reward there is none, whatever the score: it is in the
    components."""
    row = result[0]
    given = {"trajectory_id": row.trajectory_id, "scorer": scorer, "success": row.success}
    if not isinstance(result, Judged):
        return TrajectoryScore(reward=None, why=result[1], **given)
    value = _of_row(result, about, config)
    parts = [RewardComponent(name=scorer, value=value, weight=config.weight)]
    if row.reward is None:
        return TrajectoryScore(reward=None, why="the row has no outcome", components=parts, **given)
    parts.insert(0, RewardComponent(name="environment", value=row.reward, weight=1.0))
    return TrajectoryScore(reward=row.reward + config.weight * value, components=parts, **given)


def _steps(judged: Judged, about: "RewardCard") -> Iterator[StepValue]:
    """The values of a row's turns. The interval is as wide as errors on held-out tasks were; unknown errors leave all
    values possible. An inverse model has rewards of turns in place of values: what they add to 0.5, at which it cannot
    tell a demonstrator's turn."""
    error = 1.0 if about.error is None else about.error
    prm = about.kind == "prm"
    before_each = judged.scores[:-1] if prm else [0.5] * len(judged.scores)
    after_each = judged.scores[1:] if prm else judged.scores
    for turn, ((start, end), before, after) in enumerate(zip(judged.spans, before_each, after_each, strict=True)):
        yield StepValue(
            trajectory_id=judged.row.trajectory_id,
            turn=turn,
            token_start=start,
            token_end=end,
            v=before,
            q=after,
            n=0,
            low=max(0.0, after - error),
            high=min(1.0, after + error),
            by="reward_model",
            policy=about.prover,
        )


def _attempts(judged: Sequence[Judged], about: "RewardCard", config: RewardScoreConfig) -> list[ScoredAttempt]:
    """The attempts that rows are of. The score and the answer of one in several rows are those of its last row."""
    by_id = {each.row.trajectory_id: each for each in judged}
    return [
        ScoredAttempt(
            f"{rows[-1].env} {rows[-1].task_id}",
            [row.trajectory_id for row in rows],
            _of_row(by_id[rows[-1].trajectory_id], about, config),
            rows[-1].success,
            final_answer(rows[-1], config.declared),
        )
        for rows in by_attempt(each.row for each in judged)
    ]
