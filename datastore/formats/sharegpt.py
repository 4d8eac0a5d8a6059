"""ShareGPT as LLaMA-Factory reads it, JSON Lines or a JSON array: ``conversations`` of ``{from, value}``, ``system``,
``tools``; ``sharegpt-preference`` adds ``chosen`` and ``rejected`` (one turn each), or is ``chosen_messages`` and
``rejected_messages`` (chat whose content has parts ``{"type", "value"}``, as version 1 has it); KTO data ``kto_tag``.

A call is ``function_call`` with ``{"name", "arguments"}``, several at once a JSON list; results are one
``observation``, several joined by lines. Human and observation stand at odd places, gpt and function_call at even
ones: neighbours of one side are joined. A preference is two rows of one task, the chosen one a success with reward
1, the rejected one a failure with 0; ``kto_tag`` is the success. Columns of media (``images``, ``videos``,
``audios``) are counted, not carried; their placeholders stay in the text.

Cannot carry: text beside a call, reasoning, call ids, which result answers which of several calls, tokens, outcome,
identity, lineage.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agentrl.datastore.formats.annotated import in_record
from agentrl.datastore.formats.chat import is_chat
from agentrl.datastore.formats.files import write_lines
from agentrl.datastore.formats.messages import ROLES, call, from_chat, tools_text
from agentrl.datastore.formats.origin import BESIDE, beside, unspent
from agentrl.datastore.formats.rows import canonical, make_row
from agentrl.datastore.formats.source import Row, Source, each
from agentrl.datastore.formats.trl import preference_rows
from agentrl.datastore.formats.valid import functions_text
from agentrl.schemas.json_text import loads
from agentrl.schemas.trajectory import Message, Role, Trajectory

_SIDES = ("chosen_messages", "rejected_messages")
_KNOWN = frozenset({"conversations", "system", "tools", "chosen", "rejected", "kto_tag"} | {*_SIDES}) | BESIDE
_KNOWN_TURN = frozenset({"from", "value"})


def _is_turns(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"from", "value"} <= value[0].keys()
    )


def fits(head: Any) -> int:
    return 2 if isinstance(head, dict) and _is_turns(head.get("conversations")) and "chosen" not in head else 0


def fits_preference(head: Any) -> int:
    if _is_pair_of_chats(head):
        return 3
    if not isinstance(head, dict) or not _is_turns(head.get("conversations")):
        return 0
    return 2 if {"chosen", "rejected"} <= head.keys() else 0


def _is_pair_of_chats(head: Any) -> bool:
    return isinstance(head, dict) and all(is_chat(head.get(side)) for side in _SIDES)


def read(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        origin = beside(line, source.notes)
        messages = _messages(line, line["conversations"], source)
        success = source.notes.outcome(line, "kto_tag")
        tools = tools_text(line.get("tools"))
        yield make_row(messages, source="sharegpt", origin=origin, tools=tools, success=success)

    return each(source, source.records(), convert)


def read_preference(source: Source) -> Iterator[Row]:
    def convert(line: dict[str, Any]) -> Iterator[Row]:
        source.notes.rest(line, _KNOWN)
        origin = beside(line, source.notes)
        if _is_pair_of_chats(line):
            sides = [from_chat(line[side], source.notes) for side in _SIDES]
            yield from preference_rows(line, sides, "sharegpt", origin)
            return
        content = canonical([line.get("system"), line["conversations"]])
        tools = tools_text(line.get("tools"))
        for index, (side, success) in enumerate((("chosen", True), ("rejected", False))):
            turns = line[side] if isinstance(line[side], list) else [line[side]]
            yield make_row(
                _messages(line, [*line["conversations"], *turns], source),
                source="sharegpt",
                origin=unspent(origin) if index else origin,
                task_content=content,
                tools=tools,
                sample_index=index,
                success=success,
                reward=float(success),
            )

    return each(source, source.records(), convert)


def _messages(line: dict[str, Any], turns: list[dict[str, Any]], source: Source) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": line["system"]}] if line.get("system") else []
    pending: list[dict[str, Any]] = []
    for turn in turns:
        if not turn.keys() <= _KNOWN_TURN:
            source.notes.rest(turn, _KNOWN_TURN, "conversations.")
        kind, value = turn["from"], turn["value"]
        if kind == "function_call":
            parsed = loads(value)
            calls = parsed if isinstance(parsed, list) else [parsed]
            pending = [call(element, source.notes, f"call_{len(messages)}_{i}") for i, element in enumerate(calls)]
            messages.append({"role": "assistant", "content": "", "tool_calls": pending})
        elif kind == "observation":
            answered = pending[0] if len(pending) == 1 else None
            identity = {"tool_call_id": answered["id"], "name": answered["name"]} if answered else {}
            messages.append({"role": "tool", "content": value, **identity})
        else:
            messages.append({"role": ROLES.get(kind, kind), "content": value})
    return messages


def write(rows: Iterable[Trajectory], path: Path) -> int:
    return write_lines(path, map(_line, rows))


def _line(row: Trajectory) -> dict[str, Any]:
    turns: list[dict[str, str]] = []
    system = "\n\n".join(message.content for message in row.messages if message.role is Role.SYSTEM)
    for message in row.messages:
        if message.role is Role.SYSTEM:
            continue
        turn = _turn(message)
        if turns and turns[-1]["from"] == turn["from"] and turn["from"] != "function_call":
            turns[-1]["value"] += "\n" + turn["value"]
        else:
            turns.append(turn)
    record = {"conversations": turns, "system": system, "tools": functions_text(row.tools)}
    return record | in_record(row, text=True)


def _turn(message: Message) -> dict[str, str]:
    if message.role is Role.ASSISTANT and message.tool_calls:
        calls = [{"name": call.name, "arguments": call.parsed()} for call in message.tool_calls]
        value = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
        return {"from": "function_call", "value": value}
    name = {Role.USER: "human", Role.ASSISTANT: "gpt", Role.TOOL: "observation"}[message.role]
    return {"from": name, "value": message.content}
