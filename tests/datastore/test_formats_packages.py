"""What packages write, as read by importers. The documents have the shape of those that the named versions of the
packages wrote when they ran against a server or a model that answers by rote."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from format_files import Read, shape

from agentrl.datastore import StoreError
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Termination, Trajectory

CALL = {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"command": "ls"}'}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}


def test_mini_swe_agent_with_responses(tmp_path: Path) -> None:
    """mini-swe-agent 2.4.6, ``litellm_response``: messages are Responses items."""
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]}
    document = {
        "info": {"exit_status": "Submitted", "submission": "hi", "config": {"model": {"model_name": "m"}}},
        "messages": [
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "You help."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Do it"}]},
            {"object": "response", "output": [message, CALL], "extra": {"cost": 1.0}},
            {"type": "function_call_output", "call_id": "call_1", "output": "a b", "extra": {"returncode": 0}},
            {"object": "response", "output": [{**CALL, "call_id": "call_2"}], "extra": {"cost": 1.0}},
            {"role": "exit", "content": "hi", "extra": {"submission": "hi"}},
        ],
        "trajectory_format": "mini-swe-agent-1.1",
    }
    read_back = Read(tmp_path, "mini-swe-agent", document, ".traj.json")
    assert shape(read_back.row) == [
        ("system", "You help."),
        ("user", "Do it"),
        ("assistant", 'I look bash{"command": "ls"}'),
        ("tool", "a b"),
        ("assistant", 'bash{"command": "ls"}'),
    ]
    assert (read_back.row.messages[3].name, read_back.row.n_tool_calls, read_back.row.policy) == ("bash", 2, "m")
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
        item = {**tool, "function": {**tool["function"], "name": name}}
        attributes[f"llm.tools.{number}.tool.json_schema"] = json.dumps(item)
    span = {"name": "ChatCompletion", "context": {"trace_id": "0x5", "span_id": "0x1"}, "attributes": attributes}
    row = Read(tmp_path, "otel", [span], ".jsonl").row
    assert [tool["function"]["name"] for tool in json.loads(row.tools)] == ["find", "last"]
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


def test_an_image_of_a_request_is_counted(tmp_path: Path) -> None:
    image = {"type": "input_image", "detail": "auto", "image_url": "http://x/y.png"}
    text = {"type": "input_text", "text": "see", "odd": 1}
    asked = {"input": [{"role": "user", "content": [text, image]}], "output": [CALL]}
    read_back = Read(tmp_path, "openai-responses", [asked], ".jsonl")
    assert read_back.row.messages[0].content == "see"
    assert dict(read_back.notes.ignored) == {"items.content.odd": 1, "items.content.input_image": 1}


def test_llama_factory_1_preferences(tmp_path: Path) -> None:
    def said(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": text}], "loss_weight": 1.0}

    chosen = [said("system", "be good"), said("user", "hi"), said("assistant", "hello")]
    line = {"chosen_messages": chosen, "rejected_messages": [*chosen[:2], said("assistant", "go away")]}
    read_back = Read(tmp_path, "sharegpt-preference", [line], ".jsonl")
    good, bad = read_back.rows
    assert (good.success, bad.success, good.task_id == bad.task_id) == (True, False, True)
    assert shape(bad) == [("system", "be good"), ("user", "hi"), ("assistant", "go away")]
    assert read_back.notes.ignored["messages.loss_weight"] == 6


def test_openhands_sdk(tmp_path: Path) -> None:
    """openhands-sdk 1.58, ``event.model_dump_json``: what its own ``events_to_messages`` makes of the same events."""
    call = {"id": "c1", "name": "think", "arguments": '{"thought": "hm"}', "origin": "completion"}
    acted = {"kind": "ActionEvent", "source": "agent", "tool_name": "think", "thought": [], "action": {"thought": "hm"}}
    told = {"source": "environment", "tool_name": "think"}
    block = {"type": "thinking", "thinking": "deep", "signature": "s"}
    tool = {"description": "thinks", "title": "think", "kind": "ThinkTool", "action_type": "ThinkAction"}
    prompt = {
        "system_prompt": {"type": "text", "text": "you are"},
        "dynamic_context": {"type": "text", "text": "today"},
    }
    message = {"role": "user", "content": [{"type": "text", "text": "fix it"}]}
    seen = {"content": [{"type": "text", "text": "logged"}], "is_error": True}
    events = [
        {"kind": "SystemPromptEvent", **prompt, "tools": [tool]},
        {"kind": "MessageEvent", "llm_message": message, "extended_content": [{"type": "text", "text": "a skill"}]},
        {**acted, "tool_call_id": "c1", "tool_call": call, "llm_response_id": "r1", "thinking_blocks": [block]},
        {**acted, "tool_call_id": "c2", "tool_call": {**call, "id": "c2"}, "llm_response_id": "r1"},
        {**told, "kind": "ObservationEvent", "tool_call_id": "c1", "observation": seen},
        {**told, "kind": "UserRejectObservation", "tool_call_id": "c2", "rejection_reason": "no way"},
    ]
    read_back = Read(tmp_path, "openhands", events, ".jsonl")
    assert shape(read_back.row) == [
        ("system", "you are\n\ntoday"),
        ("user", "fix it\na skill"),
        ("assistant", 'think{"thought": "hm"} think{"thought": "hm"}'),
        ("tool", "logged"),
        ("tool", "no way"),
    ]
    assert (read_back.row.messages[2].reasoning, read_back.row.n_tool_errors) == ("deep", 1)
    assert json.loads(read_back.row.tools) == [
        {"type": "function", "function": {"name": "think", "description": "thinks"}}
    ]
    assert read_back.notes.ignored["thinking_blocks.signature"] == 1


def zstandard(path: Path, members: dict[str, Any]) -> Path:
    """A ZIP archive whose members are compressed by Zstandard, as ``zipfile`` writes it from Python 3.14 on."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            content = json.dumps(value).encode()
            archive.writestr(name, pa.compress(content, codec="zstd", asbytes=True))
            info = archive.getinfo(name)
            info.compress_type, info.file_size, info.CRC = 93, len(content), zlib.crc32(content)
    return path


