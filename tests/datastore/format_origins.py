"""A small file of every format that says where its rows come from, and what it says."""

import json
from datetime import UTC, datetime
from typing import Any

USER = {"role": "user", "content": "where is Ann?"}
SAID = {"role": "assistant", "content": "in Rome"}
WHEN = datetime(2026, 1, 31, 12, tzinfo=UTC)
ISO, SECONDS = "2026-01-31T12:00:00Z", WHEN.timestamp()
OPENAI = {"prompt_tokens": 30, "completion_tokens": 4, "total_tokens": 34}
ANTHROPIC = {"input_tokens": 10, "cache_read_input_tokens": 20, "output_tokens": 4}
BESIDE_ALL = {"id": "a7", "model": "m-1", "created": SECONDS, "usage": OPENAI, "cost": 0.5}
TURNS = [{"from": "human", "value": "where is Ann?"}, {"from": "gpt", "value": "in Rome"}]
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "in Rome"}]}
RESPONSE = {"id": "a7", "created_at": SECONDS, "model": "m-1", "usage": ANTHROPIC, "output": [ANSWER], "cost": 0.5}
STEP = {"source": "agent", "message": "in Rome", "timestamp": ISO, "model_name": "m-1"}
METRICS = {"prompt_tokens": 15, "completion_tokens": 2, "cost_usd": 0.25}
TASK = {"type": "t", "key": "k", "data": {"prompt": "p"}}
NODES = [{"parent": None, "message": USER}, {"parent": 0, "message": SAID, "sampled": True}]
USAGE_OF_V1 = {"prompt_tokens": 5, "cached_input_tokens": 10, "completion_tokens": 2, "cost": 0.25}
SPAN = {
    "traceId": "a7",
    "type": "GENERATION",
    "input": [USER],
    "output": SAID,
    "startTime": ISO,
    "model": "m-1",
    "usageDetails": {"input": 30, "output": 4},
    "calculatedTotalCost": 0.5,
}
ALL = {"source_id": "a7", "source_time": WHEN, "model": "m-1", "prompt_tokens": 30, "completion_tokens": 4} | {
    "cost_usd": 0.5
}


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "openai-chat": ("openai-chat", ".jsonl", lines({"messages": [USER, SAID], **BESIDE_ALL}), ALL),
    "openai-responses": ("openai-responses", ".jsonl", lines({"input": "where is Ann?", **RESPONSE}), ALL),
    "a request and its response": (
        *("openai-responses", ".jsonl"),
        lines({"request": {"input": "where?", "model": "asked"}, "response": RESPONSE}),
        ALL,
    ),
    "anthropic": (
        *("anthropic", ".jsonl"),
        lines(
            {
                "request": {"messages": [USER], "model": "asked", "tools": [{"name": "f", "input_schema": {}}]},
                "response": {
                    "id": "a7",
                    "model": "m-1",
                    "content": [{"type": "text", "text": "x"}],
                    "usage": ANTHROPIC,
                },
                "timestamp": ISO,
                "cost": 0.5,
            }
        ),
        ALL,
    ),
    "trl-sft": ("trl-sft", ".jsonl", lines({"messages": [USER, SAID], "input_ids": [], **BESIDE_ALL}), ALL),
    "trl-prompt-completion": (
        *("trl-prompt-completion", ".jsonl"),
        lines({"prompt": [USER], "completion": [SAID], **BESIDE_ALL}),
        ALL,
    ),
    "trl-kto": (
        *("trl-kto", ".jsonl"),
        lines({"prompt": [USER], "completion": [SAID], "label": True, **BESIDE_ALL}),
        ALL,
    ),
    "alpaca": ("alpaca", ".jsonl", lines({"instruction": "where?", "output": "in Rome", **BESIDE_ALL}), ALL),
    "sharegpt": ("sharegpt", ".jsonl", lines({"conversations": TURNS, **BESIDE_ALL}), ALL),
    "verifiers": (
        *("verifiers", ".jsonl"),
        lines(
            {"prompt": [USER], "completion": [SAID], "reward": 1.0, "example_id": 7, "model": "m-1"}
            | {"token_usage": {"input_tokens": 30.0, "output_tokens": 4.0}, "metrics": {}}
        ),
        {"source_id": "7", "model": "m-1", "prompt_tokens": 30, "completion_tokens": 4},
    ),
    "verifiers-v1": (
        *("verifiers-v1", ".jsonl"),
        lines(
            {"version": 1, "id": "a7", "task": TASK, "nodes": NODES, "timing": {"start": SECONDS}}
            | {"agent": {"name": "a", "config": {"model": "m-1"}}}
            | {"calls": [{"node": 1, "usage": USAGE_OF_V1}, {"usage": USAGE_OF_V1}, {"error": {"type": "t"}}]}
        ),
        ALL,
    ),
    "nemo-gym": (
        *("nemo-gym", ".jsonl"),
        lines({"responses_create_params": {"input": "where?"}, "response": RESPONSE, "reward": 1.0, "id": "a7"}),
        ALL,
    ),
    "atif": (
        *("atif", ".json"),
        json.dumps(
            {
                "schema_version": "ATIF-v1.7",
                "session_id": "a7",
                "agent": {"name": "a", "version": "1", "model_name": "m-1"},
                "steps": [
                    {"step_id": 1, "source": "user", "message": "x"},
                    *[STEP | {"metrics": METRICS}] * 2,
                    STEP | {"metrics": METRICS, "is_copied_context": True},
                ],
            }
        ),
        ALL,
    ),
    "atif with totals": (
        *("atif", ".json"),
        json.dumps(
            {
                "schema_version": "ATIF-v1.7",
                "session_id": "a7",
                "agent": {"name": "a", "version": "1", "model_name": "m-1"},
                "steps": [STEP | {"metrics": METRICS}],
                "final_metrics": {"total_prompt_tokens": 30, "total_completion_tokens": 4, "total_cost_usd": 0.5},
            }
        ),
        ALL,
    ),
    "swe-agent": (
        *("swe-agent", ".traj"),
        json.dumps(
            {
                "trajectory": [{"action": "ls", "observation": "a", "thought": "look", "query": [USER]}],
                "info": {"model_stats": {"instance_cost": 0.5, "tokens_sent": 30, "tokens_received": 4}},
                "instance_id": "a7",
                "replay_config": json.dumps({"agent": {"model": {"name": "m-1"}}}),
            }
        ),
        {name: value for name, value in ALL.items() if name != "source_time"},
    ),
    "tau2": (
        *("tau2", ".json"),
        json.dumps(
            {
                "info": {"agent_info": {"llm": "m-1"}, "environment_info": {"domain_name": "air"}},
                "tasks": [],
                "simulations": [
                    {
                        "id": "a7",
                        "task_id": "1",
                        "start_time": ISO,
                        "agent_cost": 0.5,
                        "messages": [USER | {"usage": OPENAI}, SAID | {"usage": OPENAI, "cost": 0.1}],
                        "termination_reason": "user_stop",
                    }
                ],
            }
        ),
        ALL,
    ),
    "mini-swe-agent": (
        *("mini-swe-agent", ".json"),
        json.dumps(
            {
                "trajectory_format": "mini-swe-agent-1.1",
                "instance_id": "a7",
                "info": {"model_stats": {"instance_cost": 0.5}, "config": {"model": {"model_name": "m-1"}}},
                "messages": [
                    USER | {"extra": {"timestamp": SECONDS}},
                    SAID | {"extra": {"timestamp": SECONDS + 1, "cost": 0.1, "response": {"usage": OPENAI}}},
                ],
            }
        ),
        ALL,
    ),
    "openhands": (
        *("openhands", ".jsonl"),
        lines(
            {
                "instance_id": "a7",
                "metadata": {"llm_config": {"model": "m-1"}},
                "metrics": {
                    "accumulated_cost": 0.5,
                    "accumulated_token_usage": {"prompt_tokens": 30, "completion_tokens": 4},
                },
                "history": [
                    {"id": 0, "source": "user", "action": "message", "args": {"content": "x"}, "timestamp": ISO},
                    {"id": 1, "source": "agent", "action": "message", "args": {"content": "y"}, "timestamp": ISO},
                ],
            }
        ),
        ALL,
    ),
    "claude-code": (
        *("claude-code", ".jsonl"),
        lines(
            {"type": "user", "message": USER, "sessionId": "a7", "timestamp": ISO},
            *[
                {"type": "assistant", "sessionId": "a7", "timestamp": ISO, "costUSD": 0.25}
                | {"message": SAID | {"id": "m", "model": "m-1", "usage": ANTHROPIC}}
            ]
            * 2,
        ),
        ALL,
    ),
    "inspect": (
        *("inspect", ".json"),
        json.dumps(
            {
                "version": 2,
                "status": "success",
                "eval": {"task": "t", "model": "m-1", "created": "2026-01-31T13:00:00+01:00"},
                "samples": [
                    {
                        "id": "a",
                        "epoch": 7,
                        "input": "x",
                        "messages": [USER, SAID],
                        "model_usage": {
                            "m-1": {"input_tokens": 10, "input_tokens_cache_read": 20, "output_tokens": 4}
                            | {"total_tokens": 34, "total_cost": 0.5},
                            "judge": {"input_tokens": 1000, "output_tokens": 1},
                        },
                    }
                ],
            }
        ),
        ALL | {"source_id": "a-7"},
    ),
    "otel": (
        *("otel", ".jsonl"),
        lines(
            SPAN | {"usageDetails": {"input": 10, "output": 3}, "calculatedTotalCost": 0.125},
            SPAN
            | {"input": [USER, SAID, USER], "startTime": "2026-01-31T12:00:09Z", "calculatedTotalCost": 0.375}
            | {"usageDetails": {"input": 20, "output": 1}},
        ),
        ALL,
    ),
}
