"""tau2-bench results: one JSON document with ``tasks`` and ``simulations``.

A simulation is a row: ``task_id``, ``trial`` (sample index), ``reward_info.reward`` (success at 1),
``reward_info.reward_breakdown`` (components), ``termination_reason``, ``messages`` with calls ``{id, name,
arguments}``. Calls by the simulated user (``requestor: user``) are kept as they are said. What has no place goes
under ``info.agentrl``. Cannot carry: tokens, masks, log-probs.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from datastore.formats.common import carried, json_text, make_row, read_document, strings, text_of
from schemas.trajectory import Message, RewardComponent, Role, Termination, ToolCall, Trajectory

_REASONS = {
    "agent_stop": Termination.ANSWERED,
    "user_stop": Termination.ANSWERED,
    "max_steps": Termination.MAX_STEPS,
    "too_many_errors": Termination.ENV_ERROR,
    "agent_error": Termination.FORMAT_ERROR,
    "user_error": Termination.ENV_ERROR,
}


def read(path: Path) -> Iterator[Trajectory]:
    document = read_document(path)
    domain = ((document.get("info") or {}).get("environment_info") or {}).get("domain_name") or "tau2"
    extras = (document.get("info") or {}).get("agentrl") or {}
    for number, one in enumerate(document.get("simulations") or []):
        reward = one.get("reward_info") or {}
        parts = reward.get("reward_breakdown") or {}
        extra = dict(extras.get(str(one["id"])) or {})
        tools = extra.pop("tools", "[]")
        yield make_row(
            number,
            _messages(one.get("messages") or []),
            extra=extra,
            trajectory_id=str(one["id"]),
            task_id=str(one["task_id"]),
            group_id=str(one["task_id"]),
            sample_index=one.get("trial") or 0,
            env=domain,
            tools=tools,
            reward=float(reward.get("reward") or 0.0),
            success=(reward.get("reward") or 0.0) >= 1.0,
            termination=_REASONS.get(one.get("termination_reason"), Termination.ANSWERED),
            reward_components=[RewardComponent(name=str(name), value=float(value)) for name, value in parts.items()],
        )


def _messages(items: Iterable[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    names: dict[str, str] = {}
    for one in items:
        for item in one.get("tool_messages") or [one]:  # several results may stand in one message
            calls = [
                ToolCall(
                    id=str(call.get("id") or ""), name=call["name"], arguments=json_text(call.get("arguments") or {})
                )
                for call in item.get("tool_calls") or []
            ]
            names |= {call.id: call.name for call in calls}
            identity = strings(item.get("tool_call_id") or item.get("id")) if item["role"] == "tool" else None
            messages.append(
                Message(
                    role=Role(item["role"]),
                    content=text_of(item.get("content")),
                    tool_calls=calls,
                    tool_call_id=identity,
                    name=names.get(identity or "") or (item.get("name") if item["role"] == "tool" else None),
                )
            )
    return messages


def write(rows: Iterable[Trajectory], path: Path) -> int:
    simulations, extras, tasks, env = [], {}, {}, "tau2"
    reasons = {Termination.ANSWERED: "agent_stop"} | {
        value: key for key, value in _REASONS.items() if value != "answered"
    }
    for row in rows:
        env = row.env
        tasks[row.task_id] = {"id": row.task_id, "user_scenario": {"instructions": row.prompt}}
        extras[row.trajectory_id] = carried(row) | {"tools": row.tools}
        simulations.append(
            {
                "id": row.trajectory_id,
                "task_id": row.task_id,
                "trial": row.sample_index,
                "termination_reason": reasons.get(row.termination, "agent_error"),
                "reward_info": {
                    "reward": row.reward,
                    "reward_breakdown": {part.name: part.value for part in row.reward_components},
                },
                "messages": [_message(message) for message in row.messages],
            }
        )
    document = {
        "timestamp": datetime.now(UTC).isoformat(),
        "info": {"environment_info": {"domain_name": env}, "agentrl": extras},
        "tasks": list(tasks.values()),
        "simulations": simulations,
    }
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")
    return len(simulations)


def _message(message: Message) -> dict[str, Any]:
    one: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.role is Role.TOOL:
        return one | {"id": message.tool_call_id, "name": message.name, "requestor": "assistant"}
    if message.tool_calls:
        one["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": call.parsed(), "requestor": message.role.value}
            for call in message.tool_calls
        ]
    return one