def test_archives_of_inspect(tmp_path: Path) -> None:
    """inspect-ai 0.3.285, ``inspect eval``: members are compressed by Zstandard, and the ids of an input's messages
    are drawn anew in each run."""

    def row(identity: str) -> Trajectory:
        asked = {"role": "user", "content": "where is Ann?", "id": identity}
        sample = {"id": "s", "epoch": 1, "input": [asked], "target": "Rome", "messages": [asked]}
        header = {"version": 2, "eval": {"task": "geo", "model": "m"}}
        path = zstandard(tmp_path / f"{identity}.eval", {"header.json": header, "samples/s.json": sample})
        assert detect(Source(path)) == "inspect"
        [result] = FORMATS["inspect"].read(Source(path))
        return result

    assert shape(row("a")) == [("user", "where is Ann?")]
    assert row("a").task_id == row("b").task_id
    path = zstandard(tmp_path / "torn.eval", {"header.json": {"eval": {}}, "samples/s.json": {"id": "s" * 200}})
    content = bytearray(path.read_bytes())
    content[content.index(b"samples/s.json") + 30] ^= 255
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"torn\.eval: samples/s\.json cannot be read"):
        list(FORMATS["inspect"].read(Source(path)))


def test_spans_of_anthropic_and_of_responses(tmp_path: Path) -> None:
    """openinference-instrumentation-anthropic 3.1 repeats a call among the parts of a message, and that of openai
    0.1.66 gives reasoning as a message of its own."""
    text = "llm.output_messages.0.message."
    part = f"{text}contents.1.message_content."
    claude = {
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "where is Ann?",
        f"{text}role": "assistant",
        f"{text}contents.0.message_content.type": "text",
        f"{text}contents.0.message_content.text": "I look.",
        f"{part}type": "tool_use",
        f"{part}tool_call.function.name": "find",
        f"{text}tool_calls.0.tool_call.id": "t1",
        f"{text}tool_calls.0.tool_call.function.name": "find",
        f"{text}tool_calls.0.tool_call.function.arguments": "{}",
        "llm.response.model_name": "claude-x",
        "llm.finish_reason": "max_tokens",
    }
    openai = {
        "llm.input_messages.0.message.role": "user",
        "llm.input_messages.0.message.content": "where is Ann?",
        f"{text}role": "assistant",
        f"{text}contents.0.message_content.type": "reasoning",
        f"{text}contents.0.message_content.text": "look",
        "llm.output_messages.1.message.role": "assistant",
        "llm.output_messages.1.message.content": "in Rome",
    }
    spans = [{"context": {"trace_id": name}, "attributes": item} for name, item in (("a", claude), ("b", openai))]
    spans[1]["status"] = {"status_code": "ERROR"}  # type: ignore[assignment]
    first, second = Read(tmp_path, "otel", spans, ".jsonl").rows
    assert shape(first) == [("user", "where is Ann?"), ("assistant", "I look. find{}")]
    assert (first.policy, first.termination) == ("claude-x", Termination.MAX_TOKENS)
    assert shape(second) == [("user", "where is Ann?"), ("assistant", "in Rome")]
    assert (second.messages[1].reasoning, second.termination) == ("look", Termination.INFRA_ERROR)


