"""Anthropic Messages, JSON Lines or a JSON array: ``{"system", "messages", "tools", "model"}`` with content blocks,
and if there is one the ``response`` that followed; the same split into ``request`` and ``response``; or a response
alone (``{"type": "message", ...}``). Read and written.

Blocks: ``text``, ``thinking`` (reasoning), ``tool_use`` (a call), ``tool_result`` (a tool message of its own, in the
order of the blocks; ``is_error`` is its ``error``, and counted; without it that is not known). The server's tools
(``server_tool_use``, ``web_search_tool_result`` and the like) are calls and tool messages too, whose text is the JSON
of what the server found. Tools change between ``{name, description, input_schema}`` and JSON schemas of functions.
Every other block (an image, a document) is counted by its type.
``stop_reason`` gives the end. Writing: consecutive tool messages are one user message, and arguments that are no object
become one (``{"arguments": ...}``), as the API asks; ``system`` is always there.

Cannot carry: signatures of thinking and ``redacted_thinking``, citations, tokens, outcome, identity, lineage.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from agentrl.datastore.formats import regular
from agentrl.datastore.formats.annotated import in_record
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import json_text, only_text, text_of, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import BESIDE, within
from agentrl.datastore.formats.rows import answered, make_row, termination
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import functions
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

_KNOWN = frozenset({"system", "messages", "tools", "model", "response", "request", "stop_reason"}) | BESIDE
_KNOWN_MESSAGE = frozenset({"role", "content"})
_KNOWN_RESPONSE = frozenset({"role", "content", "type", "model", "stop_reason"}) | BESIDE
_KNOWN_CALL = frozenset({"type", "id", "name", "input"})
_KNOWN_RESULT = frozenset({"type", "tool_use_id", "content", "is_error"})
_KNOWN_THOUGHT = frozenset({"type", "thinking"})
STOPS = {
    "end_turn": Termination.ANSWERED,
    "stop_sequence": Termination.ANSWERED,
    "refusal": Termination.ANSWERED,
    "max_tokens": Termination.MAX_TOKENS,
    "model_context_window_exceeded": Termination.MAX_CONTEXT,
    "tool_use": Termination.UNKNOWN,
    "pause_turn": Termination.UNKNOWN,
}
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
_BLOCKS = frozenset({*_CALLS, "tool_result", "thinking", "redacted_thinking"})
_MEDIA = ("image", "document")
_ROLES_OF_CHAT = frozenset({"tool", "function"})


def fits(head: Any) -> int:
    """2 for what only this API has, 1 for a talk of users and assistants that may be of this one or of chat."""
    if not isinstance(head, dict):
        return 0
    if head.get("type") == "message" and head.get("role") == "assistant":
        return 2 if isinstance(head.get("content"), list) else 0
    answer = head.get("response")
    asked = head["request"] if isinstance(head.get("request"), dict) else head
    messages = asked.get("messages")
    if not isinstance(messages, list) or (isinstance(answer, dict) and "choices" in answer):
        return 0
    roles = {message["role"] for message in messages}
    if roles & _ROLES_OF_CHAT or any(message.get("tool_calls") or message.get("function_call") for message in messages):
        return 0
    if isinstance(answer, dict) and isinstance(answer.get("content"), list):
        return 2
    tools = asked.get("tools")
    schemas = isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
    prompted = isinstance(asked.get("system"), str | list) and not roles & {"system", "developer"}
    if schemas or prompted or any(map(_has_blocks, messages)):
        return 2
    return int(bool(roles) and roles <= {"user", "assistant"} and "responses_create_params" not in head)


def _has_blocks(message: dict[str, Any]) -> bool:
    """Whether a message has a block that chat does not have."""
    content = message.get("content")
    return isinstance(content, list) and any(
        ((kind := block.get("type")) in _BLOCKS and "value" not in block)
        or (kind in _MEDIA and isinstance(block.get("source"), dict))
        for block in content
        if isinstance(block, dict)
    )


def read(source: Source) -> Iterator[Row]:
    def convert(record: dict[str, Any]) -> Iterator[Row]:
        notes = source.notes
        asked = {"messages": []} if record.get("type") == "message" else record.get("request") or record
        answer = record if record.get("type") == "message" else record.get("response") or {}
        if asked is not record and answer is not record:
            notes.rest(record, _KNOWN)
        notes.rest(asked, _KNOWN)
        notes.rest(answer, _KNOWN_RESPONSE, "response.")
        answers = [{"role": "assistant", "content": answer["content"]}] if answer.get("content") else []
        messages, errors = from_blocks([*asked["messages"], *answers], notes)
        if asked.get("system"):
            messages.insert(0, {"role": "system", "content": text_of(asked["system"], notes, "system.")})
        stop = answer.get("stop_reason") or record.get("stop_reason")
        row = make_row(
            messages,
            source="anthropic",
            origin=within(record, notes, "request", "response"),
            tools=tools_text(asked.get("tools")),
            policy=answer.get("model") or asked.get("model"),
            termination=termination(STOPS, stop, notes),
            n_tool_errors=errors,
        )
        yield answered(row, notes)

    return each(source, source.records(), convert)


def from_blocks(chat: Iterable[dict[str, Any]], notes: Notes) -> tuple[list[dict[str, Any]], int]:
    """Fields of messages, and how many tool results are errors."""
    chat_builder = _Talk(notes)
    for message in chat:
        chat_builder.add(message)
    return chat_builder.messages, chat_builder.errors


class _Talk:
    """Messages from messages with content blocks."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.messages: list[dict[str, Any]] = []
        self.errors = 0
        self._names: dict[str, str] = {}

    def add(self, raw: dict[str, Any]) -> None:
        if not raw.keys() <= _KNOWN_MESSAGE:
            self.notes.rest(raw, _KNOWN_MESSAGE, "messages.")
        role, content = raw["role"], raw.get("content")
        alone = content[0] if type(content) is list and len(content) == 1 else None
        if (only := only_text(alone)) is not None:
            self.messages.append({"role": role, "content": only})
            return
        message: dict[str, Any] = {"role": role, "content": content if isinstance(content, str) else ""}
        texts: list[Any] = []
        for block in content if isinstance(content, list) else []:
            kind = str(block.get("type")) if isinstance(block, dict) else "text"
            if kind in _CALLS:
                message.setdefault("tool_calls", []).append(self._call(block))
            elif kind.endswith("tool_result"):
                if role == "assistant":  # a tool that the server ran, in the middle of the model's message
                    self._say(message, texts)
                    message, texts = {"role": role, "content": ""}, []
                self.messages.append(self._result(block))
            elif kind == "thinking":
                self.notes.rest(block, _KNOWN_THOUGHT, "messages.content.")
                message["reasoning"] = "\n".join(filter(None, [message.get("reasoning"), block.get("thinking")]))
            elif kind == "redacted_thinking":  # nobody but the API can read it
                self.notes.ignored["messages.content.redacted_thinking"] += 1
            else:
                texts.append(block)
        self._say(message, texts)

    def _say(self, message: dict[str, Any], texts: list[Any]) -> None:
        if texts:
            message["content"] = text_of(texts, self.notes)
        if texts or message["content"] or "tool_calls" in message or message.get("reasoning"):
            self.messages.append(message)

    def _call(self, block: dict[str, Any]) -> dict[str, Any]:
        self.notes.rest(block, _KNOWN_CALL, "messages.content.")
        self._names[str(block["id"])] = block["name"]
        return {"id": str(block["id"]), "name": block["name"], "arguments": json_text(block.get("input") or {})}

    def _result(self, block: dict[str, Any]) -> dict[str, Any]:
        self.notes.rest(block, _KNOWN_RESULT, "messages.content.")
        identity, content = str(block["tool_use_id"]), block.get("content")
        ours = block["type"] in ("tool_result", "mcp_tool_result")
        refused = isinstance(content, dict) and "error_code" in content
        error = True if refused else None if block.get("is_error") is None else bool(block["is_error"])
        if not ours and error is None:  # what the server's tools refuse has an error_code
            error = False
        self.errors += bool(error)
        text = text_of(content, self.notes, data=True) if ours else json.dumps(content, ensure_ascii=False)
        result = {"role": "tool", "content": text, "tool_call_id": identity, "name": self._names.get(identity)}
        return result if error is None else result | {"error": error}


