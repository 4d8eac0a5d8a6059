"""Tasks that are measured on: nothing is made of them, and no new task is one of them under another name."""

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.schemas.task import Task


class MeasuredTasks:
    """Knows held-out tasks by their prompts, and by the goals that ``environments`` name."""

    def __init__(self, environments: Mapping[str, Any], tasks: Iterable[Task]) -> None:
        self._environments = environments
        self._prompts: set[str] = set()
        self._goals: set[tuple[str, str]] = set()
        for task in tasks:
            self._prompts.add(task.prompt)
            if goal := self._goal(task):
                self._goals.add(goal)

    def why(self, task: Task) -> str | None:
        """Why a new task is refused: ``heldout_prompt`` or ``heldout_goal``; None if it is not held out."""
        if task.prompt in self._prompts:
            return "heldout_prompt"
        if (goal := self._goal(task)) and goal in self._goals:
            return "heldout_goal"
        return None

    def _goal(self, task: Task) -> tuple[str, str] | None:
        """What a task asks for, as its environment says it; None if the environment says nothing."""
        environment = self._environments.get(task.env)
        known = task.metadata != "{}" and task.verifier != "judge"
        if environment is None or not hasattr(environment, "goal") or not known:
            return None
        return str(environment.name), str(environment.goal(task))


def check_trained_on(tasks: Iterable[Task]) -> None:
    """Raise ValueError that names a task that is not of the train split."""
    for task in tasks:
        if task.split != "train":
            raise ValueError(
                f"task {task.task_id} is of split {task.split!r}: nothing is made from what is measured on; wire tasks "
                "of the train split"
            )