@pytest.mark.parametrize(
    ("stop", "end"),
    [
        ("agent_timeout", Termination.TIME_LIMIT),
        ("sandbox_error", Termination.INFRA_ERROR),
        ("task_error", Termination.ENV_ERROR),
        ("compaction_failed", Termination.MAX_CONTEXT),
        ("max_output_tokens", Termination.MAX_TOKENS),
        ("max_turns", Termination.MAX_STEPS),
        ("agent_completed", Termination.ANSWERED),
        ("length", Termination.MAX_TOKENS),
    ],
)
def test_traces_of_verifiers(stop: str, end: Termination, tmp_path: Path) -> None:
    """verifiers 0.4, ``write_episode``: tools are those of the first node, and each end has its name."""
    tool = {"type": "function", "name": "find", "description": "finds", "parameters": SCHEMA}
    nodes = [
        {"message": {"role": "user", "content": "where?"}, "tools": [tool]},
        {"parent": 0, "message": {"role": "assistant", "content": "Rome"}, "sampled": True},
    ]
    trace = {"task": {"type": "T", "data": {}}, "agent": {"name": "solver"}, "nodes": nodes, "ok": False}
    errors = [{"type": "X", "message": "boom"}] if stop.endswith("_error") else []
    calls = [{"node": 1, "finish_reason": "length"}] if stop == "length" else []
    trace |= {"stop_condition": "agent_completed" if calls else stop, "errors": errors, "calls": calls}
    read_back = Read(tmp_path, "verifiers-v1", [{"id": "e", "traces": [trace]}], ".jsonl")
    assert read_back.row.termination is end
    assert json.loads(read_back.row.tools)[0]["function"]["name"] == "find"
    assert read_back.notes.remarks == {}


def test_tools_that_the_server_ran_are_no_text_of_the_model(tmp_path: Path) -> None:
    """anthropic 2.12 and openai 3.54: no stage trains on what a hosted tool answered."""
    blocks = [
        {"type": "text", "text": "I search."},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Ann"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"error_code": "unavailable"}},
        {"type": "text", "text": "Nothing."},
        {"type": "redacted_thinking", "data": "xyz"},
    ]
    answer = {"type": "message", "role": "assistant", "model": "m", "content": blocks, "stop_reason": "end_turn"}
    read_back = Read(tmp_path, "anthropic", [answer], ".jsonl")
    assert [message.role.value for message in read_back.row.messages] == ["assistant", "tool", "assistant"]
    assert shape(read_back.row)[0] == ("assistant", 'I search. web_search{"query": "Ann"}')
    assert (read_back.row.n_tool_errors, read_back.row.termination) == (1, Termination.ANSWERED)
    assert read_back.notes.ignored == {"messages.content.redacted_thinking": 1}
    searched = {"type": "web_search_call", "id": "w", "action": {"query": "Ann"}}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rome"}]}
    response = {"object": "response", "output": [searched, message], "status": "incomplete"}
    cut = response | {"incomplete_details": {"reason": "content_filter"}}
    for item, end in ((response, Termination.MAX_TOKENS), (cut, Termination.UNKNOWN)):
        row = Read(tmp_path, "openai-responses", [item], ".jsonl").row
        assert [message.role.value for message in row.messages] == ["tool", "assistant"]
        assert row.termination is end
