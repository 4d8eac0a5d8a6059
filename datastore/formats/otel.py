"""Spans of OpenTelemetry for generative AI: OTLP JSON (``resourceSpans``), span rows as Phoenix exports them
(``context.trace_id``, ``attributes``; OpenInference's ``llm.input_messages``), and Langfuse's observations
(``traceId``, ``type: GENERATION``), also inside a trace with ``observations``, beside it (``{trace, observations,
scores}``), or in a response with ``data``. JSON Lines, an array, a document, Parquet, or CSV whose cells are JSON.
Read only.

A trace is a row. It is made of the model call with the most messages, which is the last turn: its input holds the
conversation before it. Calls that no longer one continues (a subagent, another prompt, another answer) are segments of
the same episode. Messages come from ``gen_ai.input.messages`` and ``gen_ai.output.messages`` with their parts
(``text``, ``reasoning``, ``tool_call``, ``tool_call_response``; others are counted by type),
``gen_ai.system_instructions``, the flattened ``llm.input_messages.0.message.role`` or ``gen_ai.prompt.0.role``, or
Langfuse's ``input`` and ``output``; of a span of kind ``LLM`` without any of them, from ``input.value`` and
``output.value``. The model is the policy, ``gen_ai.tool.definitions``, ``llm.tools`` or ``input.tools`` the tools,
``gen_ai.agent.name`` the agent, a span's status ``ERROR`` an ``infra_error``, Langfuse's ``scores`` of a trace
components. The trace is the id, its first turn the time, and usage and cost are those of all turns; both ends of a
turn's span give the seconds of its message. Rows are unscored: ``--reward NAME`` says which component is the reward.
Memory holds the spans of all traces that are open at once, if the file is JSON Lines, else those of the file.

Not carried, and counted: spans of other kinds, events of a span, other times, every other attribute.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from agentrl.datastore.formats.messages import from_chat, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import SPENT, Calls, count, lasted, moment
from agentrl.datastore.formats.parts import between, in_parts
from agentrl.datastore.formats.rows import components, make_row
from agentrl.datastore.formats.source import Row, Source, Stretch, each
from agentrl.datastore.formats.span_messages import FLAT, MESSAGES, json_of, loaded, loose, messages_of, tools_beside
from agentrl.schemas.trajectory import Termination, seconds_of_messages

_TOOL = re.compile(r"llm\.tools\.(\d+)\.(?:tool\.)?json_schema")
_MODEL = (
    *("gen_ai.response.model", "gen_ai.request.model"),
    *("llm.model_name", "llm.response.model_name", "llm.request.model_name"),
)
_FINISH = ("gen_ai.response.finish_reasons", "llm.finish_reason")
_USED = frozenset(
    {*MESSAGES, *_MODEL, "gen_ai.system_instructions", "gen_ai.tool.definitions", "gen_ai.agent.name"}
    | {"openinference.span.kind", "gen_ai.operation.name", *_FINISH}
)
_USAGE = (
    ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    ("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"),
    ("llm.token_count.prompt", "llm.token_count.completion"),
)
"""Attributes with the tokens of a call: of the prompt, and of the answer."""
_COST = ("llm.cost.total", "gen_ai.usage.cost")
_LANGFUSE_COSTS = ("calculatedTotalCost", "totalCost", "total_cost")
_KNOWN_ATTRIBUTES = _USED.union(*_USAGE, _COST)
_FINISHES = {
    "length": Termination.MAX_TOKENS,
    "max_tokens": Termination.MAX_TOKENS,
    "content_filter": Termination.UNKNOWN,
}
_VALUE = re.compile(rb'\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}\]]+)')
_ID = re.compile(rb'"id"\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}\]]+)')
_KINDS = ("GENERATION", "SPAN", "EVENT", "AGENT", "TOOL", "CHAIN", "RETRIEVER", "EVALUATOR", "EMBEDDING", "GUARDRAIL")
_ENDS = ("endTimeUnixNano", "end_time", "endTime")
_KNOWN_SPAN = frozenset(
    {"traceId", "trace_id", "context.trace_id", "context", "attributes", "status", "status_code", "level", "type"}
    | {
        "startTimeUnixNano",
        "start_time",
        "startTime",
        *_ENDS,
        "input",
        "output",
        "model",
        "provided_model_name",
        "span_kind",
    }
    | {"scores", "promptTokens", "completionTokens", *_LANGFUSE_COSTS}
)
_KNOWN_TRACE = frozenset({"id", "observations", "scores"})


def fits(head: Any) -> int:
    if not isinstance(head, dict):
        return 0
    if "resourceSpans" in head or "resource_spans" in head:
        return 3
    if isinstance(head.get("data"), list) and head["data"]:  # a response of Langfuse's or Phoenix's API
        return fits(head["data"][0])
    if isinstance(head.get("observations"), list) and ("id" in head or _apart(head)):
        return 2 if not head["observations"] or _is_observation(head["observations"][0]) else 0
    if _is_observation(head):
        return 3
    context = isinstance(head.get("context"), dict) and "trace_id" in head["context"]
    named = {"context.trace_id", "trace_id", "traceId"} & head.keys()
    attributes = "attributes" in head or any(str(key).startswith("attributes.") for key in head)
    return 3 if (context or named) and attributes else 0


def _apart(record: dict[str, Any]) -> bool:
    """Whether a Langfuse trace stands beside its observations, not around them."""
    return isinstance(record.get("trace"), dict) and "id" in record["trace"]


def _is_observation(record: Any) -> bool:
    return isinstance(record, dict) and bool({"traceId", "trace_id"} & record.keys()) and record.get("type") in _KINDS


def read(source: Source) -> Iterator[Row]:
    return in_parts(source, cut, _traces)


def cut(source: Source) -> Iterator[Stretch] | None:
    """Parts of whole traces."""
    return between(source, _trace_ids)


def _trace_ids(line: bytes) -> Iterator[bytes]:
    """The traces of a line, found without reading all of it: inside a text the quotes have backslashes."""
    has_ids = False
    for name in (b'trace_id"', b'traceId"'):
        at = line.find(name)
        while at >= 0:
            if match := _VALUE.match(line, at := at + len(name)):
                has_ids = True
                yield match[1]
            at = line.find(name, at)
    if b'"observations"' in line:  # a Langfuse trace has its own id once, beside those of observations
        yield from _ID.findall(line)
    elif not has_ids:
        yield b""


def _traces(source: Source) -> Iterator[Row]:
    """Spans stay as they were read until all of their trace are there: what they say is parsed right before it becomes
    a row."""
    traces: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def collect(record: Any) -> Iterable[Row]:
        for span in list(_spans(record, source.notes)):
            traces.setdefault(_trace(span), []).append((source.number, span))
        return ()

    yield from each(source, source.records(), collect)
    for trace in list(traces):
        spans = traces.pop(trace)
        source.record = [span for _, span in spans]
        calls: list[dict[str, Any]] = []
        for source.number, span in spans:
            own = Notes() if len(spans) > 1 else source.notes  # of a call that another one continues they do not count
            calls += each(source, [span], lambda spans, own=own: _calls(spans, source, own))  # type: ignore[misc]
        for segment, call in enumerate(_conversations(calls)):
            source.number = call["number"]
            yield from each(source, [(trace, segment, call)], lambda items: [_row(source, *items)])


def _trace(span: dict[str, Any]) -> str:
    context = span.get("context") or {}
    named = span.get("traceId") or span.get("trace_id") or span.get("context.trace_id")
    return str(named or context.get("trace_id"))


def _spans(record: dict[str, Any], notes: Notes) -> Iterator[dict[str, Any]]:
    """Spans of a record. Those of a Langfuse trace have its scores."""
    if groups := record.get("resourceSpans") or record.get("resource_spans"):
        for group in groups:
            notes.rest(group, frozenset({"scopeSpans", "scope_spans"}))
            for scope in group.get("scopeSpans") or group.get("scope_spans") or []:
                notes.rest(scope, frozenset({"spans"}), "scope.")
                yield from scope.get("spans") or []
    elif isinstance(record.get("data"), list):
        notes.rest(record, frozenset({"data"}))
        for part in record["data"]:
            yield from _spans(part, notes)
    elif "observations" in record:
        if _apart(record):
            record = {**record["trace"], **{key: value for key, value in record.items() if key != "trace"}}
        notes.rest(record, _KNOWN_TRACE)
        scores = {}
        for part in record.get("scores") or []:
            notes.rest(part, frozenset({"name", "value"}), "scores.")
            scores[part["name"]] = part.get("value")
        for part in record["observations"]:
            yield {"traceId": record["id"], **part, "scores": scores}
    else:
        yield record


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    given = span.get("attributes")
    if isinstance(given, str):  # a cell of CSV
        given = json_of(given, "attributes")
    if isinstance(given, list):  # OTLP
        return {attribute["key"]: _otlp(attribute.get("value")) for attribute in given}
    attributes = dict(given) if isinstance(given, dict) else {}
    attributes |= {
        key.removeprefix("attributes."): value for key, value in span.items() if key.startswith("attributes.")
    }
    for key in ("llm.input_messages", "llm.output_messages"):
        if isinstance(attributes.get(key), str):
            attributes[key] = json_of(attributes[key], key)
    plain = _PLAIN.issuperset(map(type, attributes.values()))
    return attributes if plain else _flat(attributes)


def _otlp(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        return None
    [(kind, inner)] = list(value.items())[:1]
    if kind == "arrayValue":
        return [_otlp(value_inside) for value_inside in inner.get("values") or []]
    if kind == "kvlistValue":
        return {pair["key"]: _otlp(pair.get("value")) for pair in inner.get("values") or []}
    return int(inner) if kind == "intValue" else inner


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested attributes under dotted names; messages that are lists already stay as they are."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict) and not name.endswith(("messages", "parameters", "json_schema")):
            flat |= _flat(inner, f"{name}.")
        elif isinstance(inner, list) and name.endswith(_LISTS):
            for number, element in enumerate(inner):
                flat |= _flat(element if isinstance(element, dict) else {}, f"{name}.{number}.")
        elif inner is not None:
            flat[name] = inner
    return flat


_PLAIN = frozenset({str, int, float, bool})
_LISTS = ("llm.input_messages", "llm.output_messages", "tool_calls", "message.contents", "llm.tools")


def _calls(span: dict[str, Any], source: Source, own: Notes) -> Iterator[dict[str, Any]]:
    """The call of a model that a span is: its messages, model, tools, and whether it failed. Nothing if it is none.
    ``own`` counts what its messages do not carry."""
    notes = source.notes
    attributes = _attributes(span)
    kind = span.get("type") or attributes.get("openinference.span.kind") or span.get("span_kind")
    messages, tools = messages_of(attributes, notes), attributes.get("gen_ai.tool.definitions")
    if not messages and kind in ("GENERATION", "LLM"):
        asked, answer = (span.get(name) or attributes.get(f"{name}.value") for name in ("input", "output"))
        tools = tools or tools_beside(asked, notes)
        messages = [*loose(asked, "user", notes), *loose(answer, "assistant", notes)]
    if not messages:
        notes.ignored[f"spans of kind {kind or attributes.get('gen_ai.operation.name') or span.get('name')}"] += 1
        return
    if not span.keys() <= _KNOWN_SPAN:
        notes.rest({key: value for key, value in span.items() if not key.startswith("attributes.")}, _KNOWN_SPAN)
    for key, value in attributes.items():
        if (
            key not in _KNOWN_ATTRIBUTES
            and not _TOOL.fullmatch(key)
            and not FLAT.fullmatch(key)
            and value not in ("", [], {})
        ):
            notes.ignored[re.sub(r"\.\d+\b", "", f"attributes.{key}")] += 1
    status = span.get("status") or {}
    code = (status.get("code") or status.get("status_code")) if isinstance(status, dict) else status
    models = [*(attributes.get(name) for name in _MODEL), span.get("model"), span.get("provided_model_name")]
    finish = _finish(attributes, messages)
    start = str(span.get("startTimeUnixNano") or span.get("start_time") or span.get("startTime") or "")
    yield {
        "number": source.number,
        "messages": from_chat(messages, own),
        "notes": own,
        "policy": next((model for model in models if model), None),
        "agent": attributes.get("gen_ai.agent.name"),
        "tools": loaded(tools) or _listed_tools(attributes),
        "failed": (code or span.get("status_code")) in (2, "ERROR", "STATUS_CODE_ERROR")
        or span.get("level") == "ERROR",
        "start": start,
        "seconds": {len(messages) - 1: lasted(start, next((span[name] for name in _ENDS if span.get(name)), None))},
        "finish": finish,
        "scores": span.get("scores") or {},
        "spent": _spent(span, attributes, notes),
    }


def _spent(span: dict[str, Any], attributes: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """What a call used and cost, in the spelling that has it."""
    spent = Calls(notes)
    langfuse = loaded(span.get("usageDetails") or span.get("usage_details")) or {}
    pairs = [(attributes.get(asked), attributes.get(output_key)) for asked, output_key in _USAGE]
    pairs += [(span.get("promptTokens"), span.get("completionTokens"))]
    pairs += [(langfuse.get("input"), langfuse.get("output"))] if isinstance(langfuse, dict) else []
    for asked, output_key in pairs:
        given = asked is not None or output_key is not None  # of many spellings a span has one
        if given and spent.prompt is None and spent.completion is None:
            spent.tokens(count(asked), count(output_key))
    for name, cost in [(name, attributes.get(name)) for name in _COST] + [(n, span.get(n)) for n in _LANGFUSE_COSTS]:
        if cost is not None and spent.cost is None:
            spent.paid(cost, name)
    return spent.fields()


def _finish(attributes: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    """Why the model stopped, if the span says so."""
    given = next(
        (attributes[name] for name in _FINISH if attributes.get(name)), messages[-1].pop("finish_reason", None)
    )
    given = loaded(given) or given
    return str(given[-1] if isinstance(given, list) and given else given)


def _listed_tools(attributes: dict[str, Any]) -> list[Any]:
    """Tools of ``llm.tools.0.tool.json_schema`` and so on."""
    tools = ((key, value) for key, value in attributes.items() if "tools" in key)
    tool_at = {int(match[1]): value for key, value in tools if (match := _TOOL.fullmatch(key))}
    return [loaded(tool_at[number]) for number in sorted(tool_at)]


def _conversations(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that no other call of the trace continues or repeats, in the order they began."""
    if len(calls) == 1:
        return calls
    kept: list[tuple[list[str], dict[str, Any]]] = []
    for call in sorted(calls, key=lambda call_made: -len(call_made["messages"])):
        texts = [_told(message) for message in call["messages"]]
        longer = next((longer_call for long, longer_call in kept if long[: len(texts)] == texts), None)
        if longer is None:
            kept.append((texts, call))
        else:  # it is a turn of the longer one
            longer["began"] = min(longer.get("began", longer["start"]), call["start"])
            longer["seconds"] = call["seconds"] | longer["seconds"]
            for name in SPENT:
                if (known := call["spent"].get(name)) is not None:
                    longer["spent"][name] = longer["spent"].get(name, 0) + known
    return sorted((call for _, call in kept), key=lambda call_made: call_made["start"])


