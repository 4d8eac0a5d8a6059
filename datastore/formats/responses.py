"""OpenAI Responses, JSON Lines, a JSON array or a document: ``{"input", "output", "tools", "instructions",
"model"}``, the same split into ``request`` and ``response``, or a response object alone (``{"object": "response",
...}``). Read only.

Items: ``message`` (``input_text``, ``output_text``, ``refusal``), ``function_call`` and ``function_call_output``,
``reasoning`` (its ``content``, else its ``summary``), ``custom_tool_call`` and its output. Consecutive items of the
model are one message: reasoning, text, calls. An item of another tool (``web_search_call`` and all other kinds in
``_call`` or ``_output``) is kept as the JSON text of a tool message, which no stage trains on. Items of every other
kind, and parts of messages that are no text, are counted by their type. ``id``, ``created_at`` and ``usage`` of the
response are those of the row. ``status: incomplete`` gives ``max_tokens``, ``failed`` an ``infra_error``.

Cannot carry: ids of items, encrypted reasoning, annotations, log-probs of text without token ids; all are counted.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal

from agentrl.datastore.formats import regular
from agentrl.datastore.formats.messages import ROLES, json_text, text_of, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import BESIDE, within
from agentrl.datastore.formats.rows import answered, make_row, termination
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.trajectory import Termination

_SETTINGS = frozenset({"temperature", "top_p", "max_output_tokens", "seed"})
KNOWN = _SETTINGS | {"input", "output", "tools", "instructions", "model", "status", "request", "response", "object"}
KNOWN |= BESIDE | {"incomplete_details"}
_ENDS = {
    "incomplete": Termination.MAX_TOKENS,
    "failed": Termination.INFRA_ERROR,
    "cancelled": Termination.CANCELLED,
    "queued": Termination.UNKNOWN,
    "in_progress": Termination.UNKNOWN,
}
_CALLS = ("function_call", "custom_tool_call")
_ANSWERS = ("function_call_output", "custom_tool_call_output")
_KNOWN_ITEM = {
    "message": frozenset({"type", "role", "content"}),
    "reasoning": frozenset({"type", "content", "summary"}),
    **dict.fromkeys(_CALLS, frozenset({"type", "call_id", "id", "name", "arguments", "input"})),
    **dict.fromkeys(_ANSWERS, frozenset({"type", "call_id", "output"})),
}
"""Keys of the items that have fields of their own; every other item is kept whole."""
_TEXTS = {"refusal": "refusal", "summary_text": "text", "reasoning_text": "text"}
"""The key that holds the text of a part; those of ``input_text`` and ``output_text`` are read as in chat."""


def is_items(value: Any) -> bool:
    """Whether a value is a list of Responses items that chat does not have."""
    return isinstance(value, list) and any(isinstance(item, dict) and item.get("type") in _KNOWN_ITEM for item in value)


def fits(head: Any) -> int:
    if not isinstance(head, dict) or "responses_create_params" in head:
        return 0
    inner = head.get("response") if isinstance(head.get("response"), dict) else head
    return 2 if is_items(inner.get("output")) or is_items(head.get("input")) else 0  # type: ignore[union-attr]


def read(source: Source) -> Iterator[Row]:
    def convert(record: dict[str, Any]) -> Iterator[Row]:
        source.notes.inside(record, {"": KNOWN, "request": KNOWN, "response": KNOWN})
        asked, answer = record.get("request") or record, record.get("response") or record
        origin = within(record, source.notes, "request", "response")
        yield answered(response_row(asked, answer, source.notes, origin=origin), source.notes)

    return each(source, source.records(), convert)


def response_row(request: dict[str, Any], response: dict[str, Any], notes: Notes, **fields: Any) -> Row:
    """A row from what was asked and what came back."""
    asked = request.get("input") or []
    chat: list[Any] = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    if request.get("instructions"):
        chat.insert(0, {"role": "system", "content": request["instructions"]})
    settings = {name: request.get(name, response.get(name)) for name in sorted(_SETTINGS)}
    settings = {name: value for name, value in settings.items() if value is not None}
    values = {
        "source": "openai-responses",
        "tools": tools_text(request.get("tools") or response.get("tools")),
        "policy": response.get("model") or request.get("model"),
        "sampling": json.dumps(settings) if settings else None,
        "termination": _end(response, notes),
    }
    return make_row(from_items([*chat, *(response.get("output") or [])], notes), **{**values, **fields})


def _end(response: dict[str, Any], notes: Notes) -> Termination | None:
    """The end that a response names. One that is incomplete for another reason than its length is unknown."""
    status = response.get("status")
    why = (response.get("incomplete_details") or {}).get("reason")
    if status == "incomplete" and why not in (None, "max_output_tokens"):
        return Termination.UNKNOWN
    return None if status == "completed" else termination(_ENDS, status, notes)


def from_items(items: Iterable[Any], notes: Notes) -> list[dict[str, Any]]:
    """Fields of messages from Responses items, and from chat messages among them."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        kind = item.get("type") or "message"
        if kind in _KNOWN_ITEM:
            notes.rest(item, _KNOWN_ITEM[kind], "items.")
        match kind:
            case "message":
                role = ROLES.get(item["role"], item["role"])
                text = _text(item.get("content"), notes)
                if role == "assistant" and messages and _open(messages[-1]) and not messages[-1]["content"]:
                    messages[-1]["content"] = text
                else:
                    messages.append({"role": role, "content": text})
            case "reasoning":
                whole, short = _text(item.get("content"), notes), _text(item.get("summary"), notes)
                if whole and short:
                    notes.ignored["items.summary"] += 1
                _think(messages, whole or short)
            case _ if kind in _CALLS:
                call = {
                    "id": str(item.get("call_id") or item.get("id") or ""),
                    "name": item["name"],
                    "arguments": json_text(item.get("arguments", item.get("input", "{}"))),
                }
                names[call["id"]] = call["name"]
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case _ if kind in _ANSWERS:
                identity = str(item.get("call_id") or "")
                content = _text(item.get("output"), notes, data=True)
                name = names.get(identity)
                messages.append({"role": "tool", "content": content, "tool_call_id": identity, "name": name})
            case _ if not kind.endswith(("_call", "_output")):
                notes.ignored[f"items of kind {kind[:60]}"] += 1
            case _:
                notes.remark(f"items of kind {kind!r} are kept as JSON text of a tool")
                message = {"role": "tool", "content": json.dumps(item, ensure_ascii=False), "name": kind}
                messages.append(
                    message | ({"error": item["error"] is not None} if kind == "mcp_call" and "error" in item else {})
                )
    return [message for message in messages if message["role"] != "assistant" or _says(message)]


