"""Short conversations, for tests of dialects."""

import json

from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"The tool {name}.",
                "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
            },
        }
        for name in ("find", "look")
    ]
)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def says(text: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role=Role.ASSISTANT, content=text, reasoning=reasoning, tool_calls=list(calls))


def call(number: int, name: str, q: str) -> ToolCall:
    return ToolCall(id=f"call_{number}", name=name, arguments=json.dumps({"q": q}))


def answers(call: ToolCall, text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=call.id, name=call.name)


FIND, LOOK = call(0, "find", 'Zoë\'s "town"'), call(1, "look", "a\nb")


def row(messages: list[Message], tools: str = "[]") -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        episode_id="t",
        task_id="t",
        source="test",
        env="test",
        split="train",
        prompt="",
        reward=None,
        success=None,
        termination=Termination.ANSWERED,
        messages=messages,
        tools=tools,
    )
