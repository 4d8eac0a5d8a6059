"""Sessions of agents."""

import json
from pathlib import Path
from typing import Any

from format_files import CALL, TALK, Read, shape
from format_rows import hard

from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import Termination


def test_atif_of_others(tmp_path: Path) -> None:
    document: dict[str, Any] = {
        "schema_version": "ATIF-v1.7",
        "session_id": "s1",
        "agent": {"name": "acme", "version": "2", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "hello"}]},
            {
                "step_id": 2,
                "source": "agent",
                "message": "",
                "tool_calls": [{"tool_call_id": "c", "function_name": "look", "arguments": {"x": 1}}],
                "observation": {"results": [{"source_call_id": "c", "content": "seen"}, {"content": None}]},
                "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5], "cost_usd": 1},
            },
            {
                "step_id": 3,
                "source": "agent",
                "message": "done",
                "metrics": {"prompt_token_ids": [1, 2, 3, 4], "completion_token_ids": [5], "logprobs": [-0.25]},
            },
        ],
    }
    read = Read(tmp_path, "atif", document)
    row = read.row
    assert [m.role.value for m in row.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (row.input_ids, row.action_mask) == ([1, 2, 3, 4, 5], [False, False, True, False, True])
    assert (row.messages[1].token_start, row.messages[4].token_end) == (2, 5)
    assert (row.messages[2].name, row.agent, row.policy) == ("look", "acme", "m")
    assert read.notes.ignored == {"agent.version": 1}
    assert read.row.cost_usd == 1
    document["steps"][2]["metrics"]["prompt_token_ids"] = [7, 7]
    assert Read(tmp_path, "atif", document).row.input_ids == []  # not one sequence: better no tokens than wrong ones


def test_swe_agent_of_others(tmp_path: Path) -> None:
    step = {"action": "ls\n", "observation": "a.py", "response": "Let me look\n```\nls\n```", "thought": "Let me look"}
    query = [{"role": "system", "content": "you are"}, {"role": "user", "content": "fix it"}]
    last = {"action": "submit", "observation": "", "response": "", "thought": ""}
    for key in ("query", "message"):
        info = {"exit_status": "submitted (exit_cost)", "submission": "d", "model_stats": {"cost": 1, "tokens_sent": 7}}
        read = Read(tmp_path, "swe-agent", {"trajectory": [step | {key: query}, last], "info": info}, ".traj")
        assert [m.content for m in read.row.messages[:4]] == ["you are", "fix it", "Let me look", "a.py"]
        assert read.row.messages[2].tool_calls[0].parsed() == {"command": "ls"}
        assert (read.row.termination, read.row.success) == (Termination.ANSWERED, None)
        assert json.loads(read.row.final_state) == {"submission": "d"}
        assert read.notes.ignored == {"info.model_stats.cost": 1, "trajectory.response": 1}
        assert (read.row.prompt_tokens, read.row.completion_tokens, read.row.cost_usd) == (7, None, None)
    context = {"trajectory": [step], "info": {"exit_status": "exit_context"}}
    assert Read(tmp_path, "swe-agent", context, ".traj").row.termination is Termination.MAX_CONTEXT
    assert len(Read(tmp_path, "swe-agent", {"history": query}, ".traj").rows) == 1


def test_mini_swe_agent(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "you are"},
        {"role": "user", "content": "fix it", "extra": {"timestamp": 1}},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "extra": {"cost": 1}},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
    ]
    info = {"exit_status": "TimeExceeded", "submission": "diff", "config": {"model": {"model_name": "m"}}}
    document = {"info": info, "messages": messages, "trajectory_format": "mini-swe-agent-1.1", "instance_id": "i"}
    row = Read(tmp_path, "mini-swe-agent", document, ".traj.json").row
    assert [m.role.value for m in row.messages] == ["system", "user", "assistant", "tool"]
    assert (row.termination, row.policy, row.success) == (Termination.TIME_LIMIT, "m", None)
    assert row.task_id.startswith("mini-swe-agent/i-")
    assert len(Read(tmp_path, "mini-swe-agent", messages[:3], ".traj.json").rows) == 1


