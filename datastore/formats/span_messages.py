"""Messages of a span: from the parts of the conventions, from flattened attributes, or from Langfuse's loose values."""

import json
import re
from typing import Any

from pydantic_core import from_json

from agentrl.datastore.formats.messages import text_of
from agentrl.datastore.formats.notes import Notes

FLAT = re.compile(r"(?:llm\.(input|output)_messages|gen_ai\.(prompt|completion))\.(\d+)\.(?:message\.)?(.+)")
_CALL = re.compile(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)")
_PART = re.compile(r"contents\.(\d+)\.(?:message_content\.)?(.+)")
_KNOWN_MESSAGE = frozenset({"role", "parts", "finish_reason"})
_KNOWN_CALL = frozenset({"type", "id", "name", "arguments"})
_KNOWN_ANSWERS = {key: frozenset({"type", "id", key}) for key in ("response", "result")}
MESSAGES = ("gen_ai.input.messages", "gen_ai.output.messages")


def messages_of(attributes: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    system = attributes.get("gen_ai.system_instructions")
    system = loaded(system) or system
    if system:
        chat.append({"role": "system", "content": _part_texts(system if isinstance(system, list) else [system], notes)})
    for key in MESSAGES:
        value = attributes.get(key)
        for message in (json_of(value, key) if isinstance(value, str) else value) or []:
            chat += _from_parts(message, notes) if "parts" in message else [message]
    return chat if len(chat) > bool(system) else _flattened(attributes, notes)


def json_of(text: str, key: str) -> Any:
    """A value from its JSON text. Raises ValueError if it is none."""
    try:
        return _parsed(text)
    except ValueError:
        raise ValueError(f"{key} is no JSON, as {text[:20]!r} shows; export the spans as JSON or Parquet") from None


def loaded(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return _parsed(value)
        except ValueError:
            return None
    return value


def _parsed(text: str) -> Any:
    try:
        return from_json(text, cache_strings="keys")
    except ValueError:  # for instance half a surrogate pair
        return json.loads(text)


def _part_texts(parts: list[Any], notes: Notes) -> str:
    return text_of(parts, notes, "parts.")


def _from_parts(raw: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """A message of the conventions, and its tool answers as messages of their own."""
    notes.rest(raw, _KNOWN_MESSAGE, "messages.")
    message: dict[str, Any] = {"role": raw["role"], "content": ""}
    answers, rest = [], []
    for part in raw["parts"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_call":
            notes.rest(part, _KNOWN_CALL, "parts.")
            call = {"id": part.get("id"), "name": part["name"], "arguments": part.get("arguments") or {}}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "tool_call_response":
            key = "response" if "response" in part else "result"
            notes.rest(part, _KNOWN_ANSWERS[key], "parts.")
            content = text_of(part.get(key), notes, data=True)
            answers.append({"role": "tool", "content": content, "tool_call_id": part.get("id")})
        elif kind == "reasoning":
            notes.rest(part, frozenset({"type", "content"}), "parts.")
            message["reasoning"] = "\n".join(filter(None, [message.get("reasoning"), part.get("content")]))
        else:
            rest.append(part)
    message["content"] = _part_texts(rest, notes)
    return answers + ([message] if rest or "tool_calls" in message or message.get("reasoning") else [])


def _flattened(attributes: dict[str, Any], notes: Notes) -> list[dict[str, Any]]:
    """Messages whose fields are attributes of their own."""
    messages_at: dict[tuple[int, int], dict[str, Any]] = {}
    for key, value in attributes.items():
        if not (match := FLAT.fullmatch(key)):
            continue
        side = 0 if match[1] == "input" or match[2] == "prompt" else 1
        role = "user" if side == 0 else "assistant"
        message = messages_at.setdefault((side, int(match[3])), {"role": role, "calls": {}, "parts": {}})
        if call := _CALL.fullmatch(match[4]):
            message["calls"].setdefault(int(call[1]), {"name": ""})[call[2]] = value
        elif match[4] in ("role", "content", "tool_call_id", "name"):
            message[match[4]] = value
        elif part := _PART.fullmatch(match[4]):
            message["parts"].setdefault(int(part[1]), {})[part[2]] = value
        else:
            notes.ignored["messages." + re.sub(r"\.\d+\b", "", match[4])] += 1
    chat = []
    for _, message in sorted(messages_at.items(), key=lambda item: item[0]):
        calls = [call for _, call in sorted(message.pop("calls").items())]
        parts = [part for _, part in sorted(message.pop("parts").items())]
        if parts:  # a call among them is an attribute of its own too
            message["content"] = [part for part in parts if not (calls and part.get("type") == "tool_use")]
        chat.append(message | ({"tool_calls": calls} if calls else {}))
    return chat


def tools_beside(value: Any, notes: Notes) -> Any:
    """Tools beside the messages of Langfuse's input."""
    value = loaded(value)
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        return None
    notes.rest(value, frozenset({"messages", "tools"}), "input.")
    return value.get("tools")


def loose(value: Any, role: str, notes: Notes) -> list[dict[str, Any]]:
    """Langfuse's input or output: chat, a dict with messages, one message, or text."""
    if isinstance(value, str) and value[:1] in "[{":
        value = loaded(value) or value
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = value["messages"]
    if isinstance(value, dict) and ("role" in value or "content" in value):
        return [{"role": role, **value}]
    if isinstance(value, list) and value and all(isinstance(element, dict) and "role" in element for element in value):
        return value
    return [{"role": role, "content": text_of(value, notes, data=True)}] if value else []
