"""The view of calls: arguments by key, which of them failed, and what answers them."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.read import sql
from agentrl.datastore.read.views import views
from agentrl.datastore.table.validation import LENIENT_SCHEMA
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory


def row(number: int, n_tool_errors: int, *turns: list[tuple[Any, str | None]], same: bool = False) -> Trajectory:
    """Turns of calls: the arguments of each, and what answers it. ``same`` gives all calls one id."""
    messages = [Message(role=Role.USER, content="q")]
    for turn in turns:
        names = ["same" if same else f"c{position}" for position in range(len(turn))]
        given = [json.dumps(arguments) for arguments, _ in turn]
        calls = [ToolCall(id=name, name="find", arguments=row) for name, row in zip(names, given, strict=True)]
        messages.append(Message(role=Role.ASSISTANT, tool_calls=calls))
        for name, (_, text) in zip(names, turn, strict=True):
            messages += [Message(role=Role.TOOL, content=text, tool_call_id=name)] if text is not None else []
    counts = {"messages": messages, "n_tool_errors": n_tool_errors}
    return build(number, input_ids=[], action_mask=[], logprobs=[], **counts)


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    rows = [
        row(0, 1, [({"who": "Ann", "n": 3}, "Bob"), ({"who": "Zed"}, "Error: nobody")], [({"who": "Bob"}, "Cid")]),
        row(1, 2, [({"who": None, "x": {"y": [1, 2.5]}}, "unknown"), ([1], "unknown")]),
        row(2, 1, [({"who": "Eve"}, "unknown"), ({"who": "Ann"}, "Bob")]),
        row(3, 0, [({"who": "Ann"}, "Bob"), ({}, None)], [("text", "")]),
        row(4, 1, [({"who": "a"}, '{"error": 4}'), ({"who": "b"}, "  Traceback (most recent"), ({"who": "c"}, "ok")]),
        row(5, 0, [({"who": "first"}, "1"), ({"who": "second"}, "22"), ({"who": "third"}, None)], same=True),
    ]
    made = TrajectoryBuffer(tmp_path / "store")
    made.append(rows, stage="rollout", fingerprint="f")
    return made


def ids(row: Any) -> list[int]:
    return [int(name[-6:]) for name in row["trajectory_id"]]


def test_which_call_failed(buffer: TrajectoryBuffer) -> None:
    table = buffer.sql("select * from tool_calls order by trajectory_id, step, call")
    errors = dict.fromkeys(ids(table), ())
    for number, error in zip(ids(table), table["error"], strict=True):
        errors[number] += (error,)
    assert errors == {
        0: (False, True, False),
        1: (True, True),  # all failed
        2: (None, None),  # one of them did, and no word says which
        3: (False, None, False),  # nothing answers the second one
        4: (None, None, None),  # words say two, the row counts one
        5: (False, False, None),
    }
    failed = buffer.sql(
        "select trajectory_id, step, call, args.who from tool_calls where error and args.who is not null"
    )
    assert failed.rows() == [(table["trajectory_id"][1], 0, 1, "Zed")]


def test_seconds_of_calls_and_of_turns(tmp_path: Path) -> None:
    buffer, seconds = TrajectoryBuffer(tmp_path), [None, 1.5, 0.25, None]
    buffer.append([build(0), build(1, message_seconds=seconds)], stage="rollout", fingerprint="f")
    calls = buffer.sql("select seconds from tool_calls order by trajectory_id")
    assert calls["seconds"].to_list() == [None, 0.25]
    assert buffer.sql("select seconds from steps order by trajectory_id, step")["seconds"].to_list() == [
        *[None, None],
        *[1.5, None],
    ]


def test_answers_and_their_lengths(buffer: TrajectoryBuffer) -> None:
    table = buffer.sql(
        "select trajectory_id, call, observation, observation_length as n from tool_calls order by 1, step, 2"
    )
    assert [row[1:] for row in table.rows() if row[0].endswith("5")] == [(0, "1", 1), (1, "22", 2), (2, None, None)]
    assert [row[1:] for row in table.rows() if row[0].endswith("3")] == [(0, "Bob", 3), (1, None, None), (0, "", 0)]


KEYED = [
    ("select args.who from tool_calls where step = 0 and call = 0", ["Ann", None, "Eve", "Ann", "a", "first"]),
    ("select c.args.who from tool_calls c where c.args.n = '3'", ["Ann"]),
    ("select args ->> 'who' from tool_calls where (args ->> 'n') = '3'", ["Ann"]),
    ('select args."x" from tool_calls where args.x is not null', ['{"y":[1,2.5]}']),
    ('select args."$.x.y[1]" from tool_calls where args.x is not null', ["2.5"]),
    ("select cast(args.n as int) + 1 as m from tool_calls where args.n is not null", [4]),
    ("with c as (select args, step from tool_calls) select args.who from c where step = 1", ["Bob", None]),
    ("select args.who from tool_calls where args.who < 'C' group by args.who order by args.who", ["Ann", "Bob"]),
    ("select name from tool_calls where args.`who` = 'Zed'", ["find"]),
]


@pytest.mark.parametrize(("query", "expected"), KEYED, ids=[query for query, _ in KEYED])
def test_arguments_are_reached_by_key(buffer: TrajectoryBuffer, query: str, expected: list[Any]) -> None:
    assert buffer.sql(query).to_series().to_list() == expected


def test_a_success_rate_by_an_argument(buffer: TrajectoryBuffer) -> None:
    query = (
        "select args.who, count(*) as n, avg(success) as rate from tool_calls where args.who = 'Ann' group by args.who"
    )
    assert buffer.sql(query).rows() == [("Ann", 3, pytest.approx(1 / 3))]


def test_without_a_key_there_are_the_arguments_alone(buffer: TrajectoryBuffer) -> None:
    assert "args" not in buffer.sql("select * from tool_calls").columns
    with pytest.raises(StoreError, match="name a key of the arguments, as in args"):
        buffer.sql("select args from tool_calls")
    with pytest.raises(StoreError, match="it is a column of trajectories"):
        buffer.sql("select n_tool_errors from tool_calls")
    with pytest.raises(StoreError, match="has a backslash or both kinds"):
        buffer.sql('select args."a\\b" from tool_calls')
    with pytest.raises(StoreError, match="JSON path"):
        buffer.sql('select args."$[" from tool_calls')


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_characters="\\", exclude_categories=("Cs",)), min_size=1, max_size=6))
@example("a'b")
@example('a"b')
@example("a.b")
@example("$")
@example(" ")
def test_any_key_without_a_backslash_is_reached(key: str) -> None:
    assume(not key.startswith(("$.", "$[")) and not {"'", '"'} <= set(key))
    messages = row(0, 0, [({key: "yes", "other": 1}, "ok")]).model_dump()["messages"]
    table = pa.Table.from_pylist([dict.fromkeys(LENIENT_SCHEMA.names) | {"messages": messages}], LENIENT_SCHEMA)
    query = """select args."{}" from tool_calls""".format(key.replace('"', '""'))
    assert sql.collect(views(pl.DataFrame(table).lazy(), query), query).rows() == [("yes",)]
