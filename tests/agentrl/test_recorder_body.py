"""Bodies of requests are read fast, and as slowly read ones are."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recording import policy_for_tests, served

from agentrl.recorder.body import bytes_of_value, read_body, value_of_bytes
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
    assert repr(value_of_bytes(bytes_of_value(first))) == repr(first)
    assert (bytes_of_value(first) == bytes_of_value(second)) == (repr(first) == repr(second))


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
