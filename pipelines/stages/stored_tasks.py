"""The tasks of stored rows."""

from collections.abc import Sequence

from pipelines.handles import Tasks, Trajectories
from schemas.arrow import from_table
from schemas.task import Task
from schemas.trajectory import Trajectory

TaskKey = tuple[str, str, str]


def key_of(row: Task | Trajectory) -> TaskKey:
    return row.env, row.task_id, row.prompt


def stored_tasks(trajectories: Sequence[Trajectories]) -> dict[TaskKey, Task]:
    """Tasks of the rows that the store has. Raises ValueError if it has two of one id."""
    found: dict[TaskKey, Task] = {}
    for one in trajectories:
        for task in from_table(Task, one.buffer.tasks(set(one.table(["task_id"])["task_id"].to_pylist()))):
            if found.setdefault(key_of(task), task) != task:
                raise ValueError(f"the store has two different tasks {task.task_id} of {task.env}; wire inputs.tasks")
    return found


def tasks_of(trajectories: Sequence[Trajectories], given: Sequence[Tasks]) -> dict[TaskKey, Task]:
    """The tasks that are wired, or without any those that were stored beside the buffer."""
    return {key_of(task): task for one in given for task in one.read()} if given else stored_tasks(trajectories)