class _Text(regular.Typed, tag_field="type", tag="text"):
    text: str


class _Use(regular.Typed, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _Result(regular.Typed, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None


class _Message(regular.Typed):
    role: Literal["user", "assistant"]
    content: str | list[_Text | _Use | _Result]


class _Record(regular.Typed):
    messages: list[_Message]
    system: str | None = None
    tools: regular.Raw = regular.NULL
    model: str | None = None


def _row(record: _Record) -> regular.RegularRow:
    messages = [regular.MadeMessage("system", record.system)] if record.system else []
    names: dict[str, str] = {}
    for message in record.messages:
        role, content = message.role, message.content
        if isinstance(content, str):
            if content:
                messages.append(regular.MadeMessage(role, content))
            continue
        texts: list[str] = []
        calls: list[dict[str, str]] = []
        for block in content:
            if isinstance(block, _Text):
                texts.append(block.text)
            elif isinstance(block, _Use):
                names[block.id] = block.name
                calls.append({"id": block.id, "name": block.name, "arguments": regular.arguments_text(block.input)})
            elif role == "assistant":
                raise regular.IrregularError
            else:
                text = block.content or ""
                text = text if isinstance(text, str) else "".join([part.text for part in text])
                name = names.get(block.tool_use_id)
                messages.append(regular.MadeMessage("tool", text, None, block.tool_use_id, name, error=block.is_error))
        if texts or calls:
            messages.append(regular.MadeMessage(role, texts[0] if len(texts) == 1 else "".join(texts), calls))
    fields = {"tools": regular.tools_of(record.tools, anthropic=True), **regular.acting(record.model)}
    return regular.RegularRow(messages, fields)


REGULAR = regular.Regular("anthropic", _Record, _row)


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
    line: dict[str, Any] = {"system": "\n\n".join(system), "messages": messages}
    tools = [_schema(tool) for tool in functions(row.tools)]
    line |= ({"model": row.policy} if row.policy else {}) | ({"tools": tools} if tools else {})
    return line | in_record(row)


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id or "", "content": message.content}
        return [result if message.error is None else result | {"is_error": message.error}]
    blocks: list[dict[str, Any]] = []
    if message.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call)} for call in message.tool_calls
    ]
    return blocks or [{"type": "text", "text": ""}]


def _input(call: ToolCall) -> dict[str, Any]:
    """Arguments as the object that the API asks for."""
    value = call.parsed()
    return value if isinstance(value, dict) else {"arguments": value}


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    name, description = function.get("name", ""), function.get("description", "")
    return {"name": name, "description": description, "input_schema": function.get("parameters") or {"type": "object"}}
