"""Content parts of kinds that no reader knows are counted by their type, and never become text."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from format_files import CALL, USER, Read, shape
from format_samples import SAMPLES

from agentrl.schemas.trajectory import Trajectory

ODD = {"type": "odd_kind", "text": "odd value", "payload": "odd value"}
CASES = [
    pytest.param(name, suffix, document, id=f"{name}-{number}")
    for name, files in SAMPLES.items()
    for number, (suffix, document) in enumerate(files)
]
PLAIN = {"alpaca", "sharegpt", "sharegpt-preference", "codex-exec", "gemini-cli"}
"""Their texts have no parts, or their parts have no type."""
PRINTED = {("opencode", ".jsonl")}
"""A line is a part."""


def texts(rows: list[Trajectory]) -> str:
    """Everything that a policy or a user says in the rows."""
    return json.dumps([[m.content, m.reasoning, [c.arguments for c in m.tool_calls]] for r in rows for m in r.messages])


def with_an_odd_part(value: Any) -> Iterator[Any]:
    """Copies of a document, each with an odd part in another list of parts, or beside another text."""

    def walk(part: Any) -> Iterator[tuple[list[Any], dict[str, Any] | None, str]]:
        for key, inner in list(part.items() if isinstance(part, dict) else enumerate(part)):
            if isinstance(inner, dict | list):
                yield from walk(inner)
            kinds = isinstance(inner, list) and inner and all(isinstance(p, dict) and "type" in p for p in inner)
            hosted = isinstance(part, dict) and part.get("type") == "web_search_tool_result"  # kept whole, as JSON
            if kinds and not hosted and key in ("content", "parts", "message", "system"):
                yield inner, None, ""
            elif key == "content" and isinstance(inner, str) and ("role" in part or "source_call_id" in part):
                yield [], part, inner

    places = sum(1 for _ in walk(value))
    for number in range(places):
        copy = deepcopy(value)
        parts, holder, text = list(walk(copy))[number]
        if holder is not None:
            holder["content"] = parts = [{"type": "text", "text": text}]
        parts.append(ODD)
        yield copy


@pytest.mark.parametrize(("name", "suffix", "document"), CASES)
def test_a_part_of_an_unknown_kind_is_counted_in_every_format(
    name: str, suffix: str, document: Any, tmp_path: Path
) -> None:
    tried = 0
    for odd in with_an_odd_part(document):
        read = Read(tmp_path, name, odd, suffix)
        assert "odd value" not in texts(read.rows)
        assert read.rows
        assert any(key.endswith("odd_kind") for key in read.notes.ignored), odd
        tried += 1
    assert tried or name in PLAIN or (name, suffix) in PRINTED


def test_reasoning_of_inspect_that_is_empty_or_redacted_is_no_text(tmp_path: Path) -> None:
    """inspect-ai 0.3.285, ``ContentReasoning``: models that hide their reasoning leave the block empty."""
    blocks = [
        {"type": "reasoning", "reasoning": "", "summary": None, "signature": None, "redacted": False},
        {"type": "reasoning", "reasoning": "gAAAA", "summary": "I add", "redacted": True},
        {"type": "text", "text": "No", "refusal": None, "citations": None},
        {"type": "tool_use", "tool_type": "web_search", "id": "w", "name": "search", "arguments": "{}", "result": "x"},
    ]
    sample = {"id": 1, "epoch": 1, "messages": [USER, {"role": "assistant", "content": blocks}]}
    log = {"version": 2, "status": "success", "eval": {"task": "t", "model": "m"}, "samples": [sample]}
    read = Read(tmp_path, "inspect", log)
    assert shape(read.row) == [("user", USER["content"]), ("assistant", "No")]
    assert read.row.messages[1].reasoning == "I add"
    assert read.notes.ignored == {
        "messages.content.reasoning that is redacted": 1,
        "messages.content.tool_use": 1,
        "status": 1,  # of the log
    }


def test_parts_with_calls_of_llama_factory(tmp_path: Path) -> None:
    """Version 1 writes calls as a part of type ``tool_calls``, whose value is a JSON list, and tools as one too."""
    calls = [{"name": "find", "arguments": {"who": "Ann"}}, {"name": "find", "arguments": {"who": "Bob"}}]
    texts = [{"type": "text", "value": "I look."}, {"type": "tool_calls", "value": json.dumps(calls)}]
    asked = [{"type": "tools", "value": json.dumps([{"name": "find", "parameters": {"type": "object"}}])}]
    messages = [{"role": "system", "content": asked}, USER, {"role": "assistant", "content": texts}]
    read = Read(tmp_path, "openai-chat", [{"messages": messages}], ".jsonl")
    assert shape(read.row)[-1] == ("assistant", 'I look. find{"who": "Ann"} find{"who": "Bob"}')
    assert [tool["function"]["name"] for tool in json.loads(read.row.tools)] == ["find"]
    assert read.notes.ignored == {}


def test_what_a_tool_answered_is_kept_as_json(tmp_path: Path) -> None:
    """An object or a list of objects without a type is the tool's own, not a list of parts."""
    asked = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    for answer in ({"city": "Rome"}, [{"city": "Rome"}], [1, 2], 3):
        told = {"role": "tool", "tool_call_id": "c1", "content": answer}
        row = Read(tmp_path, "openai-chat", [{"messages": [*asked, told]}], ".jsonl").row
        assert json.loads(row.messages[2].content) == answer
    broken = [USER, {"role": "assistant", "content": {"city": "Rome"}}]
    [refused] = Read(tmp_path, "openai-chat", [{"messages": broken}], ".jsonl").notes.unreadable
    assert "messages.content is an object with the keys city, not text" in refused.reason
