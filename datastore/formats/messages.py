"""Converting messages from and to the spellings of chat formats.

Of content that is a list of parts the text parts become text. Reasoning and call parts go to their own fields. Every
other part (an image, audio, a kind that is not known) is counted by its type, and never becomes text.
"""

import json
import marshal
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic_core import to_json

from agentrl.datastore.formats.notes import Notes
from agentrl.schemas.json_text import is_json, loads, writer
from agentrl.schemas.trajectory import Message, Role

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_PLAIN = ("system", "user", "assistant")
_TEXT = ("text", "input_text", "output_text", "refusal")
_REASONING = ("reasoning", "thinking")
_CALL = ("tool_call", "tool_calls", "function_call")
_KNOWN = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "tool_call_id"}
    | {"name", "refusal", "type"}
)
_SAYS_ERROR: tuple[tuple[str, Mapping[Any, bool]], ...] = (
    ("is_error", {True: True, False: False}),
    ("error", {True: True, False: False}),
    ("status", {"error": True, "success": False}),
)
"""Keys of a tool message that say whether it is an error, and the values that do. The text of an error is none."""
_SIMPLE = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
_AROUND_CALL = frozenset({"id", "call_id", "type", "index", "function"})
_KNOWN_CALL = frozenset({"name", "arguments", "args"})
_JSON = writer(ensure_ascii=False)
_FLAT_CALL = _AROUND_CALL | _KNOWN_CALL | {"requestor"}  # tau2's requestor is the role of the message
_TEXT_KEYS = ("text", "value", "content", "refusal")
_PART = {key: frozenset({"type", key}) for key in (*_TEXT_KEYS, *_REASONING, *_CALL)}
"""Keys of a part that is read, by the key that holds its text."""


def tools_text(tools: Any) -> str:
    """Tool schemas as JSON text. Those of OpenAI Responses and of Anthropic come in the form that chat has, text stays
    as it is, and lists are written without blanks, which is many times faster."""
    if not tools:
        return "[]"
    if isinstance(tools, str):
        return json_text(tools)
    try:
        return _kept_text(marshal.dumps(tools, _MARSHAL_VERSION))
    except ValueError:  # marshal takes no date, as Parquet has it, and nothing that is nested deeply
        return _written(tools)


_MARSHAL_VERSION = 2
"""Later ones write equal values in several ways."""


@lru_cache(maxsize=128)
def _kept_text(tools: bytes) -> str:
    """Most rows share their tools, and their bytes are made in a fraction of the time that their text takes."""
    return _written(marshal.loads(tools))


def _written(tools: Any) -> str:
    if isinstance(tools, list):
        tools = [function_tool(tool) for tool in tools]
    try:
        return to_json(tools, inf_nan_mode="constants").decode()
    except ValueError:  # half a surrogate pair
        return json_text(tools)


def function_tool(tool: Any) -> Any:
    """A tool as chat has it: ``{"type": "function", "function": {...}}``. What is no function stays as it is."""
    if not isinstance(tool, dict) or "function" in tool or "name" not in tool:
        return tool
    schema = tool.get("parameters", tool.get("input_schema"))
    if schema is None:
        return tool
    rest = {name: value for name, value in tool.items() if name not in ("type", "parameters", "input_schema")}
    return {"type": "function", "function": {**rest, "parameters": schema}}


def json_text(value: Any) -> str:
    """Arguments and tools as JSON text: text that is JSON stays as it is, byte for byte; other text becomes a JSON
    string, so that what the model wrote is kept."""
    if isinstance(value, str) and is_json(value):
        return value
    return _JSON(value)


