"""OpenAI chat, JSON Lines or a JSON array: ``{"messages": [...], "tools": [...]}``, arguments of calls as JSON text.

Reads also: arguments as objects, calls as JSON text, legacy ``function_call`` with ``functions`` and messages of role
``function``, content in parts, ``model`` (policy), and ``label`` (success, as LLaMA-Factory's KTO data has it). An
answer without an id takes that of the call before it. Carries roles, text, reasoning (``reasoning_content``), calls
with ids, tool names, tool schemas. Cannot carry tokens, outcome, identity and lineage.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats import anthropic
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import from_chat, to_chat, tools_text
from agentrl.datastore.formats.rows import make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Trajectory

_KNOWN = frozenset({"messages", "tools", "functions", "model", "label"})


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages with roles."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def fits(head: Any) -> int:
    return int(isinstance(head, dict) and is_chat(head.get("messages")) and anthropic.fits(head) < 2)


def read(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        messages, tools = _tools_taken_out(line["messages"])
        yield make_row(
            from_chat(messages, source.notes),
            source="openai-chat",
            tools=tools_text(tools) if tools else _tools(line),
            policy=line.get("model"),
            success=source.notes.outcome(line, "label"),
        )

    return each(source, source.records(), convert)


def _tools(line: dict[str, Any]) -> str:
    """Tool schemas; legacy ``functions`` in the form of ``tools``."""
    if line.get("functions"):
        return tools_text([{"type": "function", "function": one} for one in line["functions"]])
    return tools_text(line.get("tools"))


def _tools_taken_out(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages without the parts that hold tools, as version 1 of LLaMA-Factory has them, and these tools."""
    rest, tools = [], []
    for one in messages:
        if isinstance(content := one.get("content"), list):
            held = [part for part in content if isinstance(part, dict) and part.get("type") == "tools"]
            tools += [tool for part in held for tool in loads(part["value"])]
            one = {**one, "content": [part for part in content if part not in held]} if held else one
        rest.append(one)
    return rest, tools


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, ({"messages": to_chat(row.messages), "tools": json.loads(row.tools)} for row in rows))
