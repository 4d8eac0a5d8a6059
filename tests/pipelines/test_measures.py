"""What is counted of a row that is evaluated."""

import json
from typing import Any

import pytest
from test_not_trained import row

from agentrl.pipelines.parts.measures import attempted, summary
from agentrl.rewards.behaviour import valid_calls
from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall

TOOL = {"name": "find", "parameters": {
    "type": "object", "required": ["who"],
    "properties": {"who": {"type": "string"}, "n": {"type": ["integer", "null"]}, "any": {}},
}}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("find", {"who": "Ann"}, 1), ("find", {"who": "Ann", "n": None, "any": [1]}, 1), ("find", {}, 0),
        ("find", {"who": 3}, 0), ("find", {"who": "Ann", "n": True}, 0), ("find", {"who": "Ann", "x": 1}, 0),
        ("fnd", {"who": "Ann"}, 0), ("find", "Ann", 0),
    ],
)  # fmt: skip
def test_a_valid_call_fits_its_tools_schema(name: str, arguments: Any, valid: int) -> None:
    call = ToolCall(id="c", name=name, arguments=json.dumps(arguments))
    messages = [Message(role=Role.ASSISTANT, tool_calls=[call])]
    tools = json.dumps([{"type": "function", "function": TOOL}])
    assert valid_calls(row("r", []).model_copy(update={"messages": messages, "tools": tools})) == valid


def test_what_counts_of_a_row() -> None:
    columns = {"success": True, "n_tool_errors": 1, "final_state": '{"violations": ["sent"]}'}
    given = row("r", []).model_copy(update={**columns, "termination": Termination.FORMAT_ERROR})
    result = attempted(given, optimum=2)
    assert (result.calls, result.tool_errors, result.violations, result.format_error, result.optimum) == (
        0,
        1,
        1,
        True,
        2,
    )


def test_a_call_that_a_limit_kept_from_being_made_counts_as_a_call() -> None:
    turn = Message(role=Role.ASSISTANT, tool_calls=[ToolCall(id="c", name="find", arguments='{"who": "Ann"}')])
    texts = [turn, Message(role=Role.TOOL, tool_call_id="c"), turn]
    columns = {"success": False, "n_tool_calls": 1, "termination": Termination.MAX_STEPS, "messages": texts}
    tools = json.dumps([{"type": "function", "function": TOOL}])
    result = attempted(row("r", []).model_copy(update={**columns, "tools": tools}))
    assert (result.calls, result.valid_calls) == (2, 2)
    assert summary([result])["valid_calls"] == 1.0
