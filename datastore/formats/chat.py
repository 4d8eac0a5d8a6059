"""OpenAI chat, JSON Lines or a JSON array: ``{"messages": [...], "tools": [...]}``, arguments of calls as JSON text.

Reads also: arguments as objects, calls as JSON text, legacy ``function_call`` with ``functions`` and messages of role
``function``, content in parts, ``system`` beside the messages, ``model`` (policy), ``label`` (success, as
LLaMA-Factory's KTO data has it), ``id``, a time, ``usage`` and a cost, and logs of requests with their completions, see
``completions``. An answer without an id takes that of the call before it. A record without any assistant message is
refused unless such rows are asked for. Carries roles, text, reasoning (``reasoning_content``), calls with ids, tool
names, tool schemas. Cannot carry tokens, outcome and identity.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats import anthropic, regular
from agentrl.datastore.formats.annotated import in_record
from agentrl.datastore.formats.completions import (
    FINISHES,
    SETTINGS,
    answer_key,
    asked,
    completions,
    model_of,
    setting,
    with_answer_read,
)
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import from_chat, to_chat, tools_text
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.origin import BESIDE, unspent, within
from agentrl.datastore.formats.rows import answered, make_row, termination
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.valid import functions
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Trajectory

_KNOWN = frozenset({"messages", "tools", "functions", "label", "system", "request"}) | BESIDE
_KNOWN_PLAIN = _KNOWN - {*SETTINGS}
"""Keys of a record without settings and without a completion."""


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages with roles."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def fits(head: Any) -> int:
    if not isinstance(head, dict) or not is_chat(asked(head).get("messages")) or anthropic.fits(head) == 2:
        return 0
    return 1 + is_log(head)


def is_log(line: dict[str, Any]) -> bool:
    """Whether a record has a completion beside its messages."""
    return (key := answer_key(line)) is not None and (not isinstance(line[key], dict) or "choices" in line[key])


def read(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        line = with_answer_read(line)
        key, request = answer_key(line), asked(line)
        _count_rest(line, key, source.notes)
        messages, tools = _tools_taken_out(request["messages"])
        system = request.get("system")
        if system and not any(message["role"] in ("system", "developer") for message in messages[:1]):
            messages.insert(0, {"role": "system", "content": system})
        origin = within(line, source.notes, *SETTINGS, key or "")
        answers = list(completions(line[key], source.notes, key)) if key else [(None, None)]
        for number, (answer, finish) in enumerate(answers):
            conversation = from_chat([*messages, answer] if answer else messages, source.notes)
            row = make_row(
                conversation,
                source="openai-chat",
                origin=unspent(origin) if number else origin,
                tools=tools_text(tools) if tools else _tools(line),
                policy=setting(line, "model") or model_of(line.get(key or "")),
                success=source.notes.outcome(line, "label"),
                sample_index=number or None,
                termination=termination(FINISHES, finish, source.notes),
            )
            yield answered(row, source.notes)

    return each(source, source.records(), convert)


class Chat(regular.Typed):
    messages: list[regular.TypedMessage]
    tools: regular.Raw = regular.NULL


def row_of(record: Chat) -> regular.RegularRow:
    return regular.RegularRow(record.messages, {"tools": regular.tools_of(record.tools)})


REGULAR = regular.Regular("openai-chat", Chat, row_of, chat=True)


def _count_rest(line: dict[str, Any], answer: str | None, notes: Notes) -> None:
    """Count what no column takes of a record."""
    if _KNOWN_PLAIN.issuperset(line):
        return
    settings = [name for name in SETTINGS if isinstance(line.get(name), dict)]
    notes.rest(line, _KNOWN | {answer or "", *settings})
    for name in settings:
        notes.rest(line[name], _KNOWN, f"{name}.")


def _tools(line: dict[str, Any]) -> str:
    """Tool schemas; legacy ``functions`` in the form of ``tools``."""
    if functions := setting(line, "functions"):
        return tools_text([{"type": "function", "function": function} for function in functions])
    return tools_text(setting(line, "tools"))


def _tools_taken_out(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Messages without the parts that hold tools, as version 1 of LLaMA-Factory has them, and these tools."""
    if not [message for message in messages if isinstance(message.get("content"), list)]:
        return list(messages), []
    rest, tools = [], []
    for message in messages:
        if isinstance(content := message.get("content"), list):
            held = [part for part in content if isinstance(part, dict) and part.get("type") == "tools"]
            tools += [tool for part in held for tool in loads(part["value"])]
            message = {**message, "content": [part for part in content if part not in held]} if held else message
        rest.append(message)
    return rest, tools


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_line, rows))


def _line(row: Trajectory) -> dict[str, Any]:
    tools = functions(row.tools)
    return {"messages": to_chat(row.messages)} | ({"tools": tools} if tools else {}) | in_record(row)
