"""Rationalisation (STaR: Zelikman et al. 2022, section 3.3): solve with the answer as a hint, train without it."""

import json
from collections.abc import Sequence

from agentrl.chat.codec import ChatCodec
from agentrl.rollouts.reopen import opening_of, reopened
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

HINT = "({answer})"


def with_hint(opening: list[Message], task: Task, template: str) -> list[Message]:
    """The opening with a hint after its last message; ``{answer}`` in the template stands for the ground truth."""
    return with_text(opening, template.format(answer=json.loads(task.ground_truth)))


def without_hint(opening: list[Message], task: Task, template: str) -> list[Message]:
    """The opening that :func:`with_hint` made this of."""
    return without_text(opening, template.format(answer=json.loads(task.ground_truth)))


def literal(text: str) -> str:
    """The template of a hint that says just this text."""
    return text.replace("{", "{{").replace("}", "}}")


def with_text(opening: list[Message], text: str) -> list[Message]:
    """The opening with a text after its last message."""
    return [*opening[:-1], opening[-1].model_copy(update={"content": f"{opening[-1].content} {text}"})]


def without_text(opening: list[Message], text: str) -> list[Message]:
    """The opening that :func:`with_text` made this of."""
    return [*opening[:-1], opening[-1].model_copy(update={"content": opening[-1].content.removesuffix(f" {text}")})]


def shown_after(opening: list[Message], plain: Sequence[Message]) -> str | None:
    """The text that an opening has after the ``plain`` one of its task, "" if they are equal; None if it differs
    otherwise."""
    *before, last = [(message.role, message.content) for message in opening]
    *before_plain, plain_last = [(message.role, message.content) for message in plain]
    if before != before_plain or last[0] is not plain_last[0] or not last[1].startswith(plain_last[1]):
        return None
    return last[1].removeprefix(plain_last[1]).strip()


def only_repeats(trajectory: Trajectory, task: Task, shown: str) -> bool:
    """Whether a run may only repeat an answer that it was ``shown``: the text holds it, and no observation does."""
    return str(json.loads(task.ground_truth)).strip() in shown and not is_grounded(trajectory, task)


def is_grounded(trajectory: Trajectory, task: Task) -> bool:
    """Whether some observation holds the answer. A run without that only repeats its hint, and teaches nothing."""
    answer = str(json.loads(task.ground_truth)).strip()
    return any(message.role is Role.TOOL and message.content.strip() == answer for message in trajectory.messages)


def strip_hint(hinted: Trajectory, task: Task, template: str, codec: ChatCodec, trajectory_id: str) -> Trajectory:
    """The same run after the opening without the hint; see :func:`agentrl.rollouts.reopen.reopened`."""
    return reopened(hinted, without_hint(opening_of(hinted), task, template), codec, trajectory_id, "rationalized")
