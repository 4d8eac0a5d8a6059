"""Logs of requests and responses, and last steps that agents leave in one place of their files only."""

import json
from pathlib import Path
from typing import Any

import pytest
from format_files import CALL, CHAT, TALK, USER, Read, lines, shape

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats.imports import import_paths
from agentrl.schemas.trajectory import Role, Termination

SCHEMA = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def completed(**message: Any) -> dict[str, Any]:
    """A completion as the client of openai 3.54 and litellm dump it."""
    from openai.types.chat import ChatCompletion

    text = {"role": "assistant", "content": None, **message}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "finish_reason": finish, "message": text}
    about = {"id": "r", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
    return ChatCompletion.model_validate(about).model_dump(mode="json")


TOLD = {"role": "tool", "tool_call_id": "c1", "content": "in Rome"}
ASKED = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOLD]


def test_llm_completions_of_openhands(tmp_path: Path) -> None:
    """OpenHands 0.x, ``log_completions``: a file per request, with the response beside its messages."""
    log = {
        "messages": [USER],
        "response": completed(tool_calls=[CALL]),
        "args": [],
        "kwargs": {"tools": [SCHEMA], "temperature": 0.0, "model": "litellm_proxy/m"},
        "timestamp": 1735.5,
        "cost": 0.01,
    }
    read = Read(tmp_path, "openai-chat", log)
    assert shape(read.row) == TALK[:2]
    assert [tool["function"]["name"] for tool in json.loads(read.row.tools)] == ["find"]
    assert (read.row.termination, read.row.policy) == (Termination.UNKNOWN, "litellm_proxy/m")
    assert read.notes.ignored == {"kwargs.temperature": 1}
    assert (read.row.source_id, read.row.cost_usd) == (log["response"]["id"], 0.01)
    last = Read(tmp_path, "openai-chat", log | {"messages": ASKED, "response": completed(content="She is in Rome.")})
    assert (shape(last.row), last.row.termination) == (TALK, Termination.ANSWERED)


@pytest.mark.parametrize("text", [True, False])
def test_logs_of_litellm(text: bool, tmp_path: Path) -> None:
    """litellm's callbacks give the provider's response as JSON text, its payloads the settings under another key."""
    answer = completed(content="She is in Rome.")
    log = {"model": "gpt-x", "messages": ASKED}
    if text:
        log |= {"original_response": json.dumps(answer), "optional_params": {"tools": [SCHEMA]}}
    else:
        log |= {"response": answer, "model_parameters": {"tools": [SCHEMA]}}
    read = Read(tmp_path, "openai-chat", [log], ".jsonl")
    assert (shape(read.row), read.row.policy, len(json.loads(read.row.tools))) == (TALK, "gpt-x", 1)


def test_a_response_of_another_api_or_plain_text(tmp_path: Path) -> None:
    claude = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "She is in Rome."}]}
    for key, answer in (
        ("original_response", json.dumps(claude)),
        ("response", "She is in Rome."),
        ("original_response", "She is in Rome."),
    ):
        row = Read(tmp_path, "openai-chat", [{"messages": ASKED, key: answer}], ".jsonl").row
        assert shape(row) == TALK
    log = {"request": {"messages": ASKED, "tools": [SCHEMA], "model": "m"}, "response": completed(content="x")}
    row = Read(tmp_path, "openai-chat", [log], ".jsonl").row
    assert (row.messages[-1].content, row.policy, row.n_tool_calls) == ("x", "m", 1)
    odd = Read(tmp_path, "openai-chat", [{"messages": ASKED, "response": completed(content="x") | {"choices": []}}])
    assert "response holds no completion, but the keys id, choices" in odd.notes.unreadable[0].reason


def test_each_choice_is_a_row(tmp_path: Path) -> None:
    log = {"messages": [USER], "response": completed(content="a")}
    log["response"]["choices"].append({"index": 1, "message": {"content": "b"}, "finish_reason": "length"})
    first, second = Read(tmp_path, "openai-chat", [log], ".jsonl").rows
    assert (first.sample_index, second.sample_index, first.task_id == second.task_id) == (0, 1, True)
    assert (second.messages[-1].content, second.termination) == ("b", Termination.MAX_TOKENS)


