"""Bodies of requests are read fast, and as slowly read ones are."""

import json
import marshal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import policy_for_tests, served

from agentrl.recorder.body import RepeatedTools, bytes_of_value, read_body, read_request
from agentrl.recorder.episode import _line_of, _turn_of
from agentrl.schemas.json_text import MAX_DEPTH, loads, unstorable

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def slowly(text: str) -> Any:
    try:
        value = loads(text)
    except ValueError:
        return "no value"
    return repr(value), unstorable(value)


def quickly(text: str) -> Any:
    try:
        value, bad = read_body(text.encode())
    except ValueError:
        return "no value"
    return repr(value), bad


@given(VALUES, st.sampled_from([0, 0, 0, MAX_DEPTH - 2, MAX_DEPTH, MAX_DEPTH + 1]))
def test_a_body_is_read_as_json_is(value: Any, deep: int) -> None:
    text = json.dumps(value)
    assert quickly("[" * deep + text + "]" * deep) == slowly("[" * deep + text + "]" * deep)


@pytest.mark.parametrize(
    "text",
    ["1e999", "-1e999", "[NaN]", "Infinity", '"\\ud800"', '"\\ud83d\\ude00"', "1], [2", "]", "", "{", "01", "9" * 400]
    + ["[" * n + "]" * n for n in (99, 100, 101, 150, 250, 100_000)]
    + ['{"a":' * n + "1" + "}" * n for n in (99, 100, 101, 199, 250)],
)
def test_odd_bodies_are_read_as_json_is(text: str) -> None:
    assert quickly(text) == slowly(text)


@given(VALUES, VALUES)
def test_equal_values_have_equal_bytes(first: Any, second: Any) -> None:
    assert repr(marshal.loads(bytes_of_value(first))) == repr(first)
    assert (bytes_of_value(first) == bytes_of_value(second)) == (repr(first) == repr(second))


TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "description": 'says "tools": []'}}])


def request_read(text: str, read: Any = read_request) -> Any:
    try:
        value, bad = read(text.encode())
    except ValueError as error:
        return str(error)
    return repr(value), bad


def body_read(text: str) -> Any:
    return request_read(text, read_body)


@pytest.mark.parametrize(
    "text",
    [
        '{"model": "m", "tools": TOOLS, "messages": []}',
        '{"model": "m",\n"tools" :\tTOOLS}',
        '{"metadata": {"tools": TOOLS}, "tools": []}',
        '{"metadata": {"tools": TOOLS}, "tools": TOOLS}',
        '{"metadata": {"tools": TOOLS}}',
        '{"tools": TOOLS, "tools": [1]}',
        '{"tools": [1], "tools": TOOLS}',
        '{"tools": TOOLS, "tools": null}',
        '{"a": "say ,\\"tools\\":TOOLS"}',
        '{"a": "say ,"tools":TOOLS"}',
        '{"a": ","tools":TOOLS}',
        '{"a ,"tools":TOOLS}',
        '[{"tools":TOOLS}]',
        '{"tools": TOOLS',
        '{"tools": TOOLS]}',
        '{"tools": [TOOLS]}',
        '{"tools": [1e999]}',
        '{"tools": TOOLS, "top_p": 1e999}',
        '{"tools": TOOLS, "text": "\\ud800"}',
        '{"text": "é", "tools": ["é"]}',
        '{"tools": "TOOLS"}',
        "{" + '"tools":[' * 60 + "]" * 60 + "}",
        '{"tools":' + "[" * 101 + "]" * 101 + "}",
    ],
)
def test_tools_that_come_again_are_the_same_object_and_say_the_same(text: str) -> None:
    text = text.replace("TOOLS", TOOLS)
    for _ in range(3):
        assert request_read(text) == body_read(text)
        request_read(f'{{"tools": {TOOLS}}}')


def test_a_list_of_tools_is_read_once() -> None:
    first, _ = read_request(f'{{"turn": 1, "tools": {TOOLS}}}'.encode())
    second, _ = read_request(f'{{"turn": 2, "tools": {TOOLS}, "more": 1}}'.encode())
    assert first["tools"] is second["tools"]
    assert isinstance(first["tools"], RepeatedTools)
    assert list(first["tools"]) == json.loads(TOOLS)


@given(VALUES, VALUES, VALUES)
def test_any_tools_are_read_as_a_body_is(tools: Any, before: Any, after: Any) -> None:
    text = json.dumps({"before": before, "tools": [tools], "after": after})
    assert request_read(text) == request_read(text) == body_read(text)


def test_tools_are_written_once_in_a_conversation(tmp_path: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with served(tmp_path / "store", policy_for_tests(), lambda _: "hello") as server:
        client = server.client()
        talk: list[Any] = [{"role": "user", "content": "hi"}]
        for _ in range(2):
            reply = client.chat.completions.create(model="tiny", messages=talk, tools=tools)  # type: ignore[call-overload]
            talk += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
        [episode] = server.recorder.episodes.opened.values()
        first, second = episode.tree.turns
    written = [_line_of(turn) for turn in (first, second)]
    assert [line["tools"] is None for line in written] == [False, True]
    known = {first.number: _turn_of(written[0], {})}
    assert _turn_of(written[1], known).tools == first.tools == second.tools
