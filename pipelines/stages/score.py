"""The stage that scores stored trajectories again."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from agentrl.datastore.shards.divide import in_groups
from agentrl.datastore.shards.shard import Shard, finished
from agentrl.engines.blocking import blocking
from agentrl.pipelines.handles import Scores, Tasks, Trajectories
from agentrl.pipelines.parts.common import secrets_of
from agentrl.pipelines.parts.divided_scores import (
    keep_tasks,
    kept_tasks,
    pieces_of_batches,
    rows_of,
)
from agentrl.pipelines.parts.dividing import dividing
from agentrl.pipelines.parts.shared_limits import with_shared_limits
from agentrl.pipelines.parts.stored_tasks import KnownTasks, TaskKey, key_of
from agentrl.pipelines.stage import Context, StageConfig, reveal, stage
from agentrl.rewards import Components
from agentrl.rewards.component import Reward, Scored, check_shares, graded
from agentrl.rollouts.segments import by_episode, whole
from agentrl.schemas.arrow import to_table
from agentrl.schemas.score import SCORE_SCHEMA, TrajectoryScore
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import INFRASTRUCTURE, Trajectory

if TYPE_CHECKING:
    from agentrl.datastore.curation.pieces import Piece

AT_ONCE = 256
"""Trajectories that are read and scored at once, and kept if the stage is killed."""


class ScoreConfig(StageConfig):
    rewards: Components = Field(
        min_length=1, description="the whole reward; {type: environment} stands for what the environment gave"
    )
    scorer: str | None = Field(None, description="what stages that read the scores call them; null: the stage's name")

    @model_validator(mode="after")
    def _outcome_leads(self) -> "ScoreConfig":
        check_shares(self.rewards, environment=0.0)
        return self


class Rescored(NamedTuple):
    scores: Scores


@stage("trajectories.score", version=1)
def score(
    context: Context,
    config: ScoreConfig,
    trajectories: list[Trajectories],
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> Rescored:
    """Score stored trajectories by another reward, without any new rollout. The rows stay as they are; the output is a
    table of scores, which stages read if they name the scorer.

    Verifiers need the ground truth, which the wired ``tasks`` have; if none are wired, those that were stored beside
    the buffer do. Components that compare rollouts see those of one ticket, and the segments of an episode as one
    rollout. A trajectory succeeds if the verifiers say so, and without any but ``environment``, as its row says.

    Raises ValueError if some rows are of none of the tasks.
    """
    for secret in secrets_of(config.rewards):
        reveal(secret)
    scorer = config.scorer or context.stage
    known = KnownTasks(trajectories, tasks).by_key
    batches = list(_batches(_groups(trajectories)))
    with dividing(context, "here") as divide:
        assert divide.work is not None
        asked = [divide.work / f"{number:06d}.parquet" for number in range(len(batches))]
        rewards = with_shared_limits(config.rewards, context.engine)
        how = How(context.buffer.store, keep_tasks(known, divide.work), bool(tasks), tuple(rewards), scorer)
        divide.run(_shards(context, batches, asked, how, divide.shards), "scores")
        table = pa.concat_tables([SCORE_SCHEMA.empty_table(), *map(pq.read_table, asked)])
    _report(context, config.rewards, table, trajectories)
    return Rescored(context.scores(table))


class How(NamedTuple):
    """How batches are scored. ``tasks``: a file of all known tasks; ``wired``: whether a row must be of one of them."""

    store: str
    tasks: Path
    wired: bool
    rewards: tuple[Reward, ...]
    scorer: str


def _shards(
    context: Context, batches: list[list[list[str]]], paths: list[Path], how: How, count: int | None
) -> list[Shard]:
    """Shards of those batches that are not scored yet. Which groups are of one batch depends on the rows alone."""
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    ids = [[*chain.from_iterable(batches[number])] for number in missing]
    pieces = dict(zip(missing, pieces_of_batches(context.buffer, ids), strict=True))
    return [
        Shard(f"scores of batches from {some[0]}", f"{__name__}:score_batches", (work, how))
        for some in in_groups(missing, count, 1)
        for work in [[(batches[number], pieces[number], paths[number]) for number in some]]
    ]


def score_batches(work: "Sequence[tuple[list[list[str]], list[Piece], Path]]", how: How) -> None:
    """Score batches of whole groups, and write the scores of each."""
    known = kept_tasks(how.tasks)
    for batch, pieces, path in work:
        if not path.exists():
            rows = rows_of(how.store, pieces, [*chain.from_iterable(batch)])
            made = blocking(_scored(batch, rows, known, how.wired, how.rewards, how.scorer))
            with finished(path) as unfinished:
                pq.write_table(to_table(made, SCORE_SCHEMA), unfinished)


def _groups(trajectories: list[Trajectories]) -> list[list[str]]:
    """Ids of the rollouts of each ticket, each once, in the order of the selections."""
    groups: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    columns = ["trajectory_id", "group_id", "task_id", "fingerprint", "policy", "policy_version"]
    for selection in trajectories:
        for row in selection.table(columns).to_pylist():
            ticket = row["group_id"] if row["group_id"] != row["task_id"] else None
            made_by = f"{row['fingerprint']} {row['policy']} {row['policy_version']}"
            groups[row["task_id"], ticket or made_by][row["trajectory_id"]] = None
    return [list(group) for group in groups.values()]


def _batches(groups: list[list[str]]) -> Iterator[list[list[str]]]:
    """Whole groups, about :data:`AT_ONCE` trajectories at a time."""
    batch: list[list[str]] = []
    for group in groups:
        batch.append(group)
        if sum(map(len, batch)) >= AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


async def _scored(
    batch: list[list[str]],
    rows: list[Trajectory],
    known: dict[TaskKey, Task],
    has_tasks: bool,
    rewards: Sequence[Reward],
    scorer: str,
) -> list[TrajectoryScore]:
    by_id = {row.trajectory_id: row for row in rows}
    groups = [by_episode(by_id[name] for name in group) for group in batch]
    work = [_graded([*map(whole, group)], _task(group[0][0], known, has_tasks), rewards) for group in groups]
    try:
        results = await asyncio.gather(*work)
    finally:
        for reward in rewards:
            await reward.close()
    return [
        TrajectoryScore(
            trajectory_id=row.trajectory_id,
            scorer=scorer,
            reward=result.reward,
            success=_success(row, {part.name: part.value for part in result.components}, rewards),
            components=result.components,
            why=result.why,
        )
        for group, scored in zip(groups, results, strict=True)
        for episode, result in zip(group, scored, strict=True)
        for row in episode
    ]


async def _graded(episodes: Sequence[Trajectory], task: Task, rewards: Sequence[Reward]) -> list[Scored]:
    """What each episode of a group gets. Those that failed by no doing of the policy get nothing, and are compared with
    none."""
    tried = [row for row in episodes if row.termination not in INFRASTRUCTURE]
    given = iter(await graded(tried, task, rewards) if tried else [])
    return [
        Scored(None, [], f"it ended by {row.termination}, which is no doing of the policy")
        if row.termination in INFRASTRUCTURE
        else next(given)
        for row in episodes
    ]


def _task(row: Trajectory, known: dict[TaskKey, Task], has_tasks: bool) -> Task:
    if key_of(row) in known:
        return known[key_of(row)]
    if has_tasks:
        raise ValueError(f"{row.trajectory_id} is of task {row.task_id}, which inputs.tasks lack; wire all tasks")
    return Task(task_id=row.task_id, env=row.env, split=row.split, level=row.level, prompt=row.prompt, tools=row.tools)


def _success(row: Trajectory, values: dict[str, float], rewards: Sequence[Reward]) -> bool | None:
    verifiers = [reward for reward in rewards if reward.is_outcome and reward.type != "environment"]
    if not verifiers:
        return row.success
    if any(reward.component not in values for reward in verifiers):
        return None
    return all(reward.solved(values[reward.component]) for reward in verifiers)


def _report(context: Context, rewards: Sequence[Reward], table: pa.Table, trajectories: list[Trajectories]) -> None:
    """Metrics, and the reviews of the components. The segments of an episode count once."""
    columns = ["trajectory_id", "success", "segment"]
    outcomes = {
        row["trajectory_id"]: row["success"]
        for selection in trajectories
        for row in selection.table(columns).to_pylist()
        if not row["segment"]
    }
    rows = [row for row in table.to_pylist() if row["trajectory_id"] in outcomes]
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        for part in row["components"]:
            values[part["name"]][row["trajectory_id"]] = part["value"]
    for reward in rewards:
        graded_rows = values[reward.component]
        for name, measure in reward.review([(value, outcomes[row]) for row, value in graded_rows.items()]).items():
            context.metrics[f"{reward.component}.{name}"] = measure
    context.metrics.update({name: fmean(each.values()) for name, each in values.items() if each})
    scored = [row["reward"] for row in rows if row["reward"] is not None]
    context.metrics.update(rows=len(rows), unscored=len(rows) - len(scored))
    if scored:
        context.metrics.update(reward=fmean(scored))
    success = [row["success"] for row in rows if row["success"] is not None]
    if success:
        context.metrics.update(success=fmean(success))