def text_of(content: Any, notes: Notes, prefix: str = "messages.content.", data: bool = False) -> str:
    """Message content as text. Parts that are no text are counted by their type under ``prefix``, and so is what a text
    part has beside its text. With ``data``, which is for what a tool answered, a value that is no list of parts is
    its JSON text. Raises ValueError for an object that is no part."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list) and len(content) == 1 and (text := only_text(content[0])) is not None:
        return text
    if isinstance(content, list) and not (data and any(not _is_part(part) for part in content)):
        texts = [_part_text(part, notes, prefix) for part in content]
        return ("\n" if None in texts else "").join(filter(None, texts))
    if isinstance(content, dict) and _is_part(content):
        return _part_text(content, notes, prefix) or ""
    if isinstance(content, dict) and not data:
        raise ValueError(f"{prefix.rstrip('.')} is an object with the keys {', '.join(list(content)[:5])}, not text")
    return json.dumps(content, ensure_ascii=False)


def only_text(part: Any) -> str | None:
    """The text of a part that is nothing but text, as most are."""
    if type(part) is dict and len(part) == 2 and part.get("type") in _TEXT and type(text := part.get("text")) is str:
        return text
    return None


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, str)
    return isinstance(value.get("type"), str) or any(isinstance(value.get(key), str) for key in _TEXT_KEYS)


def _part_text(part: Any, notes: Notes, prefix: str) -> str | None:
    """The text of a part; None if it is no text."""
    if isinstance(part, str):
        return part
    if (text := only_text(part)) is not None:
        return text
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT:
        for key in _TEXT_KEYS:
            if isinstance(value := part.get(key), str):
                notes.rest(part, _PART[key], prefix)
                return value
    notes.ignored[prefix + (str(kind)[:60] if kind else "part")] += 1
    return None


def call(value: Any, notes: Notes, fallback_id: str = "") -> dict[str, Any]:
    """A call from any of the spellings: OpenAI's, flat, or either as JSON text. Raises KeyError without a name."""
    value = json.loads(value) if isinstance(value, str) else value
    function = value.get("function")
    if isinstance(function, dict):
        if not _AROUND_CALL.issuperset(value):
            notes.rest(value, _AROUND_CALL, "messages.tool_calls.")
        if not _KNOWN_CALL.issuperset(function):
            notes.rest(function, _KNOWN_CALL, "messages.tool_calls.function.")
    else:
        function = value
        notes.rest(value, _FLAT_CALL, "messages.tool_calls.")
    arguments = function["arguments"] if "arguments" in function else function.get("args")
    name = function["name"] if "name" in function else value["name"]
    identity = value.get("id") or value.get("call_id") or fallback_id
    return {"id": str(identity), "name": name, "arguments": json_text({} if arguments is None else arguments)}


def from_chat(chat: Iterable[dict[str, Any]], notes: Notes) -> list[dict[str, Any]]:
    """Fields of messages from OpenAI or TRL chat. Arguments may be text or a dict and calls may be JSON text; legacy
    ``function_call`` and ``function`` messages are calls and answers; ``developer`` is a system message."""
    messages: list[dict[str, Any]] = []
    unanswered: list[dict[str, Any]] = []
    for raw in chat:
        role = raw["role"]
        text = type(raw.get("content")) is str
        if text and len(raw) == 2 and role in _PLAIN:
            messages.append(raw)  # most messages have only these fields
            continue
        if text and _SIMPLE.issuperset(raw):
            message = _simple(raw, role, notes)
        else:
            key, error = says_error(raw) if ROLES.get(role) == "tool" else (None, None)
            notes.rest(raw, _KNOWN | {key} if key else _KNOWN, "messages.")
            message = _from_one(raw, len(messages), notes)
            if error is not None:
                message["error"] = error
        if calls := message.get("tool_calls"):
            unanswered = list(calls)
        elif message["role"] == "tool":
            answer(message, unanswered)
        messages.append(message)
    return messages


def says_error(message: Mapping[str, Any]) -> tuple[str | None, bool | None]:
    """The key by which a tool message says whether it is an error, and what it says; None for both if none does."""
    for key, meanings in _SAYS_ERROR:
        if isinstance(value := message.get(key), bool | str) and value in meanings:
            return key, meanings[value]
    return None, None


def _simple(raw: Mapping[str, Any], role: str, notes: Notes) -> dict[str, Any]:
    """A message of text, with calls or as an answer."""
    message: dict[str, Any] = {"role": ROLES.get(role, role), "content": raw["content"]}
    if calls := raw.get("tool_calls"):
        message["tool_calls"] = [call(each, notes) for each in calls]
    if (identity := raw.get("tool_call_id")) is not None:
        message["tool_call_id"] = str(identity)
    if (name := raw.get("name")) is not None:
        message["name"] = name
    return message


