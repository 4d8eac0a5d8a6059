"""What packages write, as read by importers. The documents have the shape of those that the named versions of the
packages wrote when they ran against a server or a model that answers by rote."""

import json
from pathlib import Path
from typing import Any

from format_files import Read, shape

CALL = {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"command": "ls"}'}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


def test_mini_swe_agent_with_responses(tmp_path: Path) -> None:
    """mini-swe-agent 2.4.6, ``litellm_response``: messages are Responses items."""
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]}
    document = {
        "info": {"exit_status": "Submitted", "submission": "hi", "config": {"model": {"model_name": "m"}}},
        "messages": [
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "You help."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it"}]},
            {"object": "response", "output": [said, CALL], "extra": {"cost": 1.0}},
            {"type": "function_call_output", "call_id": "call_1", "output": "a b", "extra": {"returncode": 0}},
            {"object": "response", "output": [{**CALL, "call_id": "call_2"}], "extra": {"cost": 1.0}},
            {"role": "exit", "content": "hi", "extra": {"submission": "hi"}},
        ],
        "trajectory_format": "mini-swe-agent-1.1",
    }
    found = Read(tmp_path, "mini-swe-agent", document, ".traj.json")
    assert shape(found.row) == [
        ("system", "You help."),
        ("user", "Do it"),
        ("assistant", 'I look bash{"command": "ls"}'),
        ("tool", "a b"),
        ("assistant", 'bash{"command": "ls"}'),
    ]
    assert (found.row.messages[3].name, found.row.n_tool_calls, found.row.policy) == ("bash", 2, "m")
    del document["messages"][2]["output"]
    [broken] = Read(tmp_path, "mini-swe-agent", document, ".traj.json").notes.unreadable
    assert (broken.place.endswith("file.traj.json[0]"), broken.key) == (True, "output")


def test_spans_of_openinference(tmp_path: Path) -> None:
    """openinference-instrumentation-openai 0.1.66 with opentelemetry-sdk 1.45, ``ReadableSpan.to_json``."""
    tool = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": SCHEMA}}
    attributes: dict[str, Any] = {"openinference.span.kind": "LLM", "llm.model_name": "gpt-x"}
    chat = [("input", 0, "system", "be good"), ("input", 1, "user", "hi"), ("output", 0, "assistant", "done")]
    for side, number, role, text in chat:
        attributes[f"llm.{side}_messages.{number}.message.role"] = role
        attributes[f"llm.{side}_messages.{number}.message.content"] = text
    for number, name in ((10, "last"), (2, "find")):
        one = {**tool, "function": {**tool["function"], "name": name}}
        attributes[f"llm.tools.{number}.tool.json_schema"] = json.dumps(one)
    span = {"name": "ChatCompletion", "context": {"trace_id": "0x5", "span_id": "0x1"}, "attributes": attributes}
    row = Read(tmp_path, "otel", [span], ".jsonl").row
    assert [one["function"]["name"] for one in json.loads(row.tools)] == ["find", "last"]
    assert shape(row) == [("system", "be good"), ("user", "hi"), ("assistant", "done")]


def test_tools_of_every_api_come_in_the_form_of_chat(tmp_path: Path) -> None:
    """openai 2.54 (``Response.model_dump``) and anthropic 2.12: tools, also those that the server runs."""
    flat = {"type": "function", "name": "find", "description": "finds", "parameters": SCHEMA, "strict": True}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
    response = {"object": "response", "model": "m", "output": [CALL], "tools": [flat], "status": "completed"}
    [tool] = json.loads(Read(tmp_path, "openai-responses", [response], ".jsonl").row.tools)
    assert tool["function"] == {"name": "find", "description": "finds", "strict": True, "parameters": SCHEMA}
    ours = {"name": "find", "description": "finds", "input_schema": SCHEMA}
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [ours, search]}
    first, second = json.loads(Read(tmp_path, "anthropic", [asked], ".jsonl").row.tools)
    assert (first["function"]["parameters"], second) == (SCHEMA, search)


def test_what_is_kept_as_text_is_not_counted_as_ignored(tmp_path: Path) -> None:
    image = {"type": "input_image", "detail": "auto", "image_url": "http://x/y.png"}
    text = {"type": "input_text", "text": "see", "odd": 1}
    asked = {"input": [{"role": "user", "content": [text, image]}], "output": [CALL]}
    found = Read(tmp_path, "openai-responses", [asked], ".jsonl")
    assert json.dumps(image) in found.row.messages[0].content
    assert dict(found.notes.ignored) == {"items.content.odd": 1}


def test_llama_factory_1_preferences(tmp_path: Path) -> None:
    def said(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": 1.0}

    chosen = [said("system", "be good"), said("user", "hi"), said("assistant", "hello")]
    line = {"chosen_messages": chosen, "rejected_messages": [*chosen[:2], said("assistant", "go away")]}
    found = Read(tmp_path, "sharegpt-preference", [line], ".jsonl")
    good, bad = found.rows
    assert (good.success, bad.success, good.task_id == bad.task_id) == (True, False, True)
    assert shape(bad) == [("system", "be good"), ("user", "hi"), ("assistant", "go away")]
    assert found.notes.ignored["messages.loss_weight"] == 6
