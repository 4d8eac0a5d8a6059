"""Files and rows from anybody: no id becomes a path, no depth ends the process, every refusal is one message."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rows import build

from agentrl.chat.hermes import parse_assistant
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.imports import import_paths
from agentrl.schemas.json_text import MAX_DEPTH, depth, loads, writer
from agentrl.schemas.trajectory import ToolCall

DEEP = "[" * 100_000 + "]" * 100_000

IDS = ["../../escaped", "/abs", "a/../../b", ".hidden", "..", "x" * 3000, "C\0", "a\nb", "\u202eevil", "é", "a b"]


@pytest.mark.parametrize("name", ["atif", "swe-agent"])
def test_ids_never_become_paths(name: str, tmp_path: Path) -> None:
    rows = [build(number).model_copy(update={"trajectory_id": token}) for number, token in enumerate(IDS)]
    rows += [build(90).model_copy(update={"trajectory_id": name}) for name in ("a/b", "a_b")]
    out = tmp_path / "in" / "out"
    out.mkdir(parents=True)
    assert FORMATS[name].write(rows, out) == len(rows)
    made = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == len(rows)  # none outside, none over another
    assert all(path.parent == out and not path.name.startswith((".", "-")) for path in made)


def test_deep_json_is_refused_with_its_depth() -> None:
    for text in (DEEP, '{"a":' * 5000 + "1" + "}" * 5000):
        with pytest.raises(ValueError, match=r"levels deep; at most 100"):
            loads(text)
        with pytest.raises(ValueError, match="levels deep"):
            ToolCall(id="a", name="b", arguments=text)
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    braces = json.dumps({"code": "{[" * 5000 + '"\\'})  # in a string they are text
    assert loads(braces)["code"].startswith("{[")


_braces = st.text('[]{}"\\a', max_size=8)
_nested = st.recursive(
    _braces, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_braces, inner, max_size=3), max_leaves=20
)


@given(_nested)
def test_depth_is_that_of_the_value(value: object) -> None:
    def deep(item: object) -> int:
        inside = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if inside is None else 1 + max((deep(each) for each in inside), default=0)

    wrapped: object = value
    for _ in range(MAX_DEPTH + 1):
        wrapped = [wrapped]
    assert depth(json.dumps(wrapped)) == deep(value) + MAX_DEPTH + 1


def test_a_sampled_call_with_deep_arguments_is_a_format_error() -> None:
    parsed = parse_assistant(f'<tool_call>{{"name": "f", "arguments": {DEEP}}}</tool_call>')
    assert parsed.error
    assert "levels deep" in parsed.error


_LINES = rb"""
{}
[]
null
1
NaN
{"messages": 3}
{"messages": [3]}
{"messages": [{"role": "nobody", "content": "x"}]}
{"messages": [{"role": "user", "content": "\ud800"}]}
{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}
{"messages": [], "input_ids": [99999999999999999999], "assistant_masks": [1]}
{"messages": [], "input_ids": ["a"], "assistant_masks": [2]}
{"conversations": [{"from": "x", "value": "y"}]}
{"conversations": [{"from": "function_call", "value": "[[[[["}]}
{"prompt": {"a": 1}, "completion": 3}
{"prompt": "a", "completion": "b", "reward": "x"}
{"prompt": "a", "completion": "b", "metrics": [1]}
{"prompt": "a", "completion": "b", "info": {"agentrl": {"level": 1e300}}}
{"prompt": "a", "completion": "b", "info": {"agentrl": {"input_ids": 3}}}
{"steps": [{"source": "agent"}]}
{"nodes": {"a": 1}}
{"history": [{"role": "user"}]}
{"trajectory": [3], "info": 4}
{"simulations": [{"id": 1}]}
{"traces": [{"nodes": [{"parent": 0}]}]}
{"simulations": 7, "info": []}""".split(b"\n")
_LINES += [b"\xff\xfe", b"\x00", DEEP.encode(), b'{"messages": [{"role": "user"}], "tools": ' + DEEP.encode() + b"}"]
_LINES += [
    b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "'
    + DEEP.encode()
    + b'"}}]}]}'
]


@pytest.mark.parametrize("name", [None, *(name for name in FORMATS if name != "huggingface")])
def test_any_file_is_imported_or_refused_with_one_message(name: str | None, tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    for number, line in enumerate(_LINES):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(line)
        try:
            import_paths(buffer, [path], name)
        except StoreError as error:
            assert len(str(error)) < 4000  # noqa: PT017
    if buffer.version is not None:
        assert buffer.sql("select count(*) from trajectories").height == 1


_KEYS = "messages role content tool_calls prompt completion tools conversations from value info agentrl trajectory"
_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS.split()), inner, max_size=4),
    max_leaves=25,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_values)
def test_any_object_is_read_or_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "any.jsonl"
    path.write_text(json.dumps({"messages": value, "prompt": value, "conversations": value, "trajectory": value}))
    buffer = TrajectoryBuffer(tmp_path / "empty")
    for name in ("openai-chat", "trl-sft", "verifiers", "verifiers-v1", "atif", "swe-agent", "tau2", "sharegpt"):
        try:
            import_paths(buffer, [path], name, dry_run=True)
        except StoreError:
            continue


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(_VALUES, st.booleans(), st.booleans())
def test_json_is_written_as_the_standard_library_writes_it(value: Any, ascii: bool, ordered: bool) -> None:
    assert writer(ascii, ordered)(value) == json.dumps(value, ensure_ascii=ascii, sort_keys=ordered)
    assert writer(default=str)([Path("a"), float("inf")]) == '["a", Infinity]'
