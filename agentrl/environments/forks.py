"""An episode in the state of another: from a snapshot, or by making its steps again."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from agentrl.environments.base import FORMAT_ERROR, Environment, Episode, Step, cut
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role


class DivergedError(RuntimeError):
    """An environment answered the same messages otherwise."""

    def __init__(self, environment: str, task: str, what: str, then: object, now: object) -> None:
        super().__init__(
            f"environment {environment!r} says replayable = True, but {what} of task {task} was {str(then)[:200]!r} "
            f"and is now {str(now)[:200]!r}; draw its random numbers from the task, or take replayable away"
        )


async def fork(environment: Environment, task: Task, episode: Episode, messages: Sequence[Message]) -> Episode:
    """Another episode of ``task``, in the state that ``episode`` has after ``messages``: from a snapshot if it can give
    one, else by :func:`rebuild`, whose errors it raises. Each goes its own way, and each is to be closed."""
    if not hasattr(episode, "snapshot"):
        return await rebuild(environment, task, messages)
    state = await episode.snapshot()
    other: Any = await environment.reset(task)
    try:
        await other.restore(state)
    except BaseException:
        await other.close()
        raise
    return other


OnDifference = Callable[[str], None]
"""Told what an environment answered otherwise than before."""


async def rebuild(
    environment: Environment,
    task: Task,
    messages: Sequence[Message],
    before: Callable[[Episode], None] = lambda episode: None,
    after: Callable[[Step | None], None] = lambda step: None,
    differs: OnDifference | None = None,
) -> Episode:
    """An episode of ``task`` in the state after ``messages``, the opening and what was said since: every assistant
    message is answered again. ``before`` is shown the episode before each of them, and ``after`` what it answered: None
    for a message whose calls could not be read, which no episode is told of. With ``differs``, any environment is
    tried, and answers that differ are told there in place of raised.

    Raises ValueError if the environment is not replayable, and DivergedError if it answers otherwise than before, or
    ends before the last of the messages.
    """
    if not getattr(environment, "replayable", False) and differs is None:
        raise ValueError(
            f"episodes of environment {environment.name!r} cannot be made again: give them snapshot() and restore(), "
            "or set replayable = True if the same messages always get the same answers"
        )
    (_, opening), *turns = _turns(messages)
    episode = await environment.reset(task)
    try:
        _compare(environment, task, "the opening", opening, episode.opening, differs)
        for number, (turn, answers) in enumerate(turns, 1):
            assert turn is not None
            before(episode)
            if answers and answers[0].name == FORMAT_ERROR:
                after(None)
                continue
            step = await episode.step(turn)
            ended = (step.done or not step.messages) and bool(answers)
            what = f"the answer to message {number}"
            _compare(environment, task, what, answers, step.messages, None if ended else differs)
            after(step)
    except BaseException:
        await episode.close()
        raise
    return episode


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message | None, list[Message]]]:
    """The opening, under None; then each assistant message, and what answered it."""
    turn: Message | None = None
    answers: list[Message] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            yield turn, answers
            turn, answers = message, []
        else:
            answers.append(message)
    yield turn, answers


def _compare(
    environment: Environment,
    task: Task,
    what: str,
    then: Sequence[Message],
    now: Sequence[Message],
    differs: OnDifference | None,
) -> None:
    for before, after in zip_longest(then, now):
        if before is None or after is None or _shown(before) != _shown(after, len(before.content)):
            shown = [None if message is None else _shown(message) for message in (before, after)]
            if differs is None:
                raise DivergedError(environment.name, task.task_id, what, *shown)
            differs(f"{what} was {str(shown[0])[:200]!r} and is now {str(shown[1])[:200]!r}")
            return


def _shown(message: Message, longest: int | None = None) -> tuple[str | None, ...]:
    """What a policy sees of a message. A row has at most ``longest`` characters of it."""
    content = message.content if longest is None else cut(message.content, longest)
    return message.role.value, content, message.name, message.tool_call_id