def test_openhands_events(tmp_path: Path) -> None:
    message = {"content": "look", "role": "assistant", "tool_calls": [CALL, CALL | {"id": "c2"}]}
    meta = {"model_response": {"id": "r1", "choices": [{"message": message}]}, "function_name": "find"}
    events = [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "you are", "tools": [{"name": "find"}]}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": "where is Ann?"}},
        {"id": 2, "source": "user", "action": "recall", "args": {}},
        {"id": 3, "source": "agent", "action": "run", "args": {}, "tool_call_metadata": meta | {"tool_call_id": "c1"}},
        {"id": 4, "source": "agent", "action": "run", "args": {}, "tool_call_metadata": meta | {"tool_call_id": "c2"}},
        {"id": 5, "observation": "run", "content": "a", "cause": 3, "success": False},
        {"id": 6, "observation": "run", "content": "b", "cause": 4},
        {"id": 7, "source": "agent", "action": "finish", "args": {"thought": "in Rome"}},
    ]
    read = Read(tmp_path, "openhands", events)
    row = read.row
    assert [m.role.value for m in row.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [m.tool_call_id for m in row.messages[3:5]] == ["c1", "c2"]
    assert (row.n_tool_calls, row.n_tool_errors, row.termination) == (3, 1, Termination.ANSWERED)
    assert read.notes.ignored == {"events of kind recall": 1, "args": 1}
    line = {
        "instance_id": "i",
        "history": events[:-1],
        "test_result": {"git_patch": "d"},
        "metadata": {"llm_config": {"model": "m"}},
    }
    first, second = Read(
        tmp_path,
        "openhands",
        [line | {"report": {"resolved": True}}, line | {"error": "maximum iteration reached"}],
        ".jsonl",
    ).rows
    assert (first.success, first.policy, second.success, second.termination) == (True, "m", None, Termination.MAX_STEPS)


def test_openhands_events_of_the_sdk(tmp_path: Path) -> None:
    call = {"id": "c1", "name": "find", "arguments": '{"who": "Ann"}'}
    events = [
        {"kind": "SystemPromptEvent", "system_prompt": {"type": "text", "text": "you are"}, "tools": []},
        {
            "kind": "MessageEvent",
            "source": "user",
            "llm_message": {"role": "user", "content": [{"type": "text", "text": "where is Ann?"}]},
        },
        {
            "kind": "ActionEvent",
            "tool_name": "find",
            "tool_call_id": "c1",
            "tool_call": call,
            "thought": [],
            "llm_response_id": "r",
        },
        {
            "kind": "ObservationEvent",
            "tool_name": "find",
            "tool_call_id": "c1",
            "observation": {"content": [{"type": "text", "text": "in Rome"}]},
        },
        {
            "kind": "MessageEvent",
            "source": "agent",
            "llm_message": {"role": "assistant", "content": [{"type": "text", "text": "She is in Rome."}]},
        },
        {"kind": "ConversationStateUpdateEvent", "key": "x"},
    ]
    read = Read(tmp_path, "openhands", events, ".jsonl")
    assert shape(read.row) == [("system", "you are"), *TALK]
    assert read.notes.ignored == {"events of kind ConversationStateUpdateEvent": 1}


def test_claude_code_sessions(tmp_path: Path) -> None:
    def line(kind: str, content: Any, name: str | None = None, **more: Any) -> dict[str, Any]:
        message = {"role": kind, "content": content} | ({"id": name, "model": "m"} if name else {})
        return {"type": kind, "message": message, "sessionId": "s", "uuid": "u", "isSidechain": False, **more}

    result = [{"type": "tool_result", "tool_use_id": "c1", "content": "in Rome", "is_error": True}]
    lines = [
        {"type": "summary", "summary": "x", "leafUuid": "y"},
        line("user", "where is Ann?"),
        line("assistant", [{"type": "thinking", "thinking": "hm"}], "m1"),
        line("assistant", [{"type": "tool_use", "id": "c1", "name": "find", "input": {"who": "Ann"}}], "m1"),
        line("user", result, toolUseResult={"x": 1}),
        line("user", "helper, look", isSidechain=True, agentId="a"),
        line("assistant", [{"type": "text", "text": "She is in Rome."}], "m2"),
        {"type": "system", "subtype": "compact_boundary", "sessionId": "s"},
        line("user", "again"),
    ]
    read = Read(tmp_path, "claude-code", lines, ".jsonl")
    main, helper, after = read.rows
    assert shape(main) == TALK
    assert (main.messages[1].reasoning, main.n_tool_errors, main.policy, main.success) == ("hm", 1, "m", None)
    assert [row.segment for row in read.rows] == [0, 1, 2]
    assert len({row.episode_id for row in read.rows}) == 1
    assert (helper.agent, after.messages[0].content) == ("subagent", "again")
    lines_of = {"lines of type summary": 1, "lines of type system": 1}
    assert read.notes.ignored == {**lines_of, "toolUseResult": 1, "uuid": 7}


def test_what_we_write_as_atif_has_no_gap_among_log_probs(tmp_path: Path) -> None:
    """Harbor's validator takes numbers alone; the gap comes back from ``extra.tokens``."""
    row = hard(0)  # the second token of its first action has no log-prob
    assert FORMATS["atif"].write
    FORMATS["atif"].write([row], tmp_path / "out")
    [path] = (tmp_path / "out").iterdir()
    metrics = [step["metrics"] for step in json.loads(path.read_text())["steps"] if "metrics" in step]
    assert ["logprobs" in metric for metric in metrics] == [False, True]
    [back] = FORMATS["atif"].read(Source(path))
    assert json.dumps(back.logprobs) == json.dumps(row.logprobs)
