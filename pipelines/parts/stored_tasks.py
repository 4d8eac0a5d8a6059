"""The tasks of stored rows."""

from collections.abc import Sequence
from functools import cached_property

from agentrl.pipelines.handles import Tasks, Trajectories
from agentrl.schemas.arrow import from_table
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

TaskKey = tuple[str, str, str]


def key_of(row: Task | Trajectory) -> TaskKey:
    return row.env, row.task_id, row.prompt


class KnownTasks:
    """The tasks of rows: those that are ``given``, or without any those that were stored beside the buffer. They are
    read when they are first asked for."""

    def __init__(self, trajectories: Sequence[Trajectories], given: Sequence[Tasks] = ()) -> None:
        self._trajectories, self._given = trajectories, given

    @cached_property
    def by_key(self) -> dict[TaskKey, Task]:
        """All of them. Raises ValueError if the store has two of one id."""
        if self._given:
            return {key_of(task): task for tasks in self._given for task in tasks.read()}
        by_key: dict[TaskKey, Task] = {}
        for selection in self._trajectories:
            for task in from_table(
                Task, selection.buffer.tasks(set(selection.table(["task_id"])["task_id"].to_pylist()))
            ):
                if by_key.setdefault(key_of(task), task) != task:
                    raise ValueError(
                        f"the store has two different tasks {task.task_id} of {task.env}; wire inputs.tasks"
                    )
        return by_key

    def of(self, row: Trajectory) -> Task:
        """The task of a row. Raises ValueError that names the row if it is not known."""
        if key_of(row) not in self.by_key:
            lost = (
                "which inputs.tasks lack; wire all tasks"
                if self._given
                else "which is not stored beside the buffer; bring it in with tasks.import, or wire inputs.tasks, if "
                "the stage has that input"
            )
            raise ValueError(f"{row.trajectory_id} is of task {row.task_id}, {lost}")
        return self.by_key[key_of(row)]
