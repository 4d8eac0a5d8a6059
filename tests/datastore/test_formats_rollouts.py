"""Rollouts of verifiers and NeMo Gym."""

import json
from pathlib import Path
from typing import Any

from format_files import TALK, USER, Read, shape

from agentrl.schemas.trajectory import NOT_TRAINED, Termination


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
    assert read.notes.ignored == {"timing": 2, "answer": 2, "error": 1}
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
    first, two = read.rows
    assert (first.input_ids, two.input_ids, first.segment, two.segment) == ([1, 2, 3], [1, 4], 0, 1)
    assert (first.reward, first.success, first.env, first.policy, first.agent) == (1.0, None, "shop", "m", "solver")
    assert [(part.name, part.weight) for part in first.reward_components] == [("exact", 2.0), ("turns", 0.0)]
    assert read.notes.ignored == {"traces.calls": 1, "traces.task.data": 1}


def test_judges_are_marked_and_unscored_traces_are_not_failed(tmp_path: Path) -> None:
    judge = trace(agent={"name": "judge", "trainable": False}, rewards={}, stop_condition="context_length")
    broken = trace(rewards={"exact": {"score": 0.0}}, errors=[{"type": "X", "message": "boom"}])
    rows = Read(tmp_path, "verifiers-v1", [{"id": "e", "traces": [judge, broken]}], ".jsonl").rows
    assert [row.tags for row in rows] == [[NOT_TRAINED]] * 2 + [["excluded_reward:0.0"]] * 2
    assert (rows[0].reward, rows[0].termination) == (None, Termination.MAX_CONTEXT)
    assert (rows[2].reward, rows[2].success, rows[2].termination) == (None, None, Termination.INFRA_ERROR)


def test_nemo_gym(tmp_path: Path) -> None:
    asked = {"input": [{"role": "user", "content": "q", "type": "message"}], "tools": [], "temperature": 0.7}
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    }
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    record = {
        "responses_create_params": asked,
        "response": {"model": "m", "output": [message | tokens]},
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
        [*asked["input"], message],
        [*asked["input"], message, {"type": "message", "role": "user", "content": "and?"}, message],
    ]
    turns = record | {"response": {"output": steps, "contains_transitions": True}}
    assert [m.role.value for m in Read(tmp_path, "nemo-gym", [turns], ".jsonl").row.messages] == [
        "user",
        "assistant",
    ] * 2
