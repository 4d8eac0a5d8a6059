"""Conversations that show how a chat template behaves, and what becomes of them in a dialect."""

import json
from typing import NamedTuple

from agentrl.chat.codec import ChatCodec, encode
from agentrl.chat.template import TemplateError
from agentrl.schemas.trajectory import Message, Role, ToolCall

_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "Finds.",
                "parameters": {
                    "type": "object",
                    "properties": {"who": {"type": "string"}, "rel": {"type": "string"}},
                    "required": ["who"],
                },
            },
        },
        {
            "type": "function",
            "function": {
                "name": "weigh",
                "description": "Weighs.",
                "parameters": {
                    "type": "object",
                    "properties": {"kg": {"type": "number"}, "exact": {"type": "boolean"}, "unit": {"type": "string"}},
                },
            },
        },
    ]
)


def _user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def _says(text: str, reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=text, reasoning=reasoning, tool_calls=list(calls))


def _answers(call: ToolCall, text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=call.id, name=call.name)


_FIND = ToolCall(id="call_0", name="find", arguments=json.dumps({"who": "Zoë"}))
_NAME = ToolCall(id="call_1", name="find", arguments=json.dumps({"who": "Al", "rel": "x y"}))
_WEIGH = ToolCall(id="call_0", name="weigh", arguments=json.dumps({"kg": 1.5, "exact": True, "unit": 'Al\'s "kg"'}))


class Probe(NamedTuple):
    messages: list[Message]
    tools: str = "[]"

    @property
    def opening(self) -> list[Message]:
        first = next(number for number, message in enumerate(self.messages) if message.role is Role.ASSISTANT)
        return self.messages[:first]


NEXT_QUESTION = "next question"
PROBES = {
    "plain": Probe([_user("Hello there"), _says("Hi.")]),
    "system": Probe([Message(role=Role.SYSTEM, content="Be kind."), _user("Hello"), _says("Hi.")]),
    "call": Probe(
        [_user("Where?"), _says("Looking.", None, _FIND), _answers(_FIND, "Rome"), _says("In Rome.")], _TOOLS
    ),
    "parallel": Probe(
        [_user("?"), _says("", None, _FIND, _NAME), _answers(_FIND, "Rome"), _answers(_NAME, "2"), _says("Two.")],
        _TOOLS,
    ),
    "values": Probe([_user("?"), _says("", None, _WEIGH), _answers(_WEIGH, "2"), _says("2.")], _TOOLS),
    "reasoning": Probe([_user("Why?"), _says("So.", "Because it is.")]),
    "reasoned call": Probe(
        [_user("Why?"), _says("", "First look.", _FIND), _answers(_FIND, "Rome"), _says("So.", "Rome, then.")], _TOOLS
    ),
    NEXT_QUESTION: Probe([_user("Why?"), _says("So.", "Because it is."), _user("And?"), _says("Fine.", "Hm.")]),
}


class ProbeOutcome(NamedTuple):
    """What became of a probe. ``refused`` is the reason if it cannot be encoded; ``text`` and ``tokens`` say whether
    the conversation, encoded turn by turn, is what the template writes for the whole; ``read`` whether each turn reads
    back as it was written."""

    refused: str | None = None
    text: bool = False
    tokens: bool = False
    read: bool = False


def try_out(codec: ChatCodec, probe: Probe) -> ProbeOutcome | None:
    """What becomes of a probe in a dialect; None if the template itself refuses the conversation."""
    template = codec.template
    try:
        whole = template.render(probe.messages, tools=probe.tools)
    except TemplateError:
        return None
    try:
        ids, _, messages = encode(codec, probe.messages, probe.tools)
    except ValueError as error:
        return ProbeOutcome(refused=str(error))
    native = template.encode(whole)
    bare = ids[:-1]
    mine, theirs = (str(template.tokenizer.decode(one)) for one in (bare, native))
    if lost := [message.content for message in probe.messages if message.content not in mine]:
        return ProbeOutcome(refused=f"the chat template drops or moves {lost[0]!r}")
    text = theirs.startswith(mine) and not _without(theirs[len(mine) :], template.ends).strip()
    read = all(_reads_back(codec, one, ids, probe.tools) for one in messages if one.role is Role.ASSISTANT)
    return ProbeOutcome(None, text, text and native[: len(bare)] == bare, read)


def check_asking(codec: ChatCodec) -> None:
    """Raise ValueError if the dialect cannot write a question right after tools' answers, with which a policy is asked
    for a summary."""
    probe = PROBES["reasoned call"].messages
    try:
        encode(codec, [*probe[:-1], _user("What do you know?"), _says("Rome.")], _TOOLS)
    except ValueError as error:
        raise ValueError(
            "sampling.compress.by: summary asks the policy after a tool's answer, and this dialect cannot write "
            f"that; set by: schema or by: drop. {error}"
        ) from error


def _without(text: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def _reads_back(codec: ChatCodec, message: Message, ids: list[int], tools: str) -> bool:
    parsed = codec.parse(ids[message.token_start : message.token_end], ids[: message.token_start], tools)
    return parsed.error is None and _meaning(parsed.message) == _meaning(message)


def _meaning(message: Message) -> tuple[str, str, list[tuple[str, object]]]:
    """A message without the names of its calls' ids and without space at the ends of its parts."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.content.strip(), (message.reasoning or "").strip(), calls
