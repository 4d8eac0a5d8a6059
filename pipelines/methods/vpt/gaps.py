"""Where calls are missing in a conversation, and what an inverse model is shown of it."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.datastore.search.experience import render
from agentrl.environments.base import tool_message
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

MISSING = "?"
"""What stands for the call that is asked for."""


Votes = list[tuple[ToolCall, float]]
"""Calls that an inverse model gave for a gap, the likeliest first, each with its share of the tries."""


class Gap(NamedTuple):
    """A tool's result in a :class:`Bare` conversation: the ``number`` of its message, and the ``call`` that it answers,
    or None if that is missing."""

    number: int
    call: ToolCall | None


class Bare(NamedTuple):
    """A conversation without calls: before each result of a tool stands an assistant message, empty or with what the
    agent said. ``begin`` is the number of the first message after the opening. ``unanswered`` calls have no result."""

    messages: list[Message]
    gaps: list[Gap]
    begin: int
    unanswered: int


def bare(row: Trajectory) -> Bare:
    """The conversation of a row without its calls. Of several calls of a turn each gets a turn of its own, since a log
    without calls does not say which results belong together."""
    messages: list[Message] = []
    gaps: list[Gap] = []
    waiting: list[ToolCall] = []
    unanswered = 0
    for message in row.messages:
        if message.role is Role.ASSISTANT:
            unanswered += len(waiting)
            waiting = list(message.tool_calls)
        elif message.role is Role.TOOL:
            if not messages or messages[-1].role is not Role.ASSISTANT:
                messages.append(Message(role=Role.ASSISTANT))
            call = next((call for call in waiting if call.id == message.tool_call_id), waiting[0] if waiting else None)
            gaps.append(Gap(len(messages), call))
            waiting = [other for other in waiting if other is not call]
        messages.append(Message(role=message.role, content=message.content, name=_who(message), error=message.error))
    spoken = [number for number, message in enumerate(messages) if message.role is Role.ASSISTANT]
    return Bare(messages, gaps, min(spoken, default=len(messages)), unanswered + len(waiting))


def _who(message: Message) -> str | None:
    """The name of a message, but for that of a tool, which would say what was called."""
    return None if message.role is Role.TOOL else message.name


def completed(conversation: Bare, calls: Sequence[ToolCall]) -> list[Message]:
    """The messages with these calls, one for each of the first gaps; they end before the first gap without one, and
    without one at the end of the conversation."""
    calls = [call.model_copy(update={"id": f"call_{number}"}) for number, call in enumerate(calls)]
    end = len(conversation.messages)
    if len(calls) < len(conversation.gaps):
        end = conversation.gaps[len(calls)].number - 1
    messages = list(conversation.messages[:end])
    for gap, call in zip(conversation.gaps, calls, strict=False):
        messages[gap.number - 1] = messages[gap.number - 1].model_copy(update={"tool_calls": [call]})
        result = messages[gap.number]
        messages[gap.number] = tool_message(call, result.content, result.error)
    return messages


def shown(row: Trajectory, conversation: Bare, index: int, before: int | None, after: int) -> str:
    """What the inverse model is shown of the gap ``index``: the ``before`` last results in front of it, and what comes
    before the first of all if there are fewer; ``?`` in place of the call; its own result, and the next ones, ``after``
    in all. Actions are not shown, those of the past neither: the gaps of a row do not depend on each other."""
    numbers = [gap.number for gap in conversation.gaps]
    first = 0 if before is None or index < before else numbers[index - before] if before else numbers[index] - 1
    last = numbers[min(index + after, len(numbers)) - 1]
    window = list(conversation.messages[first : last + 1])
    asked = numbers[index] - 1 - first
    window[asked] = Message(role=Role.ASSISTANT, content=f"{window[asked].content} {MISSING}".strip())
    return render(row.model_copy(update={"messages": window}))


def form_of(call: ToolCall) -> tuple[str, str]:
    """The tool and the arguments of a call in one form."""
    return call.name, json.dumps(call.parsed(), sort_keys=True, ensure_ascii=False)


def counted(rows: Sequence[Trajectory]) -> Votes:
    """The votes of several answers to one prompt. An answer that is no call, or several, counts for none of them."""
    calls: dict[tuple[str, str], list[ToolCall]] = {}
    for row in rows:
        own = [call for message in row.messages for call in message.tool_calls]
        if len(own) == 1:
            calls.setdefault(form_of(own[0]), []).append(own[0])
    ranked = sorted(calls.values(), key=len, reverse=True)
    return [(same[0], len(same) / len(rows)) for same in ranked]
