"""Anthropic Messages, JSON Lines or a JSON array: ``{"system", "messages", "tools", "model"}`` with content blocks,
and if there is one the ``response`` that followed. Read and written.

Blocks: ``text``, ``thinking`` (reasoning), ``tool_use`` (a call), ``tool_result`` (a tool message of its own, in
the order of the blocks; ``is_error`` counts as a tool error). Tools change between ``{name, description,
input_schema}`` and JSON schemas of functions. Every other block (an image, a document, ``redacted_thinking``, a
server's tool) is kept as its JSON text. ``stop_reason`` gives the end. Writing: consecutive tool messages are one
user message, as the API asks.

Cannot carry: signatures of thinking, tokens, outcome, identity, lineage.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datastore.formats.files import write_lines
from datastore.formats.messages import json_text, text_of, tools_text
from datastore.formats.notes import Notes
from datastore.formats.rows import make_row
from datastore.formats.source import Row, Source, each
from schemas.trajectory import Message, Role, Termination, Trajectory

_KNOWN = frozenset({"system", "messages", "tools", "model", "response", "stop_reason"})
_KNOWN_BLOCK = frozenset(
    {"type", "text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error", "signature", "caller"}
)
STOPS = {
    "end_turn": Termination.ANSWERED,
    "stop_sequence": Termination.ANSWERED,
    "refusal": Termination.ANSWERED,
    "max_tokens": Termination.MAX_TOKENS,
    "model_context_window_exceeded": Termination.MAX_CONTEXT,
    "tool_use": Termination.UNKNOWN,
    "pause_turn": Termination.UNKNOWN,
}
_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not isinstance(head.get("messages"), list):
        return 0
    blocks = [
        block
        for one in head["messages"]
        if isinstance(one, dict) and isinstance(one.get("content"), list)
        for block in one["content"]
        if isinstance(block, dict)
    ]
    tools = head.get("tools")
    schemas = isinstance(tools, list) and any(isinstance(one, dict) and "input_schema" in one for one in tools)
    return 2 if schemas or any(block.get("type") in _BLOCKS and "value" not in block for block in blocks) else 0


def read(source: Source) -> Iterator[Row]:
    def convert(one: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(one, _KNOWN)
        chat = list(one["messages"])
        answer = one.get("response")
        if isinstance(answer, dict) and answer.get("content"):
            chat.append({"role": "assistant", "content": answer["content"]})
        messages, errors = from_blocks(chat, source.notes)
        if one.get("system"):
            messages.insert(0, {"role": "system", "content": text_of(one["system"])})
        stop = (answer or {}).get("stop_reason") or one.get("stop_reason")
        yield make_row(
            messages,
            source="anthropic",
            tools=tools_text(one.get("tools")),
            policy=one.get("model"),
            termination=STOPS.get(stop) if stop else None,
            n_tool_errors=errors,
        )

    return each(source, source.records(), convert)


def from_blocks(chat: Iterable[dict[str, Any]], notes: Notes) -> tuple[list[dict[str, Any]], int]:
    """Fields of messages, and how many tool results are errors."""
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    errors = 0
    for one in chat:
        content = one.get("content")
        message: dict[str, Any] = {"role": one["role"], "content": content if isinstance(content, str) else ""}
        texts: list[Any] = []
        for block in content if isinstance(content, list) else []:
            kind = block.get("type") if isinstance(block, dict) else "text"
            if isinstance(block, dict):
                notes.rest(block, _KNOWN_BLOCK, "content.")
            if kind == "tool_use":
                names[str(block["id"])] = block["name"]
                call = {"id": str(block["id"]), "name": block["name"], "arguments": json_text(block.get("input") or {})}
                message.setdefault("tool_calls", []).append(call)
            elif kind == "tool_result":
                identity = str(block["tool_use_id"])
                errors += bool(block.get("is_error"))
                result = {"role": "tool", "content": text_of(block.get("content")), "tool_call_id": identity}
                messages.append(result | {"name": names.get(identity)})
            elif kind == "thinking":
                message["reasoning"] = "\n".join(filter(None, [message.get("reasoning"), block.get("thinking")]))
            else:
                texts.append(block)
        if texts:
            message["content"] = text_of(texts)
        if message["content"] or "tool_calls" in message or message.get("reasoning"):
            messages.append(message)
    return messages, errors


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_line, rows))


def _line(row: Trajectory) -> dict[str, Any]:
    system = [message.content for message in row.messages if message.role is Role.SYSTEM]
    messages: list[dict[str, Any]] = []
    for message in row.messages:
        if message.role is Role.SYSTEM:
            continue
        role = "assistant" if message.role is Role.ASSISTANT else "user"
        blocks = _blocks(message)
        results = message.role is Role.TOOL and messages and messages[-1]["content"][-1]["type"] == "tool_result"
        if results:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    line = {"model": row.policy, "messages": messages, "tools": [_schema(tool) for tool in json.loads(row.tools)]}
    return line | ({"system": "\n\n".join(system)} if system else {})


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        return [{"type": "tool_result", "tool_use_id": message.tool_call_id or "", "content": message.content}]
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed()} for call in message.tool_calls
    ]
    return blocks or [{"type": "text", "text": ""}]


def _schema(tool: Any) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else {"name": str(tool)}
    name, description = function.get("name", ""), function.get("description", "")
    return {"name": name, "description": description, "input_schema": function.get("parameters") or {"type": "object"}}
