"""ShareGPT as LLaMA-Factory reads it, JSON Lines: ``conversations`` of ``{from, value}``, ``system``, ``tools``.

A call is ``function_call`` with ``{"name", "arguments"}``, several at once a JSON list; results are one
``observation``, several joined by lines. Human and observation stand at odd places, gpt and function_call at even
ones: neighbours of one side are joined. Cannot carry: text beside a call, reasoning, call ids, which result answers
which of several calls, tokens, log-probs, rewards, outcome, lineage.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datastore.formats.common import json_text, make_row, read_lines, write_lines
from schemas.json_text import loads
from schemas.trajectory import Message, Role, ToolCall, Trajectory


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_line, rows))


def _line(row: Trajectory) -> dict[str, Any]:
    turns: list[dict[str, str]] = []
    system = "\n\n".join(message.content for message in row.messages if message.role is Role.SYSTEM)
    for message in row.messages:
        if message.role is Role.SYSTEM:
            continue
        turn = _turn(message)
        if turns and turns[-1]["from"] == turn["from"] and turn["from"] != "function_call":
            turns[-1]["value"] += "\n" + turn["value"]
        else:
            turns.append(turn)
    return {"conversations": turns, "system": system, "tools": row.tools}


def _turn(message: Message) -> dict[str, str]:
    if message.role is Role.ASSISTANT and message.tool_calls:
        calls = [{"name": call.name, "arguments": call.parsed()} for call in message.tool_calls]
        return {
            "from": "function_call",
            "value": json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False),
        }
    name = {Role.USER: "human", Role.ASSISTANT: "gpt", Role.TOOL: "observation"}[message.role]
    return {"from": name, "value": message.content}


def read(path: Path) -> Iterator[Trajectory]:
    for number, line in enumerate(read_lines(path)):
        messages = [Message(role=Role.SYSTEM, content=line["system"])] if line.get("system") else []
        pending: list[ToolCall] = []
        for turn in line["conversations"]:
            kind, value = turn["from"], turn["value"]
            if kind == "function_call":
                calls = loads(value)
                pending = [
                    ToolCall(id=f"call_{len(messages)}_{i}", name=one["name"], arguments=json_text(one["arguments"]))
                    for i, one in enumerate(calls if isinstance(calls, list) else [calls])
                ]
                messages.append(Message(role=Role.ASSISTANT, tool_calls=pending))
            elif kind == "observation":
                answered = pending[0] if len(pending) == 1 else None
                identity = {"tool_call_id": answered.id, "name": answered.name} if answered else {}
                messages.append(Message(role=Role.TOOL, content=value, **identity))
            else:
                role = {"human": Role.USER, "user": Role.USER, "gpt": Role.ASSISTANT, "system": Role.SYSTEM}[kind]
                messages.append(Message(role=role, content=value))
        yield make_row(number, messages, tools=json_text(line.get("tools") or []))
