"""Spans of OpenTelemetry, Phoenix and Langfuse."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from format_files import CALL, TALK, USER, Read, shape

from agentrl.datastore import StoreError
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Role, Termination


def otlp(attributes: dict[str, Any], trace: str = "t", **more: Any) -> dict[str, Any]:
    listed = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    return {"traceId": trace, "spanId": "s", "attributes": listed, **more}


def test_spans_of_the_conventions(tmp_path: Path) -> None:
    asked = [{"role": "user", "parts": [{"type": "text", "content": "where is Ann?"}]}]
    called = {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c1", "name": "find", "arguments": {"who": "Ann"}}],
    }
    answer = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "in Rome"}]}
    messages = [
        {"role": "assistant", "parts": [{"type": "text", "content": "She is in Rome."}], "finish_reason": "stop"}
    ]

    def span(given: list[Any], came: list[Any], **more: Any) -> dict[str, Any]:
        texts = {"gen_ai.input.messages": json.dumps(given), "gen_ai.output.messages": json.dumps(came)}
        return otlp({**texts, "gen_ai.request.model": "m", "http.method": "POST"}, **more)

    took = [
        {"startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 1_500_000_000)}
        for start in (10**18, 2 * 10**18)
    ]
    spans = [
        span(asked, [called], **took[0]),
        span([*asked, called, answer], messages, **took[1]),
        otlp({"db.system": "x"}),
    ]
    document = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    read = Read(tmp_path, "otel", document)
    assert shape(read.row) == TALK
    assert (read.row.policy, read.row.episode_id, read.row.success) == ("m", "t", None)
    assert read.row.message_seconds == [None, 1.5, None, 1.5]
    assert read.notes.ignored["attributes.http.method"] == 2
    other = span([{"role": "user", "parts": [{"type": "text", "content": "else"}]}], messages)
    rows = Read(tmp_path, "otel", {"resourceSpans": [{"scopeSpans": [{"spans": [*spans, other]}]}]}).rows
    assert [row.segment for row in rows] == [0, 1]
    failed = span(asked, [called], status={"code": 2})
    assert Read(tmp_path, "otel", [failed], ".jsonl").row.termination is Termination.INFRA_ERROR


@pytest.mark.parametrize("nested", [False, True])
def test_spans_of_phoenix(nested: bool, tmp_path: Path) -> None:
    flat = {
        "llm.model_name": "m",
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "where is Ann?",
        "llm.output_messages.0.message.role": "assistant",
        "llm.output_messages.0.message.tool_calls.0.tool_call.id": "c1",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "find",
        "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": '{"who": "Ann"}',
    }
    call = {"tool_call": {"id": "c1", "function": {"name": "find", "arguments": '{"who": "Ann"}'}}}
    deep = {
        "llm": {
            "model_name": "m",
            "input_messages": [{"message": USER}],
            "output_messages": [{"message": {"role": "assistant", "tool_calls": [call]}}],
        }
    }
    record = {"context": {"trace_id": "t"}, "attributes": deep if nested else flat, "status_code": "OK"}
    row = Read(tmp_path, "otel", [record], ".jsonl").row
    assert shape(row) == TALK[:2]
    assert (row.policy, row.messages[1].tool_calls[0].id) == ("m", "c1")


def test_observations_of_langfuse(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "be brief"}, USER]}
    item = {
        "id": "o",
        "traceId": "t",
        "type": "GENERATION",
        "model": "m",
        "input": chat,
        "output": {"role": "assistant", "content": "Rome"},
    }
    text = item | {"traceId": "u", "input": "where is Ann?", "output": "Rome"}
    first, second = Read(tmp_path, "otel", [item, text, {"traceId": "t", "type": "SPAN", "id": "x"}], ".jsonl").rows
    assert shape(first) == [("system", "be brief"), ("user", "where is Ann?"), ("assistant", "Rome")]
    assert shape(second) == [("user", "where is Ann?"), ("assistant", "Rome")]
    assert (first.policy, first.messages[0].role) == ("m", Role.SYSTEM)


def test_tools_and_scores_of_langfuse(tmp_path: Path) -> None:
    asked = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "find"}}], "n": 1}
    message = {"role": "assistant", "tool_calls": [CALL]}
    item = {"id": "o", "traceId": "t", "type": "GENERATION", "input": asked, "output": message}
    scores = [{"name": "good", "value": 0.5}, {"name": "note", "value": "fine"}]
    read = Read(tmp_path, "otel", {"id": "t", "observations": [item], "scores": scores, "name": "run"})
    assert shape(read.row) == TALK[:2]
    assert json.loads(read.row.tools)[0]["function"]["name"] == "find"
    assert [(part.name, part.value) for part in read.row.reward_components] == [("good", 0.5)]
    assert (read.row.reward, read.row.episode_id) == (None, "t")
    assert read.notes.ignored == {"id": 1, "name": 1, "input.n": 1, "scores.note": 1}
    answered = Read(tmp_path, "otel", {"data": [item], "meta": {"cursor": "x"}})  # a response of the API
    assert (shape(answered.row), answered.notes.ignored["meta"]) == (TALK[:2], 1)


def test_observations_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "observations.csv"
    rows = [
        {"id": "o", "traceId": "t", "type": "GENERATION", "input": json.dumps([USER]), "output": "in\nRome", "cost": 3},
        {"id": "p", "traceId": "t", "type": "SPAN", "input": "", "output": ""},
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    source = Source(path, Notes())
    assert detect(source) == "otel"
    [row] = FORMATS["otel"].read(source)
    assert shape(row) == [("user", "where is Ann?"), ("assistant", "in\nRome")]
    assert source.notes.ignored == {"id": 1, "cost": 1, "spans of kind SPAN": 1}
    path.write_text("context.trace_id,attributes.llm.input_messages\nt,\"[{'message.role': 'user'}]\"\n")
    with pytest.raises(StoreError, match=r"\[0\]: llm.input_messages is no JSON.*export the spans as JSON or Parquet"):
        list(FORMATS["otel"].read(Source(path)))


def test_another_answer_to_the_same_question_is_a_segment(tmp_path: Path) -> None:
    """Two samples of one prompt in one trace, one of them continued: neither is lost."""

    def span(chat: list[Any], answer: str) -> dict[str, Any]:
        return {"traceId": "t", "type": "GENERATION", "input": chat, "output": {"role": "assistant", "content": answer}}

    longer = [USER, {"role": "assistant", "content": "Rome"}, {"role": "user", "content": "sure?"}]
    spans = [span([USER], "Rome"), span([USER], "Paris"), span([USER], "Rome"), span(longer, "yes")]
    rows = Read(tmp_path, "otel", spans, ".jsonl").rows
    assert sorted(row.messages[1].content for row in rows) == ["Paris", "Rome"]
    assert sorted(len(row.messages) for row in rows) == [2, 4]
