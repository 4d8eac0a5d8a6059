"""What a search finds on tasks that a policy is measured on, beside the best of several rollouts."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from agentrl.engines.blocking import blocking
from agentrl.pipelines.methods.lats.grow import GrownTree, TreeSearchConfig, grow
from agentrl.pipelines.parts.measures import EVERY, choices
from agentrl.pipelines.stage import Context
from agentrl.rewards import Components
from agentrl.schemas.task import Task

if TYPE_CHECKING:
    from agentrl.rollouts.runner import RolloutRunner

WITH_FEEDBACK = "pass@budget with feedback"
"""How many tasks a search solves that looks at rewards: no success rate of a policy, which sees none."""

PICKED = "best_of_search"
"""Success of the rows of each tree that a scorer picks."""


class SearchedTasks:
    """What was found on each task, ``of(env, level)`` on average, and what it cost."""

    def __init__(self, name: str, found_by_task: Mapping[str, float], trees: Sequence[GrownTree]) -> None:
        self.name, self._found, self._trees = name, found_by_task, trees

    def of(self, env: str, level: int) -> dict[str, float]:
        """Measures over the tasks of an environment (:data:`EVERY`: all) and level (-1: all)."""
        chosen = [
            tree for tree in self._trees if env in (EVERY, tree.task.env) and level in (-1, tree.task.level)
        ]  # fmt: skip
        tokens = [sum(row.n_action_tokens for row in tree.rows.values()) for tree in chosen]
        return {self.name: fmean(self._found[tree.task.task_id] for tree in chosen), "search_tokens": fmean(tokens)}


def searched(
    context: Context,
    config: TreeSearchConfig,
    scorer: Components,
    runner: "RolloutRunner",
    tasks: Sequence[Task],
    first: int,
    shard: int,
) -> SearchedTasks:
    """Search each task. Without ``oracle`` the answer is what ``scorer`` picks among the rows of its tree; with it, any
    success counts."""
    trees = grow(context, config, runner, tasks, first, shard)
    if config.oracle:
        solved = {tree.task.task_id: float(any(row.success for row in tree.rows.values())) for tree in trees}
        return SearchedTasks(WITH_FEEDBACK, solved, trees)
    return SearchedTasks(PICKED, blocking(_picked(scorer, trees)), trees)


async def _picked(scorer: Components, trees: Sequence[GrownTree]) -> dict[str, float]:
    """Task -> the chance that the row that is picked is a success."""
    picked = {}
    try:
        for tree in trees:
            rows = [row for row in tree.rows.values() if row.success is not None]
            chances = await choices(rows, tree.task, scorer) if rows else []
            picked[tree.task.task_id] = sum(
                chance for row, chance in zip(rows, chances, strict=True) if row.success
            )  # fmt: skip
    finally:
        for each in scorer:
            await each.close()
    return picked
