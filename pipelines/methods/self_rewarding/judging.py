"""Stages that let a policy judge rollouts, its own among them: rollouts become tasks, and verdicts on them scores."""

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from statistics import fmean
from typing import NamedTuple

from pydantic import Field

from agentrl.datastore.search.experience import render
from agentrl.environments import EnvironmentChoice
from agentrl.pipelines.handles import Scores, Tasks, Trajectories
from agentrl.pipelines.parts.common import count
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards.answers import final_answer, normalized
from agentrl.schemas.arrow import to_table
from agentrl.schemas.score import SCORE_SCHEMA, TrajectoryScore
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, RewardComponent, Trajectory
from agentrl.statistics.calibration import auc, auc_within

ASKED = "Did the agent do what was asked? yes or no"
"""How a prompt ends, if the stage does not say otherwise."""

VERDICTS = {True: "yes", False: "no"}


class JudgeTasksConfig(StageConfig):
    env: EnvironmentChoice = Field("predict", validate_default=True, description="what compares verdicts: predict")
    rubrics: list[str] = Field(
        [], description="what a good rollout does, and what it must not do; shown before the question, one a line"
    )
    question: str = Field(ASKED, min_length=1, description="how a prompt ends; it is answered by yes or no")


class JudgeTasks(NamedTuple):
    tasks: Tasks


@stage("tasks.judge", version=1)
def judge(context: Context, config: JudgeTasksConfig, trajectories: list[Trajectories]) -> JudgeTasks:
    """Tasks of judging rollouts, "did the agent do what was asked?", for the environment ``predict``. The right verdict
    is the verified success: demonstrations of it teach a policy to judge, and an evaluation says how well it does.
    Equal rollouts are one task. Rows of unknown success, rows that are not trained on, and equal rollouts that
    succeeded and failed, are left out and counted; a task is of the split of its rows.

    Raises ValueError if no task is left.
    """
    end = "\n".join([*config.rubrics, config.question])
    left_out: Counter[str] = Counter()
    by_prompt: dict[str, list[Trajectory]] = defaultdict(list)
    for row in rows_of(trajectories):
        if reason := _why_not(row):
            left_out[reason] += 1
            continue
        by_prompt[f"{render(row)}\n{end}"].append(row)
    tasks = []
    for prompt, rows in by_prompt.items():
        if len({row.success for row in rows}) > 1:
            left_out["ambiguous"] += len(rows)
            continue
        tasks.append(_task(prompt, rows, str(config.env)))
    count(context, left_out)
    context.metrics.update(tasks=len(tasks), right=sum("yes" in task.ground_truth for task in tasks))
    if not tasks:
        raise ValueError("no rollout can be judged: none has a known success; wire rows of tasks that are verified")
    return JudgeTasks(context.tasks(tasks, "tasks"))


def _why_not(row: Trajectory) -> str | None:
    """Why a row is not judged; None if it is."""
    if NOT_TRAINED in row.tags:
        return "not_trained"
    return "unscored" if row.success is None else None


def _task(prompt: str, rows: Sequence[Trajectory], env: str) -> Task:
    first = rows[0]
    assert first.success is not None
    return Task(
        task_id=f"judge-{blake2b(prompt.encode(), digest_size=8).hexdigest()}",
        env=env,
        split=first.split,
        level=first.level,
        prompt=prompt,
        verifier="similarity",
        ground_truth=json.dumps(VERDICTS[first.success]),
        metadata=json.dumps({"rows": [row.trajectory_id for row in rows], "task": f"{first.env} {first.task_id}"}),
    )


class VerdictsConfig(StageConfig):
    scorer: str | None = Field(None, description="what stages that read the scores call them; null: the stage's name")


class Verdicts(NamedTuple):
    scores: Scores


class JudgedRollout(NamedTuple):
    """A judged task: how many of its verdicts could be read, the share of these that say yes (None: fewer than half
    could be read), the rows, their task, and whether they succeeded."""

    readable: int
    score: float | None
    rows: list[str]
    task: str
    truth: bool