def _told(message: dict[str, Any]) -> str:
    """What a message says, whatever its ids."""
    calls = [[call["name"], loaded(call["arguments"])] for call in message.get("tool_calls") or []]
    return json.dumps([message["role"], message.get("content"), calls], sort_keys=True, default=str)


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which reasoning that stands alone is one with what the model said next."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and message["role"] == "assistant" and not message.get("reasoning"):
            last = joined[-1]
            if last["role"] == "assistant" and not last.get("content") and not last.get("tool_calls"):
                joined[-1] = {**message, "reasoning": last.get("reasoning")}
                continue
        joined.append(message)
    return joined


def _seconds(messages: list[dict[str, Any]], call: dict[str, Any]) -> list[float | None] | None:
    """How long each message took; None if no turn says it, or messages were joined."""
    known = {
        number: took
        for number, took in call["seconds"].items()
        if took is not None and call["messages"][number]["role"] == "assistant"
    }
    return seconds_of_messages(known, len(messages)) if len(messages) == len(call["messages"]) else None


def _row(source: Source, trace: str, segment: int, call: dict[str, Any]) -> Row:
    if call["notes"] is not source.notes:
        source.notes.add(call["notes"])
    messages = _joined(call["messages"])
    return make_row(
        messages,
        source="otel",
        origin={"source_id": trace, "source_time": moment(call.get("began", call["start"])), **call["spent"]},
        trajectory_id=f"{trace}-{segment}",
        episode_id=trace,
        segment=segment,
        agent=call["agent"],
        policy=call["policy"],
        tools=tools_text(call["tools"]),
        termination=Termination.INFRA_ERROR if call["failed"] else _FINISHES.get(call["finish"]),
        reward_components=components(call["scores"], source.notes, "scores."),
        message_seconds=_seconds(messages, call),
    )
