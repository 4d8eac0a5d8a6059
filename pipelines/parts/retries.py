"""Retries: attempts at the tasks that earlier ones did not solve."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.pipelines.handles import Trajectories
    from agentrl.schemas.task import Task

SOURCE = "reflected"
"""Of the rows of retries."""

_TRIAL = "trial:"


@dataclass(frozen=True)
class Tried:
    """What was tried at a task without success: the last attempt, and the number of the last trial, from 1."""

    last: str
    trial: int


def tried(given: "Iterable[Trajectories]") -> dict[str, Tried]:
    """The tasks that rows attempted and none of them solved."""
    tries: dict[str, Tried] = {}
    solved = set()
    for selection in given:
        for row in selection.table(["trajectory_id", "task_id", "success", "tags"]).to_pylist():
            if NOT_TRAINED in row["tags"]:
                continue
            if row["success"]:
                solved.add(row["task_id"])
            trial = max([1, *(int(tag.removeprefix(_TRIAL)) for tag in row["tags"] if tag.startswith(_TRIAL))])
            before = tries.get(row["task_id"], Tried("", 1))
            tries[row["task_id"]] = Tried(row["trajectory_id"], max(trial, before.trial))
    return {task_id: trial_of_task for task_id, trial_of_task in tries.items() if task_id not in solved}


def to_retry(tasks: "Sequence[Task]", unsolved: Mapping[str, Tried]) -> "list[Task]":
    """The tasks to try again. Raises ValueError as :func:`check_trained_on` does."""
    chosen = [task for task in tasks if task.task_id in unsolved]
    check_trained_on(chosen)
    return chosen


def check_trained_on(chosen: "Sequence[Task]") -> None:
    """Raise ValueError that names a task that policies are measured on: to choose it by its outcome would be to look at
    what is measured."""
    if wrong := [task for task in chosen if task.split != "train"]:
        raise ValueError(
            f"retries choose tasks by their outcomes, and {len(wrong)} of {len(chosen)} unsolved tasks are not of the "
            f"train split: {wrong[0].task_id} is of split {wrong[0].split}; wire tasks.train, or leave the retries out"
        )


def retried(row: Trajectory, before: Tried) -> Trajectory:
    """A row of a retry: it follows what was tried before."""
    return row.model_copy(
        update={"source": SOURCE, "parent_id": before.last, "tags": [f"{_TRIAL}{before.trial + 1}", *row.tags]}
    )
