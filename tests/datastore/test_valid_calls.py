"""The rule ``valid_calls``: JSON Schema, and schemas of others that cannot be used."""

import json
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Rules
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

PARAMETERS = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "minLength": 1},
        "n": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
        "inner": {"$ref": "#/$defs/inner"},
        "many": {"type": "array", "items": {"type": "number"}},
        "maybe": {"type": ["string", "null"]},
    },
    "required": ["who"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "required": ["x"]}},
}


def calling(
    number: int, *arguments: Any, parameters: Any = PARAMETERS, name: str = "find", **fields: Any
) -> Trajectory:
    calls = [ToolCall(id=str(n), name=name, arguments=json.dumps(given)) for n, given in enumerate(arguments)]
    tools = json.dumps([{"type": "function", "function": {"name": "find", "parameters": parameters}}])
    values: dict[str, Any] = {
        "messages": [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, tool_calls=calls)],
        "tools": tools,
    }
    return build(number, input_ids=[], action_mask=[], logprobs=[], **values | fields)


def left(folder: Path, rows: list[Trajectory], **rule: Any) -> list[int]:
    buffer = TrajectoryBuffer(folder)
    buffer.append(rows, stage="rollout", fingerprint="f")
    rules = Rules.model_validate({"rules": [{"rule": "valid_calls"} | rule]}).rules
    return [int(name[-6:]) for name in curate(buffer, rules).ids.to_pylist()]


GOOD = [
    [{"who": "Ann"}],
    [{"who": "Ann", "n": 1.0, "kind": "b", "inner": {"x": 1, "y": 2}, "many": [1, 2.5], "maybe": None}],
    [{"who": "Ann"}, {"who": "Bob", "n": 2}],
    [],
]
BAD = [
    [{}],
    [{"who": ""}],
    [{"who": 1}],
    [{"who": "Ann", "n": True}],
    [{"who": "Ann", "n": "1"}],
    [{"who": "Ann", "kind": "c"}],
    [{"who": "Ann", "inner": {}}],
    [{"who": "Ann", "many": [1, "2"]}],
    [{"who": "Ann", "more": 1}],
    [{"who": "Ann"}, {"who": 2}],
    ["{'who': 'Ann'}"],
    [["Ann"]],
    [None],
]


def test_arguments_fit_the_schema_of_their_tool(tmp_path: Path) -> None:
    rows = [calling(number, *arguments) for number, arguments in enumerate([*GOOD, *BAD])]
    assert left(tmp_path / "1", rows) == list(range(len(GOOD)))
    assert left(tmp_path / "2", rows, undeclared="keep") == list(range(len(GOOD)))


def test_tools_that_a_row_does_not_declare(tmp_path: Path) -> None:
    rows = [
        calling(0, {"x": 1}, name="search"),
        calling(1, {"x": 1}, tools="[]"),
        calling(2, "x", tools="[]"),
        calling(3, {"x": 1}, tools='{"no": "list"}'),
        calling(4, {"x": 1}, tools='[1, {"function": 2}, {"function": {"name": 3}}]'),
    ]
    assert left(tmp_path / "1", rows) == []
    assert left(tmp_path / "2", rows, undeclared="keep") == [0, 1, 3, 4]


@pytest.mark.parametrize("key", ["parameters", "input_schema", "inputSchema"])
def test_schemas_stand_where_openai_anthropic_and_mcp_write_them(tmp_path: Path, key: str) -> None:
    tools = json.dumps([{"name": "find", key: PARAMETERS}])
    assert left(tmp_path, [calling(0, {"who": "Ann"}, tools=tools), calling(1, {"n": 1}, tools=tools)]) == [0]


UNUSABLE = [
    {"type": "dict"},
    {"properties": {"who": {"type": "float"}}},
    {"properties": {"who": {"pattern": "("}}},
    {"$ref": "#"},
    {"$ref": "#/$defs/none"},
    {"properties": {"who": {"$ref": "file:///etc/passwd"}}},
    {"properties": {"who": {"$ref": "http://127.0.0.1:9/schema"}}},
    {"properties": {"who": {"pattern": "(?=A)A"}}},
    {"patternProperties": {"^(w+)+$": {}}},
    {"$schema": 5},
    {"$schema": []},
    [],
    3,
]


@pytest.mark.parametrize("parameters", UNUSABLE, ids=json.dumps)
def test_schemas_that_cannot_be_used_are_said_and_nothing_is_fetched(
    tmp_path: Path, parameters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("a schema was fetched")

    monkeypatch.setattr(urllib.request, "urlopen", fetch)
    rows = [calling(0, {"who": "Ann"}, parameters=parameters), calling(1, {"who": "Ann"})]
    for undeclared, expected in (("drop", [1]), ("keep", [0, 1])):
        with pytest.warns(UserWarning, match=r"valid_calls: 1 rows call tools whose schema cannot be used.*: find: "):
            assert left(tmp_path / undeclared, rows, undeclared=undeclared) == expected


def test_patterns_match_in_linear_time(tmp_path: Path) -> None:
    schema = {"properties": {"who": {"pattern": "^(a+)+$"}}}
    rows = [calling(number, {"who": "a" * 60 + end}, parameters=schema) for number, end in enumerate(["", "!"])]
    rows.append(calling(2, {"who": 1}, parameters=schema))  # which a pattern says nothing of
    assert left(tmp_path, rows) == [0, 2]


def test_no_schema_asks_for_an_object_alone(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert left(tmp_path, [calling(0, {"x": 1}, parameters=None), calling(1, 3, parameters=None)]) == [0]
