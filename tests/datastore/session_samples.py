"""A small file of every format of sessions of agent programs."""

from typing import Any

BLOCKS = [
    {"type": "thinking", "thinking": "look"},
    {"type": "tool_use", "id": "c1", "name": "find", "input": {"who": "Ann"}},
]
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "in Rome"}]}

SESSIONS: dict[str, list[tuple[str, Any]]] = {
    "claude-code-stream": [
        (
            ".jsonl",
            [
                {"type": "assistant", "session_id": "s", "uuid": "a", "parent_tool_use_id": None}
                | {"message": {"role": "assistant", "content": BLOCKS}},
                {"type": "user", "session_id": "s", "uuid": "b", "parent_tool_use_id": None}
                | {"message": {"role": "user", "content": [RESULT]}},
                {
                    "type": "result",
                    "subtype": "success",
                    "is_error": False,
                    "stop_reason": "end_turn",
                    "session_id": "s",
                }
                | {"uuid": "c", "usage": {"input_tokens": 3, "output_tokens": 4}, "total_cost_usd": 0.5},
            ],
        )
    ],
    "codex": [
        (
            ".jsonl",
            [
                {"type": "session_meta", "payload": {"id": "s", "base_instructions": {"text": "you are"}}},
                {"type": "turn_context", "payload": {"model": "m"}},
                *(
                    {"type": "response_item", "payload": item}
                    for item in (
                        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                        {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"},
                        {"type": "function_call_output", "call_id": "c1", "output": "in Rome"},
                    )
                ),
                {"type": "token_usage_record", "payload": {"usage": {"input_tokens": 3, "output_tokens": 4}}},
            ],
        )
    ],
    "codex-exec": [
        (
            ".jsonl",
            [
                {"type": "thread.started", "thread_id": "s"},
                {"type": "item.completed", "item": {"id": "1", "type": "reasoning", "text": "hm"}},
                {
                    "type": "item.completed",
                    "item": {"id": "2", "type": "command_execution", "command": "ls"}
                    | {"aggregated_output": "a", "exit_code": 0, "status": "completed"},
                },
                {"type": "item.completed", "item": {"id": "3", "type": "agent_message", "text": "in Rome"}},
                {"type": "turn.completed", "usage": {"input_tokens": 3, "output_tokens": 4}},
            ],
        )
    ],
    "opencode": [
        (
            ".json",
            {
                "info": {"id": "s", "projectID": "p", "version": "1"},
                "messages": [
                    {"info": {"role": "user"}, "parts": [{"type": "text", "text": "hi"}]},
                    {
                        "info": {"role": "assistant", "modelID": "m", "finish": "stop", "cost": 0.5}
                        | {"tokens": {"input": 3, "output": 4, "cache": {"read": 2}}},
                        "parts": [
                            {"type": "reasoning", "text": "hm"},
                            {"type": "tool", "tool": "find", "callID": "c1"}
                            | {"state": {"status": "completed", "input": {"who": "Ann"}, "output": "in Rome"}},
                        ],
                    },
                ],
            },
        ),
        (
            ".jsonl",
            [
                {"type": "text", "sessionID": "s", "part": {"type": "text", "text": "hi", "messageID": "m"}},
                {"type": "step_finish", "sessionID": "s"}
                | {"part": {"type": "step-finish", "reason": "stop", "messageID": "m", "cost": 0.5}},
            ],
        ),
    ],
    "gemini-cli": [
        (
            ".jsonl",
            [
                {"sessionId": "s", "projectHash": "p", "kind": "main"},
                {"id": "1", "type": "user", "content": [{"text": "hi"}]},
                {"id": "2", "type": "gemini", "content": "so", "thoughts": [{"subject": "a", "description": "b"}]}
                | {"model": "m", "tokens": {"input": 3, "output": 4}}
                | {
                    "toolCalls": [
                        {"id": "c1", "name": "find", "args": {"who": "Ann"}, "status": "success"}
                        | {"result": [{"functionResponse": {"id": "c1", "response": {"output": "in Rome"}}}]}
                    ]
                },
            ],
        )
    ],
}
