"""OpenAI Responses, JSON Lines, a JSON array or a document: ``{"input", "output", "tools", "instructions",
"model"}``, the same split into ``request`` and ``response``, or a response object alone (``{"object": "response",
...}``). Read only.

Items: ``message`` (``input_text``, ``output_text``, ``refusal``), ``function_call`` and ``function_call_output``,
``reasoning`` (its ``content``, else its ``summary``), ``custom_tool_call`` and its output. Consecutive items of the
model are one message: reasoning, text, calls. A hosted tool's item (``web_search_call`` and the like), and every
other kind, is kept as its JSON text. ``status: incomplete`` gives ``max_tokens``, ``failed`` an ``infra_error``.

Cannot carry: encrypted reasoning, annotations, log-probs of text without token ids; all are counted.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from datastore.formats.messages import ROLES, json_text, text_of, tools_text
from datastore.formats.notes import Notes
from datastore.formats.rows import make_row
from datastore.formats.source import Row, Source, each
from schemas.trajectory import Termination

_KNOWN = frozenset(
    {"input", "output", "tools", "instructions", "model", "status", "request", "response", "object", "id"}
)
_SETTINGS = frozenset({"temperature", "top_p", "max_output_tokens", "seed"})
_KNOWN_ITEM = frozenset(
    {"type", "role", "content", "id", "status", "call_id", "name", "arguments", "output", "summary", "input", "phase"}
)
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
_KNOWN_PART = frozenset({"type", "text", "refusal"})
KINDS = frozenset(
    {"message", "function_call", "function_call_output", "reasoning", "custom_tool_call", "custom_tool_call_output"}
)


def is_items(value: Any) -> bool:
    """Whether a value is a list of Responses items that chat does not have."""
    return isinstance(value, list) and any(isinstance(one, dict) and one.get("type") in KINDS for one in value)


def fits(head: Any) -> int:
    if not isinstance(head, dict) or "responses_create_params" in head:
        return 0
    inner = head.get("response") if isinstance(head.get("response"), dict) else head
    return 2 if is_items(inner.get("output")) or is_items(head.get("input")) else 0  # type: ignore[union-attr]


def read(source: Source) -> Iterator[Row]:
    def convert(one: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(one, _KNOWN | _SETTINGS)
        yield response_row(one.get("request") or one, one.get("response") or one, source.notes)

    return each(source, source.records(), convert)


def response_row(request: dict[str, Any], response: dict[str, Any], notes: Notes, **fields: Any) -> Row:
    """A row from what was asked and what came back."""
    asked = request.get("input") or []
    chat: list[Any] = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    if request.get("instructions"):
        chat.insert(0, {"role": "system", "content": request["instructions"]})
    settings = {name: request[name] for name in _SETTINGS if request.get(name) is not None}
    ends = {"incomplete": Termination.MAX_TOKENS, "failed": Termination.INFRA_ERROR, "cancelled": Termination.CANCELLED}
    values = {
        "source": "openai-responses",
        "tools": tools_text(request.get("tools") or response.get("tools")),
        "policy": response.get("model") or request.get("model"),
        "sampling": json.dumps(settings) if settings else None,
        "termination": ends.get(response.get("status") or ""),
    }
    return make_row(from_items([*chat, *(response.get("output") or [])], notes), **{**values, **fields})


def from_items(items: Iterable[Any], notes: Notes) -> list[dict[str, Any]]:
    """Fields of messages from Responses items, and from chat messages among them."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for item in items:
        notes.rest(item, _KNOWN_ITEM, "items.")
        kind = item.get("type") or "message"
        match kind:
            case "message":
                role = ROLES.get(item["role"], item["role"])
                text = _text(item.get("content"), notes)
                if role == "assistant" and messages and _open(messages[-1]) and not messages[-1]["content"]:
                    messages[-1]["content"] = text
                else:
                    messages.append({"role": role, "content": text})
            case "reasoning":
                thought = _text(item.get("content"), notes) or _text(item.get("summary"), notes)
                messages.append({"role": "assistant", "content": "", "reasoning": thought})
            case "function_call" | "custom_tool_call":
                call = {
                    "id": str(item.get("call_id") or item.get("id") or ""),
                    "name": item["name"],
                    "arguments": json_text(item.get("arguments", item.get("input", "{}"))),
                }
                names[call["id"]] = call["name"]
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                identity = str(item.get("call_id") or "")
                content = _text(item.get("output"), notes)
                name = names.get(identity)
                messages.append({"role": "tool", "content": content, "tool_call_id": identity, "name": name})
            case _:
                notes.remark(f"items of kind {kind!r} are kept as JSON text")
                one = _assistant(messages)
                one["content"] = "\n".join(filter(None, [one["content"], json.dumps(item, ensure_ascii=False)]))
    return [one for one in messages if one["role"] != "assistant" or _says(one)]


def _open(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and "tool_calls" not in message


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant message that the model's next item belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _says(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls") or message.get("reasoning"))


def _text(content: Any, notes: Notes) -> str:
    if not isinstance(content, list):
        return text_of(content)
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:  # other parts are kept whole
            notes.rest(part, _KNOWN_PART, "items.content.")
        if isinstance(part, dict) and part.get("type") == "refusal":
            part = str(part.get("refusal"))
        elif isinstance(part, dict) and part.get("type") in ("summary_text", "reasoning_text"):
            part = str(part.get("text", ""))
        parts.append(part)
    return text_of(parts)
