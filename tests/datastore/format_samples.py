"""A record of each format as others write it, in which every kind of object occurs that the format has."""

from typing import Any

from session_samples import BLOCKS, RESULT, SESSIONS

USER = {"role": "user", "content": "where is Ann?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"who": "Ann"}'}}
SCHEMA = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
SAID = {"role": "assistant", "content": "She is in Rome."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "where is Ann?"}, {"type": "image_url", "url": "cat.png"}],
}
THOUGHT = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}], "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "in Rome"}
CHAT = [PARTS, THOUGHT, ANSWER, SAID]
COMPLETION = {"model": "m", "choices": [{"message": THOUGHT, "finish_reason": "tool_calls"}]}
TURN = {"from": "human", "value": "where is Ann?"}
LABELLED = {"from": "gpt", "value": "In Rome."}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "where is Ann?"}]}
ITEMS = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "look"}]},
    {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "in Rome"},
    {"type": "web_search_call", "action": {"query": "Ann"}},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Rome."}]},
]
SEARCHED = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "Ann"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result", "url": "x"}]},
]
NODE = {"token_ids": [1], "mask": [False], "is_content": [True], "logprobs": []}
REWARD = {
    "reward": 1.0,
    "reward_breakdown": {"DB": 1.0},
    "db_check": {"db_reward": 1.0},
    "action_checks": [{"action_match": True}],
}
EVENT = {"source": "agent", "tool_call_metadata": {"tool_call_id": "c1", "function_name": "find"}}
RESPONSE = {"id": "r", "choices": [{"message": {"role": "assistant", "content": "I look", "tool_calls": [CALL]}}]}
PHOENIX = {"message": {"role": "user", "content": "where is Ann?"}}
SAID_PARTS = {"role": "assistant", "parts": [{"type": "text", "content": "In Rome."}]}
TALKED = {
    "role": "assistant",
    "parts": [
        {"type": "reasoning", "content": "hm"},
        {"type": "tool_call", "id": "c1", "name": "find", "arguments": {"who": "Ann"}},
    ],
}
TOLD = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "in Rome"}]}

