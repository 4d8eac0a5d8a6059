"""The Hermes and Qwen dialect: writing an assistant turn as text, and parsing it."""

import json
import re
from dataclasses import dataclass

from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Message, Role, ToolCall

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Parsed:
    """An assistant turn. ``error`` says why its tool calls could not be read; the raw text is then in the content."""

    message: Message
    error: str | None = None


def parse_assistant(text: str) -> Parsed:
    """Parse one turn in Hermes/Qwen format: ``<think>`` reasoning, ``<tool_call>{"name", "arguments"}</tool_call>``."""
    reasoning = "\n".join(part.strip() for part in _THINK.findall(text)) or None
    rest = _THINK.sub("", text)
    calls = []
    for number, raw in enumerate(_CALL.findall(rest)):
        try:
            call = loads(raw)
            calls.append(
                ToolCall(
                    id=f"call_{number}", name=call["name"], arguments=json.dumps(call["arguments"], allow_nan=False)
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            return Parsed(
                Message(role=Role.ASSISTANT, content=text, reasoning=reasoning), f"tool call {number}: {error}"
            )
    content = _CALL.sub("", rest).strip()
    if "<tool_call>" in content or "</tool_call>" in content:
        return Parsed(Message(role=Role.ASSISTANT, content=text, reasoning=reasoning), "unbalanced <tool_call> tags")
    return Parsed(Message(role=Role.ASSISTANT, content=content, reasoning=reasoning, tool_calls=calls))


def with_thoughts(message: Message) -> Message:
    """The message with the ``<think>`` tags of its content as its reasoning."""
    reasoning = "\n".join(part.strip() for part in _THINK.findall(message.content))
    if not reasoning:
        return message
    return message.model_copy(update={"content": _THINK.sub("", message.content).strip(), "reasoning": reasoning})


def format_assistant(message: Message) -> str:
    """The text of one turn, the inverse of :func:`parse_assistant`."""
    parts = [f"<think>{message.reasoning}</think>"] if message.reasoning else []
    if message.content:
        parts.append(message.content)
    for call in message.tool_calls:
        parts.append(f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>')
    return "\n".join(parts)