@stage("scores.from_verdicts", version=1)
def scores_from_verdicts(
    context: Context, config: VerdictsConfig, tasks: list[Tasks], trajectories: list[Trajectories]
) -> Verdicts:
    """Scores of rollouts from verdicts on them: ``trajectories`` are rows of ``tasks``, which ``tasks.judge`` made. The
    reward is the share of the readable verdicts that say yes. Among the rollouts of a task the highest score counts as
    a success and the lowest as a failure (Self-Rewarding LM: Yuan et al. 2024, section 2); those between, and all of
    a task with equal scores, are undecided.

    Raises ValueError if no verdict is about the tasks.
    """
    answers: dict[str, list[bool]] = defaultdict(list)
    asked: Counter[str] = Counter()
    for row in rows_of(trajectories):
        asked[row.task_id] += 1
        word = normalized(final_answer(row) or "")
        if word in VERDICTS.values():
            answers[row.task_id].append(word == VERDICTS[True])
    judged = [task for table in tasks for task in table.read() if task.task_id in asked]
    if not judged:
        raise ValueError(
            "inputs.trajectories judge none of inputs.tasks; sample the tasks of tasks.judge, and wire both"
        )
    verdicts = [_verdict(task, answers[task.task_id], asked[task.task_id]) for task in judged]
    scorer = config.scorer or context.stage
    scores = list(_scores(verdicts, scorer))
    context.metrics.update(
        rows=len(scores),
        verdicts=asked.total(),
        unreadable=asked.total() - sum(verdict.readable for verdict in verdicts),
        undecided=sum(score.success is None for score in scores),
    )
    _measure(context, verdicts)
    return Verdicts(context.scores(to_table(scores, SCORE_SCHEMA)))


def _verdict(task: Task, answers: Sequence[bool], asked: int) -> JudgedRollout:
    about = json.loads(task.metadata)
    score = fmean(answers) if answers and 2 * len(answers) >= asked else None
    return JudgedRollout(
        len(answers), score, about["rows"], about["task"], json.loads(task.ground_truth) == VERDICTS[True]
    )


def _scores(verdicts: Sequence[JudgedRollout], scorer: str) -> Iterator[TrajectoryScore]:
    of_task: dict[str, list[float]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.score is not None:
            of_task[verdict.task].append(verdict.score)
    for verdict in verdicts:
        success = _success(verdict, of_task)
        parts = [] if verdict.score is None else [RewardComponent(name="verdict", value=verdict.score)]
        why = "fewer than half of its verdicts could be read" if verdict.score is None else ""
        for name in verdict.rows:
            yield TrajectoryScore(
                trajectory_id=name, scorer=scorer, reward=verdict.score, success=success, components=parts, why=why
            )


def _success(verdict: JudgedRollout, of_task: Mapping[str, Sequence[float]]) -> bool | None:
    """Whether a score is the highest of its task, or the lowest; None if it is neither, or all are equal."""
    if verdict.score is None:
        return None
    low, high = min(of_task[verdict.task]), max(of_task[verdict.task])
    if low == high or low < verdict.score < high:
        return None
    return verdict.score == high


def _measure(context: Context, verdicts: Sequence[JudgedRollout]) -> None:
    """How well verdicts rank rollouts beside their verified success, which no score was made of."""
    known = [(verdict.score, verdict.truth, verdict.task) for verdict in verdicts if verdict.score is not None]
    if not known:
        return
    scores, truth, groups = zip(*known, strict=True)
    within = auc_within(scores, truth, groups)
    context.metrics.update(auc=auc(scores, truth), auc_within=fmean(within) if within else None)
    if within and fmean(within) <= 0.5:
        warnings.warn(
            f"the verdicts rank rollouts of a task no better than chance (auc_within {fmean(within):.2f} over "
            f"{len(within)} tasks): what learns from them learns noise; demonstrate more verdicts, or take a verifier",
            stacklevel=2,
        )
