"""What a row has that a format may not hold: each part with its name, and how to look at it."""

import json
import math
from collections.abc import Callable, Iterable
from itertools import pairwise, zip_longest
from typing import Any

from agentrl.schemas.trajectory import Message, Role, Trajectory

_IDENTITY = ("task_id", "env", "env_version", "split", "level", "sample_index", "source")


def _spoken(row: Trajectory) -> list[Message]:
    """The messages but the system's, which have parts of their own."""
    return [message for message in row.messages if message.role is not Role.SYSTEM]


def _places(row: Trajectory) -> list[int] | None:
    """Where system messages stand, if there are several, or one that does not begin the row."""
    places = [index for index, message in enumerate(row.messages) if message.role is Role.SYSTEM]
    return None if places in ([], [0]) else places


def _roles(row: Trajectory) -> list[str]:
    """Roles in order, neighbours of one role as one."""
    roles = [message.role.value for message in _spoken(row)]
    return [role for index, role in enumerate(roles) if not index or roles[index - 1] != role]


def _text(row: Trajectory) -> list[tuple[str, str]]:
    """Text by role, neighbours of one role joined by lines; of assistant messages those that only speak."""
    texts: list[tuple[str, str]] = []
    for message in _spoken(row):
        if message.role is Role.ASSISTANT and message.tool_calls:
            texts.append(("call", ""))
        elif texts and texts[-1][0] == message.role.value:
            texts[-1] = (message.role.value, texts[-1][1] + "\n" + message.content)
        else:
            texts.append((message.role.value, message.content))
    return [item for item in texts if item[0] != "call"]


def _neighbours(row: Trajectory) -> list[str] | None:
    """All texts one by one, if messages of one role stand side by side."""
    spoken = _spoken(row)
    if not any(a.role is b.role for a, b in pairwise(spoken)):
        return None
    return [message.content for message in spoken if not message.tool_calls]


def _beside(row: Trajectory) -> list[str]:
    return [message.content for message in row.messages if message.tool_calls and message.content]


def _logprobs(row: Trajectory) -> list[Any] | None:
    known = any(not math.isnan(logprob) for logprob in row.logprobs)
    return [None if math.isnan(logprob) else logprob for logprob in row.logprobs] if known else None


def _spans(row: Trajectory, *roles: Role) -> list[Any] | None:
    spans = [(message.token_start, message.token_end) for message in row.messages if message.role in roles]
    return spans if any(start is not None for start, _ in spans) else None


def _failed(row: Trajectory) -> list[bool | None] | None:
    """Of each answer of a tool whether it is an error, if any says so."""
    errors = [message.error for message in row.messages if message.role is Role.TOOL]
    return errors if any(error is not None for error in errors) else None