SAMPLES: dict[str, list[tuple[str, Any]]] = {
    "openai-chat": [
        (".jsonl", [{"messages": CHAT, "tools": [SCHEMA], "model": "m", "label": True}]),
        (".jsonl", [{"messages": [USER], "response": COMPLETION, "kwargs": {"tools": [SCHEMA]}}]),
    ],
    "trl-prompt-completion": [(".jsonl", [{"prompt": CHAT[:1], "completion": CHAT[1:], "tools": [SCHEMA]}])],
    "trl-kto": [(".jsonl", [{"prompt": [USER], "completion": [SAID], "label": True}])],
    "trl-preference": [(".jsonl", [{"prompt": [USER], "chosen": [SAID], "rejected": [THOUGHT]}])],
    "sharegpt": [(".jsonl", [{"conversations": [TURN, LABELLED], "system": "be brief", "kto_tag": True}])],
    "sharegpt-preference": [(".jsonl", [{"conversations": [TURN], "chosen": LABELLED, "rejected": LABELLED}])],
    "alpaca": [(".json", [{"instruction": "add", "input": "1 2", "output": "3", "system": "count"}])],
    "openai-responses": [
        (".jsonl", [{"input": [ITEM], "output": ITEMS, "tools": [SCHEMA], "model": "m"}]),
        (".jsonl", [{"request": {"input": [ITEM]}, "response": {"output": ITEMS, "status": "completed"}}]),
    ],
    "anthropic": [
        (
            ".jsonl",
            [
                {
                    "system": [{"type": "text", "text": "be brief"}],
                    "messages": [USER, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [RESULT]}],
                    "response": {
                        "content": [*SEARCHED, {"type": "text", "text": "In Rome."}],
                        "stop_reason": "end_turn",
                    },
                }
            ],
        ),
        (".json", {"type": "message", "role": "assistant", "content": BLOCKS, "model": "m"}),
    ],
    "verifiers": [
        (
            ".jsonl",
            [
                {
                    "example_id": 3,
                    "prompt": [USER],
                    "completion": [THOUGHT, ANSWER, SAID],
                    "info": {"oai_tools": [SCHEMA]},
                    "reward": 1.5,
                    "metrics": {"exact": 1.0},
                }
            ],
        ),
        (
            ".jsonl",
            [
                {
                    "example_id": 3,
                    "prompt": [],
                    "completion": [],
                    "reward": 1.5,
                    "trajectory": [
                        {
                            "prompt": [USER],
                            "completion": [THOUGHT],
                            "tokens": {"prompt_ids": [1], "completion_ids": [2], "completion_logprobs": [-1.0]},
                            "extras": {},
                        }
                    ],
                }
            ],
        ),
    ],
    "verifiers-v1": [
        (
            ".jsonl",
            [
                {
                    "id": "e",
                    "env": {"id": "shop"},
                    "traces": [
                        {
                            "id": "t",
                            "task": {"type": "T", "key": "k"},
                            "agent": {"name": "solver", "config": {"model": "m"}},
                            "nodes": [
                                {"parent": None, "message": USER, "sampled": False, **NODE},
                                {"parent": 0, "message": SAID, "sampled": True, **NODE},
                            ],
                            "rewards": {"exact": {"score": 0.5, "weight": 2.0}},
                            "metrics": {"turns": 2.0},
                            "info": {},
                        }
                    ],
                }
            ],
        )
    ],
    "nemo-gym": [
        (
            ".jsonl",
            [
                {
                    "responses_create_params": {"input": [ITEM], "tools": [SCHEMA]},
                    "response": {"model": "m", "output": ITEMS},
                    "reward": 0.5,
                    "agent_ref": {"name": "simple"},
                }
            ],
        )
    ],
    "atif": [
        (
            ".json",
            {
                "schema_version": "ATIF-v1.7",
                "session_id": "s1",
                "agent": {"name": "acme", "model_name": "m"},
                "steps": [
                    {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "hello"}]},
                    {
                        "step_id": 2,
                        "source": "agent",
                        "message": "",
                        "tool_calls": [{"tool_call_id": "c", "function_name": "look", "arguments": {"x": 1}}],
                        "observation": {"results": [{"source_call_id": "c", "content": "seen"}]},
                        "metrics": {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-0.5]},
                        "extra": {},
                    },
                ],
                "extra": {},
            },
        )
    ],
    "swe-agent": [
        (
            ".traj",
            {
                "trajectory": [{"action": "ls", "observation": "a.py", "thought": "Look", "query": [USER]}],
                "info": {"exit_status": "submitted"},
            },
        ),
        (".traj", {"history": [{"role": "user", "content": "fix it"}, THOUGHT], "trajectory": [], "info": {}}),
    ],
    "mini-swe-agent": [
        (
            ".traj.json",
            {
                "info": {"exit_status": "Submitted", "config": {"model": {"model_name": "m"}}},
                "messages": [USER, THOUGHT, ANSWER],
                "trajectory_format": "mini-swe-agent-1.1",
            },
        )
    ],
    "openhands": [
        (
            ".jsonl",
            [
                {
                    "instance_id": "i",
                    "history": [
                        {"id": 0, "source": "user", "action": "message", "args": {"content": "fix it"}},
                        {
                            "id": 1,
                            "action": "find",
                            "args": {},
                            **EVENT,
                            "tool_call_metadata": {"model_response": RESPONSE},
                        },
                        {"id": 2, "observation": "find", "content": "in Rome", "cause": 1},
                    ],
                    "test_result": {"git_patch": "d"},
                    "metadata": {"llm_config": {"model": "m"}},
                    "report": {"resolved": True},
                }
            ],
        ),
        (
            ".jsonl",
            [
                {"kind": "MessageEvent", "source": "user", "llm_message": {"role": "user", "content": "hi"}},
                {"kind": "ActionEvent", "tool_name": "find", "tool_call_id": "c1", "tool_call": {"name": "find"}},
                {"kind": "ObservationEvent", "tool_call_id": "c1", "observation": {"content": "in Rome"}},
                {"kind": "AgentErrorEvent", "tool_call_id": "c1", "error": "no"},
            ],
        ),
    ],
    "claude-code": [
        (
            ".jsonl",
            [
                {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "hi"}},
                {"type": "assistant", "sessionId": "s", "message": {"role": "assistant", "content": BLOCKS}},
                {"type": "user", "sessionId": "s", "message": {"role": "user", "content": [RESULT]}},
            ],
        )
    ],
    **SESSIONS,
    "tau2": [
        (
            ".json",
            {
                "info": {"environment_info": {"domain_name": "airline"}, "agent_info": {"llm": "m"}},
                "simulations": [
                    {
                        "id": "s",
                        "task_id": "5",
                        "termination_reason": "user_stop",
                        "reward_info": REWARD,
                        "messages": [USER, {"role": "tool", "id": "c1", "content": "in Rome"}, SAID],
                    }
                ],
            },
        )
    ],
    "tau-bench": [
        (
            ".json",
            [
                {
                    "task_id": 0,
                    "reward": 1.0,
                    "info": {"reward_info": {"reward": 1.0, "info": {"r_actions": 1.0}}},
                    "traj": [USER, THOUGHT, ANSWER],
                }
            ],
        )
    ],
    "inspect": [
        (
            ".json",
            {
                "version": 2,
                "status": "success",
                "eval": {"task": "geo", "model": "m"},
                "samples": [
                    {
                        "id": 1,
                        "epoch": 2,
                        "messages": [
                            USER,
                            {
                                "role": "assistant",
                                "content": [{"type": "reasoning", "reasoning": "hm"}],
                                "tool_calls": [{"id": "c1", "function": "find", "arguments": {"who": "Ann"}}],
                            },
                            {"role": "tool", "content": "", "tool_call_id": "c1", "error": {"message": "no"}},
                        ],
                        "scores": {"match": {"value": "C"}},
                        "limit": {"type": "token"},
                    }
                ],
            },
        )
    ],
    "otel": [
        (
            ".jsonl",
            [
                {
                    "traceId": "t",
                    "attributes": {
                        "gen_ai.input.messages": [USER, TALKED, TOLD],
                        "gen_ai.output.messages": [SAID_PARTS],
                        "gen_ai.system_instructions": [{"type": "text", "content": "be brief"}],
                    },
                }
            ],
        ),
        (".jsonl", [{"traceId": "t", "attributes": {"llm": {"input_messages": [PHOENIX]}}}]),
        (
            ".jsonl",
            [
                {
                    "traceId": "t",
                    "type": "GENERATION",
                    "input": {"messages": [USER], "tools": [SCHEMA]},
                    "output": SAID,
                }
            ],
        ),
        (
            ".json",
            {
                "id": "t",
                "observations": [{"traceId": "t", "type": "GENERATION", "input": [USER], "output": SAID}],
                "scores": [{"name": "good", "value": 0.5}],
            },
        ),
    ],
}
"""Suffix and records of each format's files."""
