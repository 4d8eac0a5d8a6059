"""Conversations that show how a chat template behaves, and what becomes of them in a dialect."""

import json
from typing import Any, NamedTuple

from agentrl.chat.codec import ChatCodec, encode
from agentrl.chat.template import TemplateError
from agentrl.schemas.trajectory import Message, Role, ToolCall


def _tool(name: str, description: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key}."} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TOOLS = json.dumps(
    [
        _tool("find", "Finds.", who="string", rel="string"),
        _tool("weigh", "Weighs.", kg="number", count="integer", exact="boolean", rough="boolean", unit="string"),
        _tool("plan", "Plans.", steps="array", where="object"),
    ]
)


def _user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def _says(text: str, reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=text, reasoning=reasoning, tool_calls=list(calls))


def _answers(call: ToolCall, text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=call.id, name=call.name)


def _call(name: str, number: int = 0, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments))


class Probe(NamedTuple):
    """A conversation, and in a few words what it shows."""

    what: str
    messages: list[Message]
    tools: str = "[]"

    @property
    def opening(self) -> list[Message]:
        first = next(number for number, message in enumerate(self.messages) if message.role is Role.ASSISTANT)
        return self.messages[:first]


def _calls(what: str, *calls: ToolCall, text: str = "", thought: str | None = None) -> Probe:
    answers = [_answers(call, f"It is Rome-{number}.") for number, call in enumerate(calls)]
    last = _says("In Italy.", "Rome, then." if thought else None)
    return Probe(what, [_user("Where?"), _says(text, thought, *calls), *answers, last], _TOOLS)


_FIND = _call("find", who="Zoë")

NEXT_QUESTION = "next question"
CALL = "call"
PROBES = {
    "plain": Probe("a question and its answer", [_user("Hello there"), _says("Hi.")]),
    "system": Probe("a system message", [Message(role=Role.SYSTEM, content="Be kind."), _user("Hello"), _says("Hi.")]),
    "tools": Probe("the policy sees the tools", [_user("Hello"), _says("Hi.")], _TOOLS),
    CALL: _calls("a call, and the tool's answer", _FIND),
    "call with text": _calls("a call after some words", _FIND, text="Looking."),
    "parallel": _calls("two calls in a turn", _FIND, _call("find", 1, who="Al", rel="x y")),
    "strings": _calls("quotes, line breaks", _call("find", who='Al\'s "kg"', rel="a\nb <c> & {d}")),
    "spaces": _calls("spaces at the ends of a string", _call("find", who="  x = 1\n", rel=" ")),
    "like JSON": _calls("strings that look like JSON", _call("find", who="5", rel='{"a": true}')),
    "booleans": _calls("true and false", _call("weigh", exact=True, rough=False)),
    "numbers": _calls("numbers", _call("weigh", kg=1.5, count=-3)),
    "nested": _calls("lists and objects", _call("plan", steps=["a", {"b": [1, None]}], where={"x": {"y": "z"}})),
    "no arguments": _calls("a call without arguments", _call("find")),
    "reasoning": Probe("reasoning", [_user("Why?"), _says("So.", "Because it is.")]),
    "reasoned call": _calls("reasoning before a call", _FIND, thought="First look."),
    NEXT_QUESTION: Probe(
        "a question after a reasoned answer",
        [_user("Why?"), _says("So.", "Because it is."), _user("And?"), _says("Fine.", "Hm.")],
    ),
}

VALUES = ("strings", "spaces", "like JSON", "booleans", "numbers", "nested", "no arguments")
ACTS = ("tools", CALL, *VALUES)
"""Without these a policy cannot use tools."""


class ProbeOutcome(NamedTuple):
    """What became of a probe. ``refused`` is the reason if it cannot be encoded, and ``by_template`` is true if the
    template itself refuses it; ``text`` and ``tokens`` say whether the conversation, encoded turn by turn, is what the
    template writes for the whole; ``read`` whether each turn reads back as it was written. ``wrote`` is the text that
    is asked about, and ``back`` what came back from it."""

    refused: str | None = None
    by_template: bool = False
    text: bool = False
    tokens: bool = False
    read: bool = False
    wrote: str = ""
    back: str = ""

    @property
    def verdict(self) -> str:
        """One of ok, refused, differs."""
        if self.refused:
            return "refused"
        return "ok" if self.read else "differs"


def try_out(codec: ChatCodec, probe: Probe) -> ProbeOutcome:
    """What becomes of a probe in a dialect."""
    template = codec.template
    try:
        whole = template.render(probe.messages, tools=probe.tools)
    except TemplateError as error:
        return ProbeOutcome(refused=str(error), by_template=True)
    try:
        ids, _, messages = encode(codec, probe.messages, probe.tools)
    except ValueError as error:
        return ProbeOutcome(refused=str(error), wrote=whole)
    native = template.encode(whole)
    bare = ids[:-1]
    own_text, native_text = (str(template.tokenizer.decode(part)) for part in (bare, native))
    if lost := _lost(probe, own_text):
        return ProbeOutcome(refused=f"the chat template drops or moves {lost!r}", wrote=own_text)
    text = native_text.startswith(own_text) and not _without(native_text[len(own_text) :], template.ends).strip()
    turns = [message for message in messages if message.role is Role.ASSISTANT]
    read = [_back(codec, turn, ids, probe.tools) for turn in turns]
    wrong = next((number for number, (same, _) in enumerate(read) if not same), None)
    [first, *_], shown = turns, wrong or 0
    start = 0 if len(probe.opening) > 1 or (len(turns) == 1 and probe.tools != "[]") else first.token_start
    wrote = str(template.tokenizer.decode(ids[start:]))
    return ProbeOutcome(None, False, text, text and native[: len(bare)] == bare, wrong is None, wrote, read[shown][1])


def _lost(probe: Probe, text: str) -> str | None:
    """What is missing in the text of a probe, or not in its place."""
    start = 0
    if missing := [name for name in _names(probe.tools) if name not in text]:
        return missing[0]
    for message in probe.messages:
        start = text.find(message.content, start)
        if start < 0:
            return message.content
        start += len(message.content)
    return None


def _names(tools: str) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(tools)]


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


def _back(codec: ChatCodec, message: Message, ids: list[int], tools: str) -> tuple[bool, str]:
    """Whether a turn reads back as it was written, and what came back."""
    parsed = codec.parse(ids[message.token_start : message.token_end], ids[: message.token_start], tools)
    return parsed.error is None and meaning(parsed.message) == meaning(message), parsed.error or said(parsed.message)


def said(message: Message) -> str:
    """A turn in one line: reasoning, content, and calls with their arguments."""
    parts = [f"({message.reasoning})"] if message.reasoning else []
    parts += [message.content] if message.content else []
    return " ".join([*parts, *(f"{call.name}{call.arguments}" for call in message.tool_calls)])


def meaning(message: Message) -> str:
    """A message without its calls' ids and without space at the ends of its parts. True is not 1 in it."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return json.dumps([message.content.strip(), (message.reasoning or "").strip(), calls], sort_keys=True)