def _tool(schema: Any) -> Any:
    """A function's name, description and parameters; one without parameters takes an object."""
    function = schema.get("function", schema) if isinstance(schema, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        return schema
    parameters: dict[str, Any] = {"properties": {}} | (function.get("parameters") or {"type": "object"})
    return [function["name"], function.get("description", ""), parameters]


def is_function(tool: Any) -> bool:
    """Whether a tool is a function, in the form of chat or bare."""
    if not isinstance(tool, dict):
        return False
    inner = tool.get("function", tool)
    return tool.get("type", "function") == "function" and isinstance(inner, dict) and "name" in inner


def _object(arguments: Any) -> Any:
    """Arguments; those that are no object are a part of their own."""
    return arguments if isinstance(arguments, dict) else None


def _some(values: Iterable[str | None]) -> list[str | None] | None:
    """The values in order, None for those that are missing; None if all are."""
    texts = [value or None for value in values]
    return texts if any(texts) else None


PARTS: dict[str, Callable[[Trajectory], Any]] = {
    "system prompt": lambda row: (
        "\n\n".join(message.content for message in row.messages if message.role is Role.SYSTEM) or None
    ),
    "places of system messages": _places,
    "text": _text,
    "roles": _roles,
    "boundaries of neighbouring messages": _neighbours,
    "reasoning": lambda row: [message.reasoning for message in row.messages if message.reasoning] or None,
    "calls": lambda row: [
        [(call.name, _object(call.parsed())) for call in message.tool_calls]
        for message in row.messages
        if message.tool_calls
    ],
    "spelling of arguments": lambda row: [
        call.arguments
        for message in row.messages
        for call in message.tool_calls
        if call.arguments != json.dumps(call.parsed())
    ],
    "text beside calls": _beside,
    "arguments that are no object": lambda row: [
        value for message in row.messages for call in message.tool_calls if not isinstance(value := call.parsed(), dict)
    ],
    "call ids": lambda row: _some(call.id for message in row.messages for call in message.tool_calls),
    "ids of answers": lambda row: _some(message.tool_call_id for message in row.messages if message.role is Role.TOOL),
    "names of answers": lambda row: _some(message.name for message in row.messages if message.role is Role.TOOL),
    "tools": lambda row: [_tool(tool) for tool in json.loads(row.tools) if is_function(tool)],
    "tools that are no functions": lambda row: [tool for tool in json.loads(row.tools) if not is_function(tool)],
    "reward": lambda row: row.reward,
    "success": lambda row: row.success,
    "end": lambda row: row.termination.value,
    "reward components": lambda row: [
        (component.name, component.value, component.weight) for component in row.reward_components
    ],
    "step rewards": lambda row: (
        [message.reward for message in row.messages]
        if any(message.reward is not None for message in row.messages)
        else None
    ),
    "tool errors": lambda row: row.n_tool_errors or None,
    "which calls failed": _failed,
    "final state": lambda row: None if row.final_state == "null" else json.loads(row.final_state),
    "tags": lambda row: row.tags,
    "identity": lambda row: [getattr(row, name) for name in _IDENTITY],
    "agent and segment": lambda row: (row.agent, row.segment) if row.segment or row.agent != "main" else None,
    "policy": lambda row: (row.policy, row.policy_version, row.sampling) if row.policy else None,
    "token ids": lambda row: row.input_ids,
    "tokenizer": lambda row: row.tokenizer or None,
    "action mask": lambda row: row.action_mask if any(row.action_mask) else None,
    "log-probs": _logprobs,
    "versions of the weights": lambda row: [span.model_dump() for span in row.spans] or None,
    "spans of assistant messages": lambda row: _spans(row, Role.ASSISTANT),
    "spans of other messages": lambda row: _spans(row, Role.SYSTEM, Role.USER, Role.TOOL),
}
"""Name of each part, and its value in a row; None or nothing if the row does not have it."""


def present(row: Trajectory) -> set[str]:
    """Names of the parts that a row has."""
    return {name for name, look in PARTS.items() if (value := look(row)) is not None and value not in ([], ())}


def lost(before: Trajectory, after: Trajectory) -> set[str]:
    """Names of the parts that differ between a row and what came back of it."""
    return {name for name, look in PARTS.items() if _differ(name, look(before), look(after))}


_MADE = ("call ids", "ids of answers", "names of answers")
"""Parts of which an export makes what is missing."""


def _differ(name: str, before: Any, after: Any) -> bool:
    if name in _MADE:
        return any(text and text != other for text, other in zip_longest(before or [], after or []))
    if name == "calls" and len(before) == len(
        after
    ):  # what became of arguments that are no object is a part of its own
        after = [
            [
                (tool, None if known is None else given)
                for (_, known), (tool, given) in zip(tools_before, other, strict=False)
            ]
            if len(tools_before) == len(other)
            else other
            for tools_before, other in zip(before, after, strict=True)
        ]
    return _plain(before) != _plain(after)


def _plain(value: Any) -> str:
    return json.dumps(value or None if not isinstance(value, bool | float | int) else value, sort_keys=True)
