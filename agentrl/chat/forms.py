"""What is done for a chat template that does not do it by itself: tools told in the system message, tools' answers as
turns of the user, and ids of calls in the form that the template demands. Messages are the dicts that templates take.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.schemas.trajectory import Message, Role

Spoken = dict[str, Any]

TOOLS_TOLD = "tools in the system message"
ANSWERS_TOLD = "tools' answers as turns of the user"
"""How a dialect's name says it."""

HERMES_CALL = (
    "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
    'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
"""How Hermes and Qwen say it."""


def own_call(example: str) -> str:
    """The same for a template that writes calls in a form of its own; ``example`` calls ``function_name``."""
    return f"For each function call, write the name of the function and its arguments in this form:\n{example}"


def with_tools(spoken: list[Spoken], tools: Sequence[Any], form: str, system: bool) -> list[Spoken]:
    """The conversation with its tools told first, in the Hermes form: at the end of its system message, in a new one,
    or before the first words of the user if the template takes no system message."""
    signatures = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        f"function signatures within <tools></tools> XML tags:\n<tools>\n{signatures}\n</tools>\n\n{form}"
    )
    first, *others = spoken
    if first["role"] == Role.SYSTEM.value:
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    if system or first["role"] != Role.USER.value:
        return [{"role": Role.SYSTEM.value, "content": text}, *spoken]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]


def as_user_turns(spoken: list[Spoken]) -> list[Spoken]:
    """The conversation with the tools' answers to a turn as one turn of the user, in ``<tool_response>`` tags. What the
    user says right after them stands in the same turn, since many of these templates want roles to alternate."""
    made: list[Spoken] = []
    open_turn = False
    for message in spoken:
        is_answer = message["role"] == Role.TOOL.value
        text = f"<tool_response>\n{message['content']}\n</tool_response>" if is_answer else message["content"]
        if open_turn and (is_answer or message["role"] == Role.USER.value):
            made[-1]["content"] += f"\n{text}"
        else:
            made.append({"role": Role.USER.value, "content": text} if is_answer else message)
        open_turn = is_answer
    return made


IdForm = Callable[[str, str], str]
"""From a call's id and its function's name to the id that a template takes."""


def any_id(call_id: str, name: str) -> str:
    return call_id


def nine_letters(call_id: str, name: str) -> str:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def named_and_numbered(call_id: str, name: str) -> str:
    """Kimi's templates write the id alone, and so the function's name stands in it."""
    if re.fullmatch(r"functions\.[^:]+:\d+", call_id):
        return call_id
    number = re.search(r"\d+$", call_id)
    return f"functions.{name}:{number.group() if number else 0}"


ID_FORMS: dict[IdForm, str] = {
    any_id: "",
    nine_letters: "ids of calls are nine letters and digits, as the chat template demands",
    named_and_numbered: "ids of calls are functions.NAME:NUMBER, as the chat template writes no other name",
}
"""Each with what a user should know of it. They are tried in this order."""


def numbered(messages: Sequence[Message], form: IdForm) -> list[Message]:
    """A written conversation whose calls are numbered through, if ``form`` needs other ids than it has: answers keep
    the calls that they answer."""
    if form is any_id:
        return list(messages)
    ids: dict[str, str] = {}
    made = []
    count = 0
    for message in messages:
        calls = []
        for call in message.tool_calls:
            ids[call.id] = call.id if form(call.id, call.name) == call.id else f"call_{count}"
            calls.append(call.model_copy(update={"id": ids[call.id]}))
            count += 1
        answers = ids.get(message.tool_call_id or "", message.tool_call_id)
        made.append(message.model_copy(update={"tool_calls": calls, "tool_call_id": answers}))
    return made
