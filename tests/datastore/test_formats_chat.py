"""Chat, Responses, Anthropic messages and training sets of others."""

import json
from pathlib import Path
from typing import Any

import pytest
from format_files import TALK, USER, Read, shape

from agentrl.datastore import StoreError
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Termination


@pytest.mark.parametrize("arguments", ['{"who": "Ann"}', {"who": "Ann"}])
@pytest.mark.parametrize("legacy", [False, True])
def test_openai_chat(legacy: bool, arguments: Any, tmp_path: Path) -> None:
    function = {"name": "find", "arguments": arguments}
    call = {"function_call": function} if legacy else {"tool_calls": [{"id": "c1", "function": function}]}
    answer = {"role": "function", "name": "find"} if legacy else {"role": "tool", "tool_call_id": "c1"}
    messages = [USER, {"role": "assistant", "content": None, **call}, answer | {"content": "in Rome"}]
    messages.append({"role": "assistant", "content": "She is in Rome."})
    name = "openai-chat" if legacy or isinstance(arguments, str) else "trl-sft"
    tools = (
        {"functions": [{"name": "find"}]} if legacy else {"tools": [{"type": "function", "function": {"name": "find"}}]}
    )
    row = Read(tmp_path, name, [{"messages": messages, **tools}], ".jsonl").row
    assert shape(row) == TALK
    assert row.messages[2].tool_call_id == row.messages[1].tool_calls[0].id != ""
    assert (row.messages[2].name, json.loads(row.tools)[0]["function"]["name"]) == ("find", "find")
    assert (row.reward, row.success, row.termination) == (None, None, Termination.ANSWERED)


def test_llama_factory_chat_parts(tmp_path: Path) -> None:
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "tool_call", "value": '{"name": "find", "arguments": {"who": "Ann"}}'},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "value": "where is Ann?"}], "loss_weight": 0.0},
        {"role": "assistant", "content": parts},
    ]
    read = Read(tmp_path, "openai-chat", [{"messages": messages}], ".jsonl")
    assert shape(read.row) == TALK[:2]
    assert (read.row.messages[1].reasoning, read.row.termination) == ("hm", Termination.UNKNOWN)
    assert read.notes.ignored == {"messages.loss_weight": 1}


def test_openai_responses(tmp_path: Path) -> None:
    output = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "look"}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "find",
            "arguments": '{"who": "Ann"}',
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "in Rome"},
        {"type": "web_search_call", "id": "w", "action": {"query": "Ann"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "She is in Rome."}]},
    ]
    record = {
        "input": "where is Ann?",
        "instructions": "be brief",
        "output": output,
        "model": "m",
        "status": "completed",
    }
    read = Read(tmp_path, "openai-responses", [record], ".jsonl")
    assert shape(read.row)[:4] == [("system", "be brief"), *TALK[:3]]
    assert json.loads(read.row.messages[4].content)["type"] == "web_search_call"
    assert (read.row.messages[2].reasoning, read.row.messages[-1].content) == ("look", "She is in Rome.")
    assert read.notes.remarks == {"items of kind 'web_search_call' are kept as JSON text of a tool": 1}
    assert (
        Read(tmp_path, "openai-responses", [record | {"status": "incomplete"}], ".jsonl").row.termination
        == "max_tokens"
    )


def test_anthropic_blocks(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "cat.png"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "in Rome"}],
        "is_error": True,
    }
    record = {
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [{"name": "find", "description": "finds", "input_schema": {"type": "object"}}],
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "look", "signature": "x"},
                    {"type": "tool_use", "id": "c1", "name": "find", "input": {"who": "Ann"}},
                ],
            },
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}, image]},
        ],
        "response": {"content": [{"type": "text", "text": "She is in Rome."}], "stop_reason": "max_tokens"},
    }
    read = Read(tmp_path, "anthropic", [record], ".jsonl")
    row = read.row
    assert shape(row)[:4] == [("system", "be brief"), *TALK[:3]]
    assert row.messages[4].content == "and?"
    assert read.notes.ignored == {"messages.content.image": 1, "messages.content.signature": 1}
    assert (row.messages[2].reasoning, row.n_tool_errors, row.termination) == ("look", 1, Termination.MAX_TOKENS)
    assert json.loads(row.tools)[0]["function"]["parameters"] == {"type": "object"}


def test_preferences_of_llama_factory(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}]
    record = {
        "conversations": turns,
        "chosen": {"from": "gpt", "value": "ho"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    good, bad = Read(tmp_path, "sharegpt-preference", [record]).rows
    assert (good.success, bad.success, good.task_id == bad.task_id) == (True, False, True)
    assert (
        Read(tmp_path, "sharegpt", [{"conversations": [*turns, record["chosen"]], "kto_tag": False}]).row.success
        is False
    )


def test_alpaca(tmp_path: Path) -> None:
    record = {"instruction": "add", "input": "1 2", "output": "3", "history": [["hi", "ho"]], "system": "count"}
    row = Read(tmp_path, "alpaca", [record]).row
    assert shape(row) == [
        ("system", "count"),
        ("user", "hi"),
        ("assistant", "ho"),
        ("user", "add\n1 2"),
        ("assistant", "3"),
    ]
    pair = {"instruction": "add", "input": "", "chosen": "3", "rejected": "4"}
    assert [row.success for row in Read(tmp_path, "alpaca", [pair]).rows] == [True, False]


def test_a_reader_names_the_record_and_the_key(tmp_path: Path) -> None:
    for name, record, expected in (
        (
            "tau-bench",
            {"task_id": 1, "traj": [{"content": "x", "role": "user"}, {"content": "y"}]},
            r":1: lacks 'role'",
        ),
        ("alpaca", {"instruction": "x", "output": 3, "history": [["a"]]}, r":1: not enough values"),
        ("verifiers", {"prompt": "a", "completion": "b", "reward": 1.0, "info": "{"}, r":1: "),
    ):
        path = tmp_path / "x.jsonl"
        path.write_text(json.dumps(record) + "\n")
        with pytest.raises(StoreError, match=expected):
            list(FORMATS[name].read(Source(path)))


def test_alpaca_says_what_it_lacks_and_leaves_nothing_out_in_silence(tmp_path: Path) -> None:
    both = {"instruction": "add", "output": "3", "chosen": "3", "rejected": "4"}
    read = Read(tmp_path, "alpaca", [both, {"instruction": "add"}], ".jsonl")
    assert [row.success for row in read.rows] == [True, False]
    assert (read.notes.ignored, read.notes.unreadable[0].reason) == ({"output": 1}, "lacks 'output'")