@pytest.mark.parametrize("format", ["openai-chat", "anthropic", "trl-sft", "openai-responses"])
def test_a_record_without_an_answer_is_set_aside_unless_asked_for(format: str, tmp_path: Path) -> None:
    question = {"input": "where?", "output": [], "object": "response"}
    good = {"input": "where?", "output": [{"type": "message", "role": "assistant", "content": "here"}]}
    records = [good, question] if format == "openai-responses" else [CHAT, {"messages": [USER]}]
    path = lines(tmp_path / "x.jsonl", *records)
    buffer = TrajectoryBuffer(tmp_path / "store")
    with pytest.raises(StoreError, match=r"x\.jsonl:2: has no assistant message; --prompts takes such records"):
        import_paths(buffer, [path], format)
    aside = import_paths(buffer, [path], format, on_error="quarantine")
    assert (aside.rows, [item["place"].rpartition(":")[2] for item in aside.unreadable]) == (1, ["2"])
    assert import_paths(buffer, [path], format, prompts=True).rows == 2


def test_the_last_step_of_swe_agent_that_the_history_lacks(tmp_path: Path) -> None:
    """SWE-agent 1.1 with native calls: a step that ends the run is in ``trajectory`` alone."""

    def step(thought: str, action: str, observation: str) -> dict[str, Any]:
        return {"action": action, "observation": observation, "thought": thought, "response": thought, "query": []}

    def said(number: int, thought: str, name: str, arguments: dict[str, Any], action: str) -> dict[str, Any]:
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        return {"role": "assistant", "content": thought, "thought": thought, "action": action, "tool_calls": [call]}

    history = [
        {"role": "system", "content": "you are"},
        {"role": "user", "content": "fix it"},
        said(1, "I look", "bash", {"command": "ls"}, "ls"),
        {"role": "tool", "content": "a.py", "tool_call_ids": ["c1"]},
        said(2, "I try to submit", "submit", {}, "submit"),
    ]
    steps = [step("I look", "ls", "a.py"), step("I try to submit", "submit", "look again")]
    later = [step("now", "submit", "diff --git"), step("Exit due to cost", "", "")]
    document = {"trajectory": steps, "history": history, "info": {"exit_status": "submitted (exit_cost)"}}
    whole = Read(tmp_path, "swe-agent", document, ".traj")
    assert shape(whole.row)[-2:] == [("assistant", "I try to submit submit{}"), ("tool", "look again")]
    more = Read(tmp_path, "swe-agent", document | {"trajectory": steps + later}, ".traj")
    assert shape(more.row)[-4:] == [
        ("tool", "look again"),
        ("assistant", "now submit{}"),
        ("tool", "diff --git"),
        ("assistant", "Exit due to cost"),
    ]
    assert more.notes.remarks["last steps that the history lacks: taken from the trajectory"] == 2
    answered = [*history, {"role": "tool", "content": "look again", "tool_call_ids": ["c2"]}]
    assert shape(Read(tmp_path, "swe-agent", document | {"history": answered}, ".traj").row) == shape(whole.row)
    cut = Read(tmp_path, "swe-agent", document | {"trajectory": steps[:1]}, ".traj").row
    assert shape(cut)[-1] == ("assistant", "I try to submit submit{}")  # no step says what it gave


def test_an_error_of_openhands_answers_the_call_that_it_follows(tmp_path: Path) -> None:
    events = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "fix it"}},
        {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls"}},
        {"id": 2, "source": "agent", "observation": "error", "content": "timed out", "cause": None},
        {"id": 3, "source": "agent", "observation": "error", "content": "no call is open", "cause": None},
        {"id": 4, "source": "agent", "action": "finish", "args": {"thought": "done"}},
    ]
    read = Read(tmp_path, "openhands", events)
    assert [m.role for m in read.row.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert (read.row.messages[2].content, read.row.messages[2].tool_call_id) == ("timed out", "call_1")
    assert (read.row.n_tool_errors, read.notes.ignored) == (2, {"events of kind error": 1})
