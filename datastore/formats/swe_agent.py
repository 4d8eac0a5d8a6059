"""SWE-agent ``.traj``: one JSON document per trajectory.

Import: ``trajectory`` steps become an assistant message (``thought``, else ``response``) with a call of the tool
``bash`` (``{"command": action}``) and its observation, after the messages of the first step's ``query`` (``message``
before 1.1); a file with ``history`` alone is read as chat. ``info.exit_status`` ``submitted`` is an answer; success is
not known and stays false. Export: ``action`` is the command of the first call, or its name and arguments; the exact
messages of a step go under ``extra_info.agentrl``, what else has no place under ``info.agentrl``. Cannot carry: tokens,
masks, log-probs.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from datastore.errors import StoreError
from datastore.formats.common import (
    carried,
    file_name,
    from_chat,
    json_text,
    make_row,
    read_document,
    split_prompt,
    text_of,
    to_chat,
)
from schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory


def read(path: Path) -> Iterator[Trajectory]:
    files = sorted(path.rglob("*.traj")) if path.is_dir() else [path]
    for number, file in enumerate(files):
        document = read_document(file)
        info = document.get("info") or {}
        submitted = info.get("exit_status") in (None, "submitted")
        yield make_row(
            number,
            _messages(document, file),
            extra=info.get("agentrl"),
            task_id=document.get("instance_id") or file.stem,
            env="swe-agent",
            termination=Termination.ANSWERED if submitted else Termination.ENV_ERROR,
            final_state=json.dumps({"submission": info["submission"]}) if info.get("submission") else None,
            tools=json_text((info.get("agentrl_tools")) or []),
        )


def _messages(document: dict[str, Any], file: Path) -> list[Message]:
    steps = document.get("trajectory")
    if not steps:
        if not document.get("history"):
            raise StoreError(f"{file} has neither trajectory nor history; is it a SWE-agent .traj file?")
        return from_chat(_plain(one) for one in document["history"])
    messages = from_chat(_plain(one) for one in _opening(steps[0]) or _leading(document))
    for number, step in enumerate(steps):
        messages += _step_messages(number, step)
    return messages


def _step_messages(number: int, step: dict[str, Any]) -> list[Message]:
    kept = (step.get("extra_info") or {}).get("agentrl")
    if kept:  # written by us: the messages as they were
        return from_chat(kept)
    thought = step.get("thought") or ""
    action = (step.get("action") or "").strip()
    if not action:
        return [Message(role=Role.ASSISTANT, content=(thought or step.get("response") or "").strip())]
    call = ToolCall(id=f"call_{number}", name="bash", arguments=json.dumps({"command": action}))
    result = text_of(step.get("observation"))
    return [
        Message(role=Role.ASSISTANT, content=thought.strip(), tool_calls=[call]),
        Message(role=Role.TOOL, content=result, tool_call_id=call.id, name=call.name),
    ]


def _opening(step: dict[str, Any]) -> list[dict[str, Any]]:
    asked = step.get("query") or step.get("messages") or step.get("message") or []
    return [one for one in asked if one.get("role") in ("system", "user")] if isinstance(asked, list) else []


def _leading(document: dict[str, Any]) -> list[dict[str, Any]]:
    """System and user messages at the head of the history."""
    return list(takewhile(lambda one: one.get("role") in ("system", "user"), document.get("history") or []))


def _plain(one: dict[str, Any]) -> dict[str, Any]:
    """A history item as chat: SWE-agent keeps the ids of answered calls in a list."""
    ids = one.get("tool_call_ids")
    return {**one, "tool_call_id": ids[0] if ids else one.get("tool_call_id"), "name": None}


def write(rows: Iterable[Trajectory], path: Path) -> int:
    """One file per row in the folder ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    count = 0
    for row in rows:
        opening, rest = split_prompt(row.messages)
        document = {
            "environment": row.env,
            "trajectory": _steps(rest, to_chat(opening)),
            "history": to_chat(row.messages),
            "info": {
                "exit_status": "submitted" if row.termination is Termination.ANSWERED else row.termination.value,
                "submission": (json.loads(row.final_state) or {}).get("submission")
                if isinstance(json.loads(row.final_state), dict)
                else None,
                "agentrl": carried(row),
                "agentrl_tools": row.tools,
            },
        }
        text = json.dumps(document, indent=2, ensure_ascii=False)
        (path / file_name(row.trajectory_id, ".traj")).write_text(text, encoding="utf-8")
        count += 1
    return count


def _steps(messages: list[Message], opening: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            call = message.tool_calls[0] if message.tool_calls else None
            steps.append(
                {
                    "action": _command(call),
                    "observation": "",
                    "response": message.content,
                    "thought": message.content,
                    "state": {},
                    "query": opening if not steps else [],
                    "extra_info": {"agentrl": to_chat([message])},
                }
            )
        elif message.role is Role.TOOL and steps:
            steps[-1]["observation"] += message.content
            steps[-1]["extra_info"]["agentrl"] += to_chat([message])
    return steps


def _command(call: ToolCall | None) -> str:
    if call is None:
        return ""
    arguments = call.parsed()
    if isinstance(arguments, dict) and set(arguments) == {"command"}:
        return str(arguments["command"])
    return f"{call.name} {call.arguments}"
