"""The stage that rewards proposals by how often their tasks are solved."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from pydantic import Field

from agentrl.pipelines.handles import Scores, Tasks, Trajectories
from agentrl.pipelines.methods.zero.ask import made_by, named
from agentrl.pipelines.methods.zero.rewards import AbsoluteZero, Difficulty
from agentrl.pipelines.parts.common import refuse_measured
from agentrl.pipelines.parts.distinct import rows_of
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards.answers import Declared, final_answer, normalized
from agentrl.schemas.arrow import to_table
from agentrl.schemas.score import SCORE_SCHEMA, TrajectoryScore
from agentrl.schemas.trajectory import RewardComponent, Trajectory

Name = tuple[str, str]
"""What :func:`agentrl.pipelines.methods.zero.ask.named` says of a task."""


class JudgeConfig(StageConfig):
    reward: Difficulty = Field(
        AbsoluteZero(), description="what a proposal gets for how often its task is solved: absolute_zero or r_zero"
    )
    invalid: float = Field(
        -1.0, le=0, ge=-1, description="reward of a proposal that became no task; R-Zero gives 0, Absolute Zero -1"
    )
    labels: Literal["verifier", "majority"] = Field(
        "verifier",
        description="what counts as solved: what the environment says, or the answer that most solutions of the task "
        "give, as in R-Zero, which is then their reward too",
    )
    declared: Declared = Field("message", description="where the answer stands that majority votes on")
    within: float = Field(
        0.5, ge=0, le=0.5, description="solutions are kept of tasks with |p - 1/2| up to this; R-Zero: 0.25; 0.5: all"
    )
    scorer: str | None = Field(None, description="what stages that read the scores call them; null: the stage's name")


class JudgedProposals(NamedTuple):
    proposals: Trajectories
    solutions: Trajectories
    scores: Scores


class _Solved(NamedTuple):
    """The solutions of one task with their rewards, [solutions], and the mean rate at which it is solved."""

    rows: list[Trajectory]
    rewards: list[float]
    rate: float


@stage("scores.from_proposals", version=1)
def judge(
    context: Context,
    config: JudgeConfig,
    proposals: list[Trajectories],
    tasks: list[Tasks],
    solutions: list[Trajectories],
) -> JudgedProposals:
    """Rewards of ``proposals``, rollouts of ``tasks.to_propose``, by how often ``solutions`` solve the ``tasks`` that
    ``tasks.from_proposals`` made of them (R-Zero: Huang et al. 2025, arXiv 2508.05004; Absolute Zero: Zhao et al. 2025,
    arXiv 2505.03335). Proposals of one prompt have one rate. Solutions keep their reward, or get that of the majority.

    Proposals at which the environment failed, or whose task nobody tried to the end, have no reward, and are left out
    of the output ``proposals``; the output ``solutions`` has those of tasks ``within`` the band. The metrics count
    both. The rows stay as they are.

    Raises ValueError that names a solution of none of the ``tasks``, or a row that is not of the train split.
    """
    scorer = config.scorer or context.stage
    asked = list(rows_of(proposals))
    tried = list(rows_of(solutions))
    refuse_measured({row.trajectory_id: row.split for row in [*asked, *tried]})
    names = {task.task_id: named(task) for handle in tasks for task in handle.read()}
    solved = _by_task(tried, names, config)
    rewards = _rewards(asked, solved, set(names.values()), config)
    kept = [each for each in solved.values() if abs(each.rate - 0.5) <= config.within + 1e-9]
    scores = [_score(row, rewards[row.trajectory_id], scorer) for row in asked]
    scores += [
        TrajectoryScore(
            trajectory_id=row.trajectory_id,
            scorer=scorer,
            reward=reward,
            success=row.success if config.labels == "verifier" else reward == 1,
            components=[RewardComponent(name="solved", value=reward)],
        )
        for each in solved.values()
        for row, reward in zip(each.rows, each.rewards, strict=True)
    ]
    graded = [row.trajectory_id for row in asked if rewards[row.trajectory_id] is not None]
    within = [row.trajectory_id for each in kept for row in each.rows]
    rates = [each.rate for each in solved.values()]
    context.metrics.update(
        proposals=len(asked),
        unscored=len(asked) - len(graded),
        solutions=len(tried),
        unscored_solutions=len(tried) - sum(len(each.rows) for each in solved.values()),
        tasks=len(solved),
        tasks_within=len(kept),
        never=sum(rate == 0 for rate in rates),
        always=sum(rate == 1 for rate in rates),
    )
    if graded:
        context.metrics.update(reward=fmean(rewards[name] or 0.0 for name in graded))
    if rates:
        context.metrics.update(rate=fmean(rates))
    return JudgedProposals(
        context.select(graded, name="proposals"),
        context.select(within, name="solutions"),
        context.scores(to_table(scores, SCORE_SCHEMA)),
    )


def _by_task(tried: Sequence[Trajectory], names: Mapping[str, Name], config: JudgeConfig) -> dict[Name, _Solved]:
    """The solutions of each task. Those without a score, as after a failure of the machinery, count for nothing."""
    groups: dict[Name, list[Trajectory]] = {}
    for row in tried:
        if row.task_id not in names:
            raise ValueError(
                f"{row.trajectory_id} is of task {row.task_id}, which inputs.tasks lack; wire the tasks that the "
                "solutions were sampled on"
            )
        if row.reward is not None and row.success is not None:
            groups.setdefault(names[row.task_id], []).append(row)
    return {name: _solved(rows, config) for name, rows in groups.items()}


def _solved(rows: list[Trajectory], config: JudgeConfig) -> _Solved:
    if config.labels == "verifier":
        return _Solved(rows, [row.scored_reward() for row in rows], fmean(float(bool(row.success)) for row in rows))
    answers = [normalized(final_answer(row, config.declared) or "") for row in rows]
    votes = Counter(answer for answer in answers if answer)
    label = votes.most_common(1)[0][0] if votes else None  # of equally frequent ones the first
    agree = [float(answer == label) for answer in answers]
    return _Solved(rows, agree, fmean(agree))


def _rewards(
    asked: Sequence[Trajectory], solved: Mapping[Name, _Solved], known: set[Name], config: JudgeConfig
) -> dict[str, float | None]:
    """The reward of each proposal, by its row; None if it has none."""
    rewards: dict[str, float | None] = {}
    valid: dict[str, Name] = {}
    for row in asked:
        task = made_by(row)
        if task is not None and named(task) in solved:
            valid[row.trajectory_id] = named(task)
        else:
            unknown = row.reward is None or (task is not None and named(task) in known)
            rewards[row.trajectory_id] = None if unknown else config.invalid
    given = config.reward.of([solved[name].rate for name in valid.values()], [prompt for _, prompt in valid.values()])
    return rewards | dict(zip(valid, given, strict=True))


def _score(row: Trajectory, reward: float | None, scorer: str) -> TrajectoryScore:
    parts = [] if reward is None else [RewardComponent(name="difficulty", value=reward)]
    why = "" if reward is not None else "the environment failed, or no solution of its task ended with a score"
    return TrajectoryScore(
        trajectory_id=row.trajectory_id, scorer=scorer, reward=reward, success=row.success, components=parts, why=why
    )