def _open(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _think(messages: list[dict[str, Any]], thought: str) -> None:
    last = messages[-1] if messages else None
    if last and _open(last) and not last["content"]:
        last["reasoning"] = "\n".join(filter(None, [last.get("reasoning"), thought]))
    else:
        messages.append({"role": "assistant", "content": "", "reasoning": thought})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that the model's next item belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _says(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls") or message.get("reasoning"))


def _text(content: Any, notes: Notes, data: bool = False) -> str:
    if not isinstance(content, list):
        return content if isinstance(content, str) else text_of(content, notes, data=data)
    parts = []
    for part in content:
        key = _TEXTS.get(str(part.get("type"))) if isinstance(part, dict) else None
        if key:
            notes.rest(part, {"type", key}, "items.content.")
            part = str(part.get(key, ""))
        parts.append(part)
    return text_of(parts, notes, "items.content.", data)


class _Message(regular.Typed, tag_field="type", tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _Call(regular.Typed, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str


class _Answer(regular.Typed, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str


Items = list[_Message | _Call | _Answer]


class _Record(regular.Typed):
    output: Items
    input: str | Items | None = None
    tools: regular.Raw = regular.NULL
    instructions: str | None = None
    model: str | None = None


def _row(record: _Record) -> regular.RegularRow:
    fields = {"tools": regular.tools_of(record.tools), **regular.acting(record.model)}
    return regular.RegularRow(messages_of(record.instructions, record.input, record.output), fields)


def messages_of(instructions: str | None, asked: str | Items | None, output: Items) -> list[regular.MadeMessage]:
    """Messages of regular items."""
    messages = [regular.MadeMessage("system", instructions)] if instructions else []
    if isinstance(asked, str) and asked:
        messages.append(regular.MadeMessage("user", asked))
    names: dict[str, str] = {}
    for item in chain(() if isinstance(asked, str) else asked or (), output):
        if isinstance(item, _Message):
            if not item.content:  # one of the model may become a part of another message
                raise regular.IrregularError
            messages.append(regular.MadeMessage(item.role, item.content))
        elif isinstance(item, _Call):
            names[item.call_id] = item.name
            if not messages or messages[-1].role != "assistant":
                messages.append(regular.MadeMessage("assistant", ""))
            messages[-1].tool_calls = calls = messages[-1].tool_calls or []
            calls.append({"id": item.call_id, "name": item.name, "arguments": regular.arguments_text(item.arguments)})
        else:
            messages.append(regular.MadeMessage("tool", item.output, None, item.call_id, names.get(item.call_id)))
    return messages


REGULAR = regular.Regular("openai-responses", _Record, _row)
