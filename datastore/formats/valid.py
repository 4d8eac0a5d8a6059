"""Rows as programs that read what is written take them: every call has an id, every answer names the call that it
answers, and tools are JSON schemas of functions."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.messages import function_tool
from agentrl.datastore.formats.row_parts import is_function
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

Write = Callable[[Iterable[Trajectory], Path], int]


def valid(write: Write) -> Write:
    """A writer that is given rows with ids and schemas."""

    def written(rows: Iterable[Trajectory], path: Path) -> int:
        return write(map(completed, rows), path)

    return written


def completed(row: Trajectory) -> Trajectory:
    """The row with ids for calls and answers that have none, and bare tool schemas wrapped. Nothing else changes."""
    messages, tools = _linked(row.messages), _wrapped(row.tools)
    if messages is row.messages and tools == row.tools:
        return row
    return row.model_copy(update={"messages": messages, "tools": tools})


def _linked(messages: list[Message]) -> list[Message]:
    calls = all(call.id for message in messages for call in message.tool_calls)
    if calls and all(message.tool_call_id for message in messages if message.role is Role.TOOL):
        return messages
    linked: list[Message] = []
    waiting: list[ToolCall] = []
    for number, message in enumerate(messages):
        if message.tool_calls:
            waiting = [
                call if call.id else call.model_copy(update={"id": f"call_{number}_{index}"})
                for index, call in enumerate(message.tool_calls)
            ]
            message = message.model_copy(update={"tool_calls": list(waiting)})
        elif message.role is Role.TOOL:
            call = _answered(message, waiting)
            if call:
                waiting.remove(call)
            if not message.tool_call_id:
                message = message.model_copy(update={"tool_call_id": call.id if call else f"call_{number}"})
        linked.append(message)
    return linked


def _answered(answer: Message, waiting: Sequence[ToolCall]) -> ToolCall | None:
    """The call that an answer is of, by its id, else its name, else its place."""
    if answer.tool_call_id:
        return next((call for call in waiting if call.id == answer.tool_call_id), None)
    named = (call for call in waiting if call.name == answer.name)
    return next(named, waiting[0] if waiting and not answer.name else None)


def _wrapped(tools: str) -> str:
    functions_or_tools = json.loads(tools)
    if not isinstance(functions_or_tools, list) or all(
        isinstance(tool, dict) and "function" in tool for tool in functions_or_tools
    ):
        return tools
    return json.dumps([_function(tool) for tool in functions_or_tools], ensure_ascii=False)


def _function(tool: Any) -> Any:
    """A tool as chat has it. A tool that the model's server runs, which has a type of its own, stays as it is."""
    wrapped = function_tool(tool)
    if wrapped is not tool or not isinstance(tool, dict) or "name" not in tool:
        return wrapped
    if tool.get("type", "function") != "function":
        return tool
    bare = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": {**bare, "parameters": {"type": "object", "properties": {}}}}


def functions(tools: str) -> list[Any]:
    """The tools that are functions, of those of a row that is :func:`completed`. Others (a tool that one server runs,
    or that one program knows) are valid for nobody else."""
    return [tool for tool in json.loads(tools) if is_function(tool)]


def bare(tools: str) -> list[Any]:
    """The same as verifiers has them: name, description and parameters, without the ``function`` around them."""
    return [
        {"description": "", "parameters": {"type": "object", "properties": {}}} | tool["function"]
        for tool in functions(tools)
    ]


def functions_text(tools: str) -> str:
    """The same as :func:`functions` as JSON text; text without others stays as it is."""
    listed = functions(tools)
    return tools if len(listed) == len(json.loads(tools)) else json.dumps(listed, ensure_ascii=False)
