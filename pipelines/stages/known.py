"""The tasks of rows, with their ground truth: those that are wired, or those that were stored beside the buffer."""

from collections.abc import Sequence

from pipelines.handles import Tasks, Trajectories
from schemas.arrow import from_table
from schemas.task import Task
from schemas.trajectory import Trajectory

TaskKey = tuple[str, str, str]
"""Environment, id and prompt: two draws of `lookup` share ids."""


def task_key(row: Task | Trajectory) -> TaskKey:
    return row.env, row.task_id, row.prompt


def known_tasks(trajectories: Sequence[Trajectories], tasks: Sequence[Tasks]) -> dict[TaskKey, Task]:
    """The wired ``tasks``, or if there are none, those of the rows that the store has.

    Raises ValueError if the store has two different ones of one key.
    """
    if tasks:
        return {task_key(task): task for one in tasks for task in one.read()}
    found: dict[TaskKey, Task] = {}
    for one in trajectories:
        for task in from_table(Task, one.buffer.tasks(set(one.table(["task_id"])["task_id"].to_pylist()))):
            if found.setdefault(task_key(task), task) != task:
                raise ValueError(f"the store has two different tasks {task.task_id} of {task.env}; wire inputs.tasks")
    return found
