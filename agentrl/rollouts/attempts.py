"""What is to be rolled out: an attempt at a task, from its beginning or from a state of a stored row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.advantages.turns import acting
from agentrl.environments.base import FORMAT_ERROR
from agentrl.rollouts.rationalize import without_hint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role


@dataclass(frozen=True)
class Prefix:
    """What a continuation goes on from: the ``messages`` of the row ``parent`` before one of its turns, with their
    spans, and the token ``ids`` up to there."""

    parent: str
    messages: Sequence[Message]
    ids: Sequence[int]

    @property
    def turns(self) -> int:
        return len(acting(self.messages))

    @property
    def tool_calls(self) -> int:
        return sum(len(message.tool_calls) for message in acting(self.messages))

    def plain(self, task: Task, hint: str) -> list[Message]:
        """The messages, with the opening as it was without a ``hint``."""
        messages = list(self.messages)
        if not hint:
            return messages
        number = next((n for n, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))
        return [*without_hint(messages[:number], task, hint), *messages[number:]]

    @property
    def format_errors(self) -> int:
        return sum(message.name == FORMAT_ERROR for message in self.messages)


@dataclass(frozen=True)
class Attempt:
    """One rollout to make: of ``task``, as sample ``index`` of its group. ``hint`` is a template for
    :func:`agentrl.rollouts.rationalize.with_hint`. ``group`` names its group; without it, the task does. It begins
    after ``prefix``, if there is one, and is cut after ``turns`` of its own, without a score. With probability
    ``advised`` a turn is what the episode advises; then the row is trained on these turns, and not on those of the
    policy. The first turn of its own is the teacher's if it is ``replaced`` by ``default``, and empty if by ``none``;
    then it is not trained on. ``goes_on`` says that the replay of the prefix may be answered otherwise than it was.
    ``number`` is its place among the attempts that are made with one seed, where some of them are there already; None:
    its place among those that are made."""

    task: Task
    index: int = 0
    hint: str = ""
    group: str = ""
    prefix: Prefix | None = None
    advised: float | None = None
    turns: int | None = None
    replaced: Literal["", "default", "none"] = ""
    goes_on: bool = False
    number: int | None = None

    @property
    def group_id(self) -> str:
        return self.group or self.task.task_id


def tickets(
    tasks: Sequence[Task], samples: int, name: Callable[[int], str], first: int = 0, extra: int = 0, hint: str = ""
) -> dict[str, Attempt]:
    """``samples`` attempts at each task, by the ids that ``name`` gives to their numbers, which begin at ``first`` and
    leave room for ``extra`` more of each task. A task's group has the id of its first attempt."""
    attempts = {}
    for number, task in enumerate(tasks):
        start = first + number * (samples + extra)
        for index in range(samples):
            attempts[name(start + index)] = Attempt(task, index, hint, name(start))
    return attempts
