"""Other rewards of stored rollouts: other weights of the components that rows have, and components that can be computed
from a row and its task."""

import asyncio
from collections.abc import Mapping, Sequence

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.engines.blocking import blocking
from agentrl.pipelines.file.problems import did_you_mean
from agentrl.pipelines.parts.stored_tasks import TaskKey, key_of
from agentrl.pipelines.replay.settings import ReplayError
from agentrl.rewards.asking import Asking
from agentrl.rewards.component import Reward, Scored, graded
from agentrl.rollouts.segments import by_episode, whole
from agentrl.schemas.arrow import from_table
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, RewardComponent, Trajectory

ENVIRONMENT = "environment"
"""The name of what the environment gave, whatever its components are."""

STORED_ALONE = "a component sees the stored row and its task, and never the environment"


class OtherRewards:
    """What rollouts are worth by the components ``wanted`` and ``weights`` of what their environment gave, by the name
    of the component, in place of the ``recorded`` components. What a component gave when it was recorded is not asked
    for again; others are computed from the rows and their tasks, which ``buffer`` holds.

    Raises ReplayError if a component asks a model, or one that is the whole reward comes or goes.
    """

    def __init__(
        self,
        recorded: Sequence[Reward],
        wanted: Sequence[Reward],
        weights: Mapping[str, float],
        buffer: TrajectoryBuffer,
    ) -> None:
        known = {reward.component: reward for reward in recorded}
        self.recorded, self.wanted, self.weights, self.buffer = known, list(wanted), weights, buffer
        self.new = [reward for reward in wanted if not _same(reward, known.get(reward.component))]
        before, after = ({each.component for each in part if each.is_whole} for part in (recorded, wanted))
        if before != after:
            raise ReplayError(
                f"rewards: {', '.join(before ^ after)} with alone: true is the whole reward in one of both, and rows "
                "have one; run the stage again with it, or score the rows by trajectories.score"
            )
        for reward in self.new:
            if isinstance(reward, Asking):
                raise ReplayError(
                    f"rewards: {reward.component} asks a model, whose verdicts these rows do not have, and a replay "
                    "asks none; score the rows by trajectories.score, or run the stage again with it"
                )

    def of(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """Whole groups of rollouts with these rewards, in their order. Rows without a reward stay as they are; those
        that a component cannot grade lose theirs.

        Raises ReplayError if a weight is of no component that rows have, or a component can grade none of them.
        """
        self._check_names(rows)
        unchanged = {reward.component: reward.weight for reward in self.wanted} == {
            name: reward.weight for name, reward in self.recorded.items()
        }
        if unchanged and not self.new and not self.weights:
            return list(rows)
        more = self._graded(rows) if self.new else {}
        return [self._again(row, more.get(row.trajectory_id)) if _counts(row) else row for row in rows]

    def _check_names(self, rows: Sequence[Trajectory]) -> None:
        own = {part.name for row in rows for part in self._given(row)}
        for name in self.weights:
            if name not in own | {ENVIRONMENT}:
                stages = {reward.component for reward in self.wanted}
                names = sorted(own | stages | {ENVIRONMENT})
                raise ReplayError(
                    f"--set rewards.{name}={self.weights[name]:g}: these rows have no component {name!r}; they have "
                    f"{', '.join(names)}{did_you_mean(name, names)}. What the environment did not store cannot be "
                    "computed without it: run the stage again with an environment that gives it, or name a component "
                    "that needs the row alone in rewards=[{type: ...}]"
                )

    def _given(self, row: Trajectory) -> list[RewardComponent]:
        """The components that the environment gave."""
        return [part for part in row.reward_components if not self._is_of_stage(part.name)]

    def _is_of_stage(self, name: str) -> bool:
        return any(name == known or name.startswith(f"{known}.") for known in self.recorded)

    def _environment(self, row: Trajectory) -> float:
        """The reward that the environment gave."""
        added = [part for part in row.reward_components if self._is_of_stage(part.name)]
        return row.scored_reward() - sum(part.value * part.weight for part in added)

    def _again(self, row: Trajectory, more: Scored | None) -> Trajectory:
        if more is not None and more.reward is None:
            return row.model_copy(update={"reward": None, "tags": [*row.tags, f"unscored: {more.why}"]})
        reward = self._environment(row)
        for part in self._given(row):
            reward += (self.weights.get(part.name, part.weight) - part.weight) * part.value
        reward *= self.weights.get(ENVIRONMENT, 1.0)
        values = {part.name: part.value for part in row.reward_components}
        fresh = {reward.component for reward in self.new}
        reward += sum(kept.weight * values[kept.component] for kept in self.wanted if kept.component not in fresh)
        return row.model_copy(update={"reward": reward + (more.reward or 0.0 if more else 0.0)})

    def _graded(self, rows: Sequence[Trajectory]) -> dict[str, Scored]:
        """What the new components give, by the id of the row. Components that compare rollouts see those of one
        ticket; greedy ones apart, as they were when they were sampled."""
        scored = [row for row in rows if _counts(row)]
        tasks = self._tasks(scored)
        groups: dict[tuple[str, bool], list[Trajectory]] = {}
        for row in scored:
            groups.setdefault((row.group_id or row.task_id, "greedy" in row.tags), []).append(row)
        by_group = [by_episode(group) for group in groups.values()]
        bare = [[self._bare(whole(episode)) for episode in group] for group in by_group]
        work = [(group, tasks[key_of(group[0])]) for group in bare]
        try:
            results = blocking(_grades(work, self.new))
        except Exception as error:  # of a class of the user's own
            raise ReplayError(
                f"rewards: {', '.join(reward.component for reward in self.new)} cannot be computed from the stored "
                f"rows: {type(error).__name__}: {error}. {STORED_ALONE.capitalize()}; have the environment put what is "
                "missing into final_state, and run the stage again"
            ) from error
        made = {
            row.trajectory_id: result
            for group, graded_group in zip(by_group, results, strict=True)
            for episode, result in zip(group, graded_group, strict=True)
            for row in episode
        }
        if made and all(result.reward is None for result in made.values()):
            why = next(iter(made.values())).why
            raise ReplayError(
                f"rewards: no stored row can be graded: {why}. {STORED_ALONE.capitalize()}; run the stage again with it"
            )
        return made

    def _bare(self, row: Trajectory) -> Trajectory:
        """A rollout as components see it: with the environment's reward alone."""
        return row.model_copy(update={"reward": self._environment(row), "reward_components": self._given(row)})

    def _tasks(self, rows: Sequence[Trajectory]) -> dict[TaskKey, Task]:
        stored = from_table(Task, self.buffer.tasks({row.task_id for row in rows}))
        known = {key_of(task): task for task in stored}
        for row in rows:
            if key_of(row) not in known:
                raise ReplayError(
                    f"rewards: {row.trajectory_id} is of task {row.task_id}, which is not stored beside the buffer; "
                    "bring it in with tasks.import"
                )
        return known


async def _grades(work: Sequence[tuple[Sequence[Trajectory], Task]], rewards: Sequence[Reward]) -> list[list[Scored]]:
    try:
        return await asyncio.gather(*(graded(group, task, rewards) for group, task in work))
    finally:
        for reward in rewards:
            await reward.close()


def _counts(row: Trajectory) -> bool:
    """Whether a row has a reward that components are part of."""
    return row.reward is not None and NOT_TRAINED not in row.tags


def _same(reward: Reward, other: Reward | None) -> bool:
    """Whether two components give the same values; their weights may differ."""
    plain = {"weight"}
    return type(reward) is type(other) and reward.model_dump(exclude=plain) == other.model_dump(exclude=plain)
