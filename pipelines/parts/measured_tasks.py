"""Tasks that are measured on: nothing is made of them, and no new task is one of them under another name."""

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.schemas.task import Task


class MeasuredTasks:
    """Knows held-out tasks by their prompts, by the goals that ``environments`` name, and those of the split
    ``compositional`` by how they are put together (``composition``), which no other task may be."""

    def __init__(self, environments: Mapping[str, Any], tasks: Iterable[Task]) -> None:
        self._environments = environments
        self._prompts: set[str] = set()
        self._named: dict[str, set[tuple[str, str]]] = {"goal": set(), "composition": set()}
        for task in tasks:
            self._prompts.add(task.prompt)
            for method in ("goal", "composition") if task.split == "compositional" else ("goal",):
                if name := self._name(task, method):
                    self._named[method].add(name)

    def why(self, task: Task) -> str | None:
        """Why a new task is refused: ``heldout_prompt``, ``heldout_goal`` or ``heldout_composition``; None if it is not
        held out."""
        if task.prompt in self._prompts:
            return "heldout_prompt"
        for method, names in self._named.items():
            if names and self._name(task, method) in names:
                return f"heldout_{method}"
        return None

    def _name(self, task: Task, method: str) -> tuple[str, str] | None:
        """What a task asks for, or how it is put together, as its environment says it; None if it says nothing."""
        environment = self._environments.get(task.env)
        known = task.metadata != "{}" and task.verifier != "judge"
        if environment is None or not hasattr(environment, method) or not known:
            return None
        return str(environment.name), str(getattr(environment, method)(task))


def refuse_measured_tasks(tasks: Iterable[Task]) -> None:
    """Raise ValueError that names a task that is not of the train split."""
    for task in tasks:
        if task.split != "train":
            raise ValueError(
                f"task {task.task_id} is of split {task.split!r}: nothing is made from what is measured on; wire tasks "
                "of the train split"
            )
