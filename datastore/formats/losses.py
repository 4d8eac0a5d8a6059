"""What a row has that a format may not hold: each part with its name, and how to look at it."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from agentrl.schemas.trajectory import Role, Trajectory

_IDENTITY = ("task_id", "env", "env_version", "split", "level", "sample_index", "source")


def _roles(row: Trajectory) -> list[str]:
    """Roles in order, neighbours of one role as one."""
    roles = [message.role.value for message in row.messages]
    return [role for place, role in enumerate(roles) if not place or roles[place - 1] != role]


def _text(row: Trajectory) -> list[tuple[str, str]]:
    """Text by role, neighbours of one role joined by lines; of assistant messages those that only speak."""
    found: list[tuple[str, str]] = []
    for message in row.messages:
        if message.role is Role.ASSISTANT and message.tool_calls:
            found.append(("call", ""))
        elif found and found[-1][0] == message.role.value:
            found[-1] = (message.role.value, found[-1][1] + "\n" + message.content)
        else:
            found.append((message.role.value, message.content))
    return [one for one in found if one[0] != "call"]


def _neighbours(row: Trajectory) -> list[str] | None:
    """All texts one by one, if messages of one role stand side by side."""
    roles = [message.role for message in row.messages]
    if not any(a is b for a, b in pairwise(roles)):
        return None
    return [message.content for message in row.messages if not message.tool_calls]


def _beside(row: Trajectory) -> list[str]:
    return [message.content for message in row.messages if message.tool_calls and message.content]


def _logprobs(row: Trajectory) -> list[Any] | None:
    known = any(not math.isnan(one) for one in row.logprobs)
    return [None if math.isnan(one) else one for one in row.logprobs] if known else None


def _spans(row: Trajectory, *roles: Role) -> list[Any] | None:
    spans = [(one.token_start, one.token_end) for one in row.messages if one.role in roles]
    return spans if any(start is not None for start, _ in spans) else None


def _tool(schema: Any) -> Any:
    """A function's name, description and parameters; one without parameters takes an object."""
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        return schema
    return [function["name"], function.get("description", ""), function.get("parameters") or {"type": "object"}]


PARTS: dict[str, Callable[[Trajectory], Any]] = {
    "text": _text,
    "roles": _roles,
    "boundaries of neighbouring messages": _neighbours,
    "reasoning": lambda row: [one.reasoning for one in row.messages if one.reasoning] or None,
    "calls": lambda row: [
        [(call.name, call.parsed()) for call in one.tool_calls] for one in row.messages if one.tool_calls
    ],
    "spelling of arguments": lambda row: [
        call.arguments for one in row.messages for call in one.tool_calls if call.arguments != json.dumps(call.parsed())
    ],
    "text beside calls": _beside,
    "call ids": lambda row: [call.id for one in row.messages for call in one.tool_calls if call.id],
    "ids of answers": lambda row: [one.tool_call_id for one in row.messages if one.tool_call_id],
    "names of answers": lambda row: [one.name for one in row.messages if one.role is Role.TOOL and one.name],
    "tools": lambda row: [_tool(one) for one in json.loads(row.tools)],
    "reward": lambda row: row.reward,
    "success": lambda row: row.success,
    "end": lambda row: row.termination.value,
    "reward components": lambda row: [(one.name, one.value, one.weight) for one in row.reward_components],
    "step rewards": lambda row: (
        [one.reward for one in row.messages] if any(one.reward is not None for one in row.messages) else None
    ),
    "tool errors": lambda row: row.n_tool_errors or None,
    "final state": lambda row: None if row.final_state == "null" else json.loads(row.final_state),
    "tags": lambda row: row.tags,
    "identity": lambda row: [getattr(row, name) for name in _IDENTITY],
    "agent and segment": lambda row: (row.agent, row.segment) if row.segment or row.agent != "main" else None,
    "policy": lambda row: (row.policy, row.policy_version, row.sampling) if row.policy else None,
    "token ids": lambda row: row.input_ids,
    "tokenizer": lambda row: row.tokenizer or None,
    "action mask": lambda row: row.action_mask if any(row.action_mask) else None,
    "log-probs": _logprobs,
    "versions of the weights": lambda row: [one.model_dump() for one in row.spans] or None,
    "spans of assistant messages": lambda row: _spans(row, Role.ASSISTANT),
    "spans of other messages": lambda row: _spans(row, Role.SYSTEM, Role.USER, Role.TOOL),
}
"""Name of each part, and its value in a row; None or nothing if the row does not have it."""


def present(row: Trajectory) -> set[str]:
    """Names of the parts that a row has."""
    return {name for name, look in PARTS.items() if (value := look(row)) is not None and value not in ([], ())}


def lost(before: Trajectory, after: Trajectory) -> set[str]:
    """Names of the parts that differ between a row and what came back of it."""
    return {name for name, look in PARTS.items() if _plain(look(before)) != _plain(look(after))}


def _plain(value: Any) -> str:
    return json.dumps(value or None if not isinstance(value, bool | float | int) else value, sort_keys=True)