def _from_one(raw: Mapping[str, Any], number: int, notes: Notes) -> dict[str, Any]:
    content = raw.get("content")
    reasoning = raw.get("reasoning_content") or raw.get("reasoning") or raw.get("thinking")
    calls = [call(each, notes) for each in raw.get("tool_calls") or []]
    if raw.get("function_call"):
        calls.append(call(raw["function_call"], notes, f"call_{number}"))
    if isinstance(content, list):
        content, thought, more = _special_parts(content, number, notes)
        reasoning = reasoning or thought
        calls += more
    answers = {name: raw[name] for name in ("tool_call_id", "name") if name in raw}
    text = text_of(content, notes, data=ROLES.get(raw["role"]) == "tool")
    message = _simple({"content": text or raw.get("refusal") or ""} | answers, raw["role"], notes)
    if reasoning is not None:
        message["reasoning"] = text_of(reasoning, notes)
    if calls:
        message["tool_calls"] = calls
    return message


def _special_parts(content: list[Any], number: int, notes: Notes) -> tuple[list[Any], str | None, list[dict[str, Any]]]:
    """Parts without reasoning and calls; the reasoning; the calls."""
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    rest: list[Any] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _REASONING:
            thoughts.append(_thought(part, kind, notes))
            continue
        held = next((key for key in ("text", "value", kind) if kind in _CALL and part.get(key)), None)
        if held:
            notes.rest(part, _PART[held], "messages.content.")
            value = loads(part[held]) if isinstance(part[held], str) else part[held]
            for function in value if isinstance(value, list) else [value]:
                calls.append(call(function, notes, f"call_{number}_{len(calls)}"))
        elif kind in _CALL and "name" in part:
            calls.append(call(part, notes, f"call_{number}_{len(calls)}"))
        else:
            rest.append(part)
    return rest, "\n".join(filter(None, thoughts)) or None, calls


def _thought(part: dict[str, Any], kind: str, notes: Notes) -> str:
    """The text of a reasoning part. What is redacted is a code that only its maker reads: its summary is the text."""
    keys = ("summary",) if part.get("redacted") else ("text", "value", kind, "summary")
    held = next((key for key in keys if isinstance(part.get(key), str) and part[key]), "")
    if part.get("redacted"):
        notes.ignored[f"messages.content.{kind} that is redacted"] += 1
        return str(part[held]) if held else ""
    notes.rest(part, {"type", held}, "messages.content.")
    return str(part[held]) if held else ""


def answer(message: dict[str, Any], unanswered: list[dict[str, Any]]) -> None:
    """Give a tool message the id and name of the call that it answers, if its own id, name or place tells which."""
    identity, name = message.get("tool_call_id"), message.get("name")
    for call_made in unanswered:
        if call_made["id"] == identity if identity else (not name or call_made["name"] == name):
            break
    else:
        return
    if not identity and call_made["id"]:
        message["tool_call_id"] = call_made["id"]
    if not name:
        message["name"] = call_made["name"]
    unanswered.remove(call_made)


def to_chat(messages: Sequence[Message], arguments: str = "text") -> list[dict[str, Any]]:
    """OpenAI chat messages. ``arguments`` of a call are JSON ``text`` (OpenAI) or a ``dict`` (TRL)."""
    chat = []
    for message in messages:
        chat_message: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.reasoning is not None:
            chat_message["reasoning_content"] = message.reasoning
        if message.tool_calls:
            chat_message["tool_calls"] = [
                {
                    "id": each.id,
                    "type": "function",
                    "function": {
                        "name": each.name,
                        "arguments": each.arguments if arguments == "text" else each.parsed(),
                    },
                }
                for each in message.tool_calls
            ]
        for name in ("tool_call_id", "name"):
            if (value := getattr(message, name)) is not None:
                chat_message[name] = value
        chat.append(chat_message)
    return chat


def split_prompt(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What comes before the first assistant message, and the rest."""
    first = next((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))
    return list(messages[:first]), list(messages[first:])
