"""Spans of OpenTelemetry for generative AI: OTLP JSON (``resourceSpans``), span rows as Phoenix exports them
(``context.trace_id``, ``attributes``; OpenInference's ``llm.input_messages``), and Langfuse's observations
(``traceId``, ``type: GENERATION``). JSON Lines, an array or a document. Read only.

A trace is a row. It is made of the model call with the most messages, which is the last turn: its input holds the
conversation before it. Calls whose input does not continue into that one (a subagent, another prompt) are
segments of the same episode. Messages come from ``gen_ai.input.messages`` and ``gen_ai.output.messages`` with their
parts (``text``, ``reasoning``, ``tool_call``, ``tool_call_response``), ``gen_ai.system_instructions``, the
flattened ``llm.input_messages.0.message.role`` or ``gen_ai.prompt.0.role``, or Langfuse's ``input`` and ``output``.
The model is the policy, ``gen_ai.tool.definitions`` or ``llm.tools`` the tools, ``gen_ai.agent.name`` the agent, a
span's status ``ERROR`` an ``infra_error``. Rows are unscored. Memory holds the spans of one file.

Not carried: spans of other kinds, events, usage, times; other attributes are counted.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from datastore.formats.messages import from_chat, text_of, tools_text
from datastore.formats.rows import make_row
from datastore.formats.source import Row, Source, each
from schemas.trajectory import Termination

_FLAT = re.compile(r"(?:llm\.(input|output)_messages|gen_ai\.(prompt|completion))\.(\d+)\.(?:message\.)?(.+)")
_CALL = re.compile(r"tool_calls\.(\d+)\.(?:tool_call\.)?(?:function\.)?(id|name|arguments)")
_TOOL = re.compile(r"llm\.tools\.(\d+)\.(?:tool\.)?json_schema")
_USED = ("gen_ai.", "llm.", "input.", "output.", "openinference.", "session.", "metadata")


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    if "resourceSpans" in head or "resource_spans" in head:
        return 3
    if "traceId" in head and head.get("type") in ("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN"):
        return 3
    context = isinstance(head.get("context"), dict) and "trace_id" in head["context"]
    named = {"context.trace_id", "trace_id", "traceId"} & head.keys()
    return (
        3
        if (context or named) and ("attributes" in head or any(str(key).startswith("attributes.") for key in head))
        else 0
    )


def read(source: Source) -> Iterator[Row]:
    traces: dict[str, list[dict[str, Any]]] = {}
    for record in source.records():
        for span in _spans(record):
            call = _call(span, source)
            if call["messages"]:
                traces.setdefault(call["trace"], []).append(call)
    for trace, calls in traces.items():
        for segment, call in enumerate(_conversations(calls)):
            yield from each(source, [(trace, segment, call)], lambda found: [_row(source, *found)])


def _spans(record: Any) -> Iterator[dict[str, Any]]:
    """Spans of a record, attributes as a flat dict."""
    if not isinstance(record, dict):
        return
    groups = record.get("resourceSpans") or record.get("resource_spans")
    if not groups:
        yield record
        return
    for group in groups:
        for scope in group.get("scopeSpans") or group.get("scope_spans") or []:
            yield from scope.get("spans") or []


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    given = span.get("attributes")
    if isinstance(given, list):  # OTLP
        return {one["key"]: _otlp(one.get("value")) for one in given}
    found = dict(given) if isinstance(given, dict) else {}
    found |= {key.removeprefix("attributes."): value for key, value in span.items() if key.startswith("attributes.")}
    return _flat(found)


def _otlp(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return None
    [(kind, inner)] = list(value.items())[:1]
    if kind == "arrayValue":
        return [_otlp(one) for one in inner.get("values") or []]
    if kind == "kvlistValue":
        return {one["key"]: _otlp(one.get("value")) for one in inner.get("values") or []}
    return int(inner) if kind == "intValue" else inner


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested attributes under dotted names; messages that are lists already stay as they are."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and not name.endswith(("messages", "parameters")):
            found |= _flat(inner, f"{name}.")
        elif isinstance(inner, list) and name.endswith(("llm.input_messages", "llm.output_messages", "tool_calls")):
            for number, one in enumerate(inner):
                found |= _flat(one if isinstance(one, dict) else {}, f"{name}.{number}.")
        else:
            found[name] = inner
    return found


def _call(span: dict[str, Any], source: Source) -> dict[str, Any]:
    """One call of a model: its messages, trace, model, tools, and whether it failed."""
    context = span.get("context") or {}
    trace = span.get("traceId") or span.get("trace_id") or span.get("context.trace_id") or context.get("trace_id")
    attributes = _attributes(span)
    for key in attributes:
        if not key.startswith(_USED):
            source.notes.ignored[f"attributes.{key}"] += 1
    messages = _messages(attributes)
    if not messages and span.get("type") == "GENERATION":
        messages = [*_loose(span.get("input"), "user"), *_loose(span.get("output"), "assistant")]
    model = attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model")
    status = span.get("status") or {}
    code = status.get("code") if isinstance(status, dict) else status
    return {
        "trace": str(trace),
        "messages": messages,
        "policy": model or attributes.get("llm.model_name") or span.get("model"),
        "agent": attributes.get("gen_ai.agent.name"),
        "tools": attributes.get("gen_ai.tool.definitions") or _listed_tools(attributes),
        "failed": code in (2, "ERROR", "STATUS_CODE_ERROR") or span.get("level") == "ERROR",
        "start": str(span.get("startTimeUnixNano") or span.get("start_time") or span.get("startTime") or ""),
    }


def _listed_tools(attributes: dict[str, Any]) -> list[Any]:
    """Tools of ``llm.tools.0.tool.json_schema`` and so on."""
    found = {int(match[1]): value for key, value in attributes.items() if (match := _TOOL.fullmatch(key))}
    return [_loaded(found[number]) for number in sorted(found)]


def _messages(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    system = _loaded(attributes.get("gen_ai.system_instructions"))
    if system:
        chat.append({"role": "system", "content": _part_texts(system if isinstance(system, list) else [system])})
    for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
        for one in _loaded(attributes.get(key)) or []:
            chat += _from_parts(one)
    return chat if len(chat) > bool(system) else _flattened(attributes)


def _loaded(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return None
    return value


def _part_texts(parts: list[Any]) -> str:
    return text_of(
        [one.get("content", one) if isinstance(one, dict) and one.get("type") == "text" else one for one in parts]
    )


def _from_parts(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A message of the conventions, and its tool answers as messages of their own."""
    if "parts" not in one:
        return [one]
    message: dict[str, Any] = {"role": one["role"], "content": ""}
    answers, rest = [], []
    for part in one["parts"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_call":
            call = {"id": part.get("id"), "name": part["name"], "arguments": part.get("arguments") or {}}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "tool_call_response":
            content = part.get("response", part.get("result"))
            answers.append({"role": "tool", "content": text_of(content), "tool_call_id": part.get("id")})
        elif kind == "reasoning":
            message["reasoning"] = part.get("content")
        else:
            rest.append(part)
    message["content"] = _part_texts(rest)
    return answers + ([message] if rest or "tool_calls" in message or message.get("reasoning") else [])


def _flattened(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages whose fields are attributes of their own."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for key, value in attributes.items():
        if not (match := _FLAT.fullmatch(key)):
            continue
        side = 0 if match[1] == "input" or match[2] == "prompt" else 1
        message = found.setdefault((side, int(match[3])), {"role": "user" if side == 0 else "assistant", "calls": {}})
        if call := _CALL.fullmatch(match[4]):
            message["calls"].setdefault(int(call[1]), {"name": ""})[call[2]] = value
        elif match[4] in ("role", "content", "tool_call_id", "name"):
            message[match[4]] = value
        elif (part := re.fullmatch(r"contents\.\d+\.(?:message_content\.)?text", match[4])) and part:
            message["content"] = f"{message.get('content') or ''}{value}"
    chat = []
    for _, message in sorted(found.items(), key=lambda one: one[0]):
        calls = [one for _, one in sorted(message.pop("calls").items())]
        chat.append(message | ({"tool_calls": calls} if calls else {}))
    return chat


def _loose(value: Any, role: str) -> list[dict[str, Any]]:
    """Langfuse's input or output: chat, a dict with messages, one message, or text."""
    if isinstance(value, str) and value[:1] in "[{":
        value = _loaded(value) or value
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        value = value["messages"]
    if isinstance(value, dict) and ("role" in value or "content" in value):
        return [{"role": role, **value}]
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return value
    return [{"role": role, "content": text_of(value)}] if value else []


def _conversations(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that no longer call of the trace continues, in the order they began."""
    kept: list[tuple[list[str], dict[str, Any]]] = []
    for call in sorted(calls, key=lambda one: -len(one["messages"])):
        texts = [json.dumps([one.get("role"), one.get("content")], default=str) for one in call["messages"]]
        asked = texts[: max(1, len(texts) - 1)]
        if not any(long[: len(asked)] == asked and len(long) > len(asked) for long, _ in kept):
            kept.append((texts, call))
    return sorted((call for _, call in kept), key=lambda one: one["start"])


def _row(source: Source, trace: str, segment: int, call: dict[str, Any]) -> Row:
    return make_row(
        from_chat(call["messages"], source.notes),
        source="otel",
        trajectory_id=f"{trace}-{segment}",
        episode_id=trace,
        segment=segment,
        agent=call["agent"],
        policy=call["policy"],
        tools=tools_text(_loaded(call["tools"])),
        termination=Termination.INFRA_ERROR if call["failed"] else None,
    )
