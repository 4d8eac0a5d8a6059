"""Files as other projects write them, in small: the same keys and nesting, with text of our own."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from datastore import StoreError
from datastore.formats import FORMATS, detect
from datastore.formats.notes import Notes
from datastore.formats.source import Source
from schemas.trajectory import NOT_TRAINED, Role, Termination, Trajectory

USER = {"role": "user", "content": "where is Ann?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"who": "Ann"}'}}


class Read:
    """What a file gave."""

    def __init__(self, path: Path, name: str, document: Any, suffix: str = ".json") -> None:
        self.notes = Notes(quarantine=True)
        file = path / f"file{suffix}"
        if suffix.startswith(".jsonl"):
            file.write_text("".join(json.dumps(one) + "\n" for one in document))
        else:
            file.write_text(json.dumps(document, indent=1))
        source = Source(file, self.notes)
        assert detect(source) == name
        self.rows: list[Trajectory] = list(FORMATS[name].read(source))

    @property
    def row(self) -> Trajectory:
        [row] = self.rows
        return row


def shape(row: Trajectory) -> list[tuple[str, str]]:
    """Roles with text, and calls as ``name(arguments)``."""
    out = []
    for message in row.messages:
        calls = " ".join(f"{call.name}{json.dumps(call.parsed())}" for call in message.tool_calls)
        out.append((message.role.value, " ".join(filter(None, [message.content, calls]))))
    return out


TALK = [
    ("user", "where is Ann?"),
    ("assistant", 'find{"who": "Ann"}'),
    ("tool", "in Rome"),
    ("assistant", "She is in Rome."),
]


# chat


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
    assert read.notes.remarks == {"items of kind 'web_search_call' are kept as JSON text": 1}
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
    row = Read(tmp_path, "anthropic", [record], ".jsonl").row
    assert shape(row)[:4] == [("system", "be brief"), *TALK[:3]]
    assert json.loads(row.messages[4].content.split("\n")[1]) == image
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
    assert [one.success for one in Read(tmp_path, "alpaca", [pair]).rows] == [True, False]


# verifiers


def test_verifiers_as_it_writes_today(tmp_path: Path) -> None:
    completion = [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [json.dumps({"id": "c1", "name": "find", "arguments": '{"who": "Ann"}'})],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "in Rome"},
        {"role": "assistant", "content": "She is in Rome."},
    ]
    record = {
        "example_id": 3,
        "prompt": [USER],
        "completion": completion,
        "answer": "Rome",
        "info": {"oai_tools": [{"type": "function", "function": {"name": "find"}}]},
        "reward": 1.5,
        "error": None,
        "timing": {"total": 1.0},
        "is_completed": True,
        "is_truncated": False,
        "stop_condition": "max_turns_reached",
        "metrics": {"exact": 1.0},
        "exact": 1.0,
        "num_turns": 2.0,
    }
    read = Read(
        tmp_path,
        "verifiers",
        [record, record | {"id": 4, "error": {"error": "Boom"}, "stop_condition": "odd"}],
        ".jsonl",
    )
    row, failed = read.rows
    assert shape(row) == TALK
    assert (row.reward, row.success, row.termination) == (1.5, None, Termination.MAX_STEPS)
    assert {part.name: part.value for part in row.reward_components} == {"exact": 1.0, "num_turns": 2.0}
    assert json.loads(row.tools)[0]["function"]["name"] == "find"
    assert (failed.reward, failed.termination) == (None, Termination.INFRA_ERROR)
    assert read.notes.ignored == {"timing": 2, "answer": 2}
    assert read.notes.remarks == {"end 'odd' is not known: termination unknown": 1}


def turn(prompt: list[int], completion: list[int], text: str) -> dict[str, Any]:
    tokens = {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": [-1.0] * len(completion)}
    return {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": text}],
        "tokens": tokens | {"completion_mask": [1] * len(completion)},
    }


def test_verifiers_turns_whose_context_was_rewritten_become_segments(tmp_path: Path) -> None:
    turns = [turn([1, 2], [3], "a"), turn([1, 2, 3, 4], [5], "b"), turn([9], [8], "c")]
    line = {"example_id": 7, "prompt": "q", "completion": [], "reward": 1.0, "trajectory": turns}
    first, second = Read(tmp_path, "verifiers", [line], ".jsonl").rows
    assert (first.input_ids, first.action_mask) == ([1, 2, 3, 4, 5], [False, False, True, False, True])
    assert (second.input_ids, second.action_mask) == ([9, 8], [False, True])
    assert first.episode_id == second.episode_id
    assert (first.segment, second.segment) == (0, 1)
    bare = line | {"completion": "a", "trajectory": [turn([], [3], "a")]}
    read = Read(tmp_path, "verifiers", [bare], ".jsonl")
    assert (read.row.input_ids, len(read.notes.remarks)) == ([], 1)


def trace(**fields: Any) -> dict[str, Any]:
    def node(parent: int | None, role: str, text: str, ids: list[int]) -> dict[str, Any]:
        mask = [role == "assistant"] * len(ids)
        own = {"token_ids": ids, "mask": mask, "is_content": [True] * len(ids), "logprobs": [-0.5] * sum(mask)}
        return {"parent": parent, "message": {"role": role, "content": text}, "sampled": role == "assistant", **own}

    nodes = [node(None, "user", "q", [1]), node(0, "assistant", "a", [2, 3]), node(0, "assistant", "b", [4])]
    task = {"type": "T", "data": {"q": 1}, "key": "k"}
    agent = {"name": "solver", "trainable": True, "config": {"model": "m"}}
    return {"version": 1, "id": "t", "task": task, "agent": agent, "nodes": nodes, "calls": [{"node": 1}], **fields}


def test_a_trace_that_branches_gives_a_row_per_leaf(tmp_path: Path) -> None:
    rewards = {"exact": {"score": 0.5, "weight": 2.0}, "skipped": None}
    episode = {"id": "e", "env": {"id": "shop"}, "ok": True, "traces": [trace(rewards=rewards, metrics={"turns": 2.0})]}
    read = Read(tmp_path, "verifiers-v1", [episode], ".jsonl")
    one, two = read.rows
    assert (one.input_ids, two.input_ids, one.segment, two.segment) == ([1, 2, 3], [1, 4], 0, 1)
    assert (one.reward, one.success, one.env, one.policy, one.agent) == (1.0, None, "shop", "m", "solver")
    assert [(part.name, part.weight) for part in one.reward_components] == [("exact", 2.0), ("turns", 0.0)]
    assert read.notes.ignored == {"traces.calls": 1}


def test_judges_are_marked_and_unscored_traces_are_not_failed(tmp_path: Path) -> None:
    judge = trace(agent={"name": "judge", "trainable": False}, rewards={}, stop_condition="context_length")
    broken = trace(rewards={"exact": {"score": 0.0}}, errors=[{"type": "X", "message": "boom"}])
    rows = Read(tmp_path, "verifiers-v1", [{"id": "e", "traces": [judge, broken]}], ".jsonl").rows
    assert [row.tags for row in rows] == [[NOT_TRAINED]] * 2 + [[]] * 2
    assert (rows[0].reward, rows[0].termination) == (None, Termination.MAX_CONTEXT)
    assert (rows[2].reward, rows[2].termination) == (0.0, Termination.INFRA_ERROR)


# agents


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
    assert read.notes.ignored == {"steps.metrics.cost_usd": 1}
    document["steps"][2]["metrics"]["prompt_token_ids"] = [7, 7]
    assert Read(tmp_path, "atif", document).row.input_ids == []  # not one sequence: better no tokens than wrong ones


def test_swe_agent_of_others(tmp_path: Path) -> None:
    step = {"action": "ls\n", "observation": "a.py", "response": "Let me look\n```\nls\n```", "thought": "Let me look"}
    query = [{"role": "system", "content": "you are"}, {"role": "user", "content": "fix it"}]
    last = {"action": "submit", "observation": "", "response": "", "thought": ""}
    for key in ("query", "message"):
        info = {"exit_status": "submitted (exit_cost)", "submission": "d", "model_stats": {"cost": 1}}
        read = Read(tmp_path, "swe-agent", {"trajectory": [step | {key: query}, last], "info": info}, ".traj")
        assert [m.content for m in read.row.messages[:4]] == ["you are", "fix it", "Let me look", "a.py"]
        assert read.row.messages[2].tool_calls[0].parsed() == {"command": "ls"}
        assert (read.row.termination, read.row.success) == (Termination.ANSWERED, None)
        assert json.loads(read.row.final_state) == {"submission": "d"}
        assert read.notes.ignored == {"info.model_stats": 1}
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
    assert read.notes.ignored == {"events of kind recall": 1}
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
    assert read.notes.ignored == {"lines of type summary": 1, "lines of type system": 1, "toolUseResult": 1}


# benchmarks


def test_tau2_document_and_folder(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "where is Ann?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "name": "find", "arguments": {"who": "Ann"}}],
        },
        {"role": "tool", "id": "c1", "content": "in Rome", "requestor": "assistant", "error": True},
        {"role": "assistant", "content": "She is in Rome."},
    ]
    reward = {
        "reward": 1.0,
        "reward_breakdown": {"DB": 1.0},
        "extra": {"x": 1},
        "action_checks": [{"action_match": False}],
    }
    one = {
        "id": "s",
        "task_id": "5",
        "trial": 1,
        "termination_reason": "max_steps",
        "reward_info": reward,
        "messages": messages,
    }
    info = {"environment_info": {"domain_name": "airline", "policy": "be kind"}, "agent_info": {"llm": "m"}}
    document = {
        "info": info,
        "tasks": [{"id": "5", "text": "find Ann"}],
        "simulations": [one, one | {"reward_info": None}],
    }
    read = Read(tmp_path, "tau2", document)
    row, unscored = read.rows
    assert shape(row) == [("system", "be kind"), *TALK]
    assert (row.reward, row.success, row.termination, row.n_tool_errors) == (1.0, True, Termination.MAX_STEPS, 1)
    assert (row.env, row.policy, row.sample_index) == ("airline", "m", 1)
    assert {part.name: part.value for part in row.reward_components} == {"DB": 1.0, "action_checks": 0.0}
    assert (unscored.reward, unscored.success) == (None, None)
    assert read.notes.ignored == {"reward_info.extra": 1}
    folder = tmp_path / "run" / "simulations"
    folder.mkdir(parents=True)
    (folder.parent / "results.json").write_text(json.dumps({"info": info, "tasks": document["tasks"]}))
    assert Read(folder, "tau2", one | {"termination_reason": "infrastructure_error"}).row.task_id == row.task_id
    spoken = Read(folder, "tau2", {"id": "v", "task_id": "5", "termination_reason": "user_stop", "ticks": [1]})
    assert "full-duplex" in spoken.notes.unreadable[0].reason


def test_tau_bench(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "policy"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    messages += [
        {"role": "tool", "tool_call_id": "c1", "name": "find", "content": "in Rome"},
        {"role": "user", "content": "###STOP###"},
    ]
    info = {"task": {"user_id": "u"}, "reward_info": {"reward": 1.0, "info": {"r_actions": 1.0}}}
    one = {"task_id": 0, "reward": 1.0, "info": info, "traj": messages, "trial": 2}
    broken = {"task_id": 1, "reward": 0.0, "info": {"error": "boom"}, "traj": [USER], "trial": 0}
    row, failed = Read(tmp_path, "tau-bench", [one, broken]).rows
    assert (row.reward, row.success, row.sample_index, row.termination) == (1.0, True, 2, Termination.ANSWERED)
    assert (failed.reward, failed.success, failed.termination) == (None, None, Termination.INFRA_ERROR)


def test_nemo_gym(tmp_path: Path) -> None:
    asked = {"input": [{"role": "user", "content": "q", "type": "message"}], "tools": [], "temperature": 0.7}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    }
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    record = {
        "responses_create_params": asked,
        "response": {"model": "m", "output": [said | tokens]},
        "reward": 0.5,
        "accuracy": True,
        "verifier_metadata": {"x": 1},
        "agent_ref": {"name": "simple"},
    }
    read = Read(tmp_path, "nemo-gym", [record], ".jsonl")
    row = read.row
    assert (row.reward, row.success, row.policy, row.agent) == (0.5, None, "m", "simple")
    assert (row.input_ids, row.action_mask, row.logprobs[2]) == ([1, 2, 3], [False, False, True], -0.5)
    assert [(part.name, part.value) for part in row.reward_components] == [("accuracy", 1.0)]
    assert read.notes.ignored == {"verifier_metadata": 1}
    steps = [
        [*asked["input"], said],
        [*asked["input"], said, {"type": "message", "role": "user", "content": "and?"}, said],
    ]
    turns = record | {"response": {"output": steps, "contains_transitions": True}}
    assert [m.role.value for m in Read(tmp_path, "nemo-gym", [turns], ".jsonl").row.messages] == [
        "user",
        "assistant",
    ] * 2


SAMPLE: dict[str, Any] = {
    "id": 1,
    "epoch": 2,
    "input": "where is Ann?",
    "target": "Rome",
    "messages": [
        {"role": "user", "content": "where is Ann?", "source": "input"},
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": ""}],
            "tool_calls": [{"id": "c1", "function": "find", "arguments": {"who": "Ann"}, "type": "function"}],
        },
        {
            "role": "tool",
            "content": "attachment://a1",
            "tool_call_id": "c1",
            "function": "find",
            "error": {"type": "timeout"},
        },
        {"role": "assistant", "content": "She is in Rome."},
    ],
    "scores": {"match": {"value": "C"}},
    "attachments": {"a1": "in Rome"},
    "limit": {"type": "token", "limit": 10},
    "events": [{"event": "x"}],
}


def test_inspect_documents_and_archives(tmp_path: Path) -> None:
    header = {"version": 2, "status": "success", "eval": {"task": "geo", "model": "m"}}
    read = Read(tmp_path, "inspect", header | {"samples": [SAMPLE]})
    row = read.row
    assert shape(row) == TALK
    assert (row.reward, row.success, row.termination, row.n_tool_errors) == (1.0, True, Termination.MAX_TOKENS, 1)
    assert (row.policy, row.env, row.sample_index, row.messages[1].reasoning) == ("m", "geo", 1, "hm")
    assert read.notes.ignored == {"samples.events": 1}
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("samples/1_epoch_2.json", json.dumps(SAMPLE))
        archive.writestr("header.json", json.dumps(header))
    assert detect(Source(path)) == "inspect"
    [same] = FORMATS["inspect"].read(Source(path))
    assert (shape(same), same.task_id) == (shape(row), row.task_id)
    path.write_bytes(path.read_bytes()[:60])
    assert detect(Source(path)) is None
    two = SAMPLE | {"scores": {"a": {"value": {"x": 1, "y": "no"}}, "b": {"value": 0.5}}}
    row = Read(tmp_path, "inspect", header | {"samples": [two]}).row
    assert (row.reward, row.success) == (None, None)
    assert {part.name: part.value for part in row.reward_components} == {"a.x": 1.0, "b": 0.5}


# spans


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
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "She is in Rome."}], "finish_reason": "stop"}]

    def span(given: list[Any], came: list[Any], **more: Any) -> dict[str, Any]:
        texts = {"gen_ai.input.messages": json.dumps(given), "gen_ai.output.messages": json.dumps(came)}
        return otlp({**texts, "gen_ai.request.model": "m", "http.method": "POST"}, **more)

    spans = [span(asked, [called]), span([*asked, called, answer], said), otlp({"db.system": "x"})]
    document = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    read = Read(tmp_path, "otel", document)
    assert shape(read.row) == TALK
    assert (read.row.policy, read.row.episode_id, read.row.success) == ("m", "t", None)
    assert read.notes.ignored["attributes.http.method"] == 2
    other = span([{"role": "user", "parts": [{"type": "text", "content": "else"}]}], said)
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
    one = {
        "id": "o",
        "traceId": "t",
        "type": "GENERATION",
        "model": "m",
        "input": chat,
        "output": {"role": "assistant", "content": "Rome"},
    }
    text = one | {"traceId": "u", "input": "where is Ann?", "output": "Rome"}
    first, second = Read(tmp_path, "otel", [one, text, {"traceId": "t", "type": "SPAN", "id": "x"}], ".jsonl").rows
    assert shape(first) == [("system", "be brief"), ("user", "where is Ann?"), ("assistant", "Rome")]
    assert shape(second) == [("user", "where is Ann?"), ("assistant", "Rome")]
    assert (first.policy, first.messages[0].role) == ("m", Role.SYSTEM)


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
