"""Which calls of a row failed: as environments, files and clients say it, and as tables and exports keep it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from format_rows import KINDS
from real_rows import ENVIRONMENTS, played
from store_rows import build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Source
from agentrl.datastore.table.row_digests import contents
from agentrl.datastore.upkeep.migration import migrate
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, Role, Trajectory

USER = {"role": "user", "content": "where is Ann?"}
CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "find", "arguments": "{}"}} for n in range(3)]


def errors(row: Trajectory) -> list[bool | None]:
    return [message.error for message in row.messages if message.role is Role.TOOL]


def digest(row: Trajectory) -> str:
    [content] = contents(to_table([row], TRAJECTORY_SCHEMA)).to_pylist()
    return str(content.hex())


def imported(record: Any, tmp_path: Path, suffix: str = ".jsonl") -> tuple[str, list[Trajectory]]:
    path = tmp_path / f"given{suffix}"
    path.write_text(json.dumps(record) + "\n")
    name = detect(Source(path))
    assert name is not None
    return name, list(FORMATS[name].read(Source(path, Notes())))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_our_environments_say_of_every_call_whether_it_failed(name: str, tmp_path: Path) -> None:
    rows = played(name)
    for row in rows:
        assert None not in errors(row)
        assert sum(map(bool, errors(row))) == row.n_tool_errors
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append(rows, stage="s", fingerprint="f")
    assert [errors(buffer.get(row.trajectory_id)) for row in rows] == [errors(row) for row in rows]
    query = "select error from tool_calls where observation is not null order by trajectory_id, step, call"
    told = buffer.sql(query)["error"].to_list()
    assert told == [error for row in sorted(rows, key=lambda row: row.trajectory_id) for error in errors(row)]
    if name == "lookup":
        assert set(told) == {True, False}


def blocks(*results: dict[str, Any]) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": f"c{n}", "name": "find", "input": {}} for n in range(len(results))]
    answers = [{"type": "tool_result", "tool_use_id": f"c{n}", **result} for n, result in enumerate(results)]
    return {"messages": [USER, {"role": "assistant", "content": calls}, {"role": "user", "content": answers}]}


def test_an_anthropic_file_with_is_error(tmp_path: Path) -> None:
    record = blocks(
        {"content": "nobody of this name", "is_error": True},
        {"content": "Error: is the title of her book", "is_error": False},
        {"content": "Rome"},
    )
    name, [row] = imported(record, tmp_path)
    assert (name, errors(row), row.n_tool_errors) == ("anthropic", [True, False, None], 1)
    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([row], stage="s", fingerprint="f")
    query = "select error from tool_calls order by call"
    assert buffer.sql(query)["error"].to_list() == [True, False, False]  # the row counts one
    write = FORMATS["anthropic"].write
    assert write is not None
    write([row], tmp_path / "out.jsonl")
    answers = json.loads((tmp_path / "out.jsonl").read_text())["messages"][2]["content"]
    assert [answer.get("is_error") for answer in answers] == [True, False, None]
    [again] = FORMATS["anthropic"].read(Source(tmp_path / "out.jsonl", Notes()))
    assert (errors(again), again.n_tool_errors) == (errors(row), 1)


def chat_with(*answers: dict[str, Any]) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": "", "tool_calls": CALLS[: len(answers)]}
    told = [{"role": "tool", "content": "Ann", "tool_call_id": f"c{n}", **answer} for n, answer in enumerate(answers)]
    return [USER, message, *told]


INSPECTED = [{"id": f"c{n}", "function": "find", "arguments": {}} for n in range(2)]
EVENT = {"source": "agent", "tool_name": "find"}
SEEN = EVENT | {"kind": "ObservationEvent"}
SOURCES: dict[str, tuple[str, Any, list[bool | None]]] = {
    "openai-chat": (
        ".jsonl",
        {"messages": chat_with({"is_error": True}, {"status": "success"}, {"error": "text says nothing here"})},
        [True, False, None],
    ),
    "tau2": (
        ".json",
        {
            "info": {"environment_info": {}},
            "tasks": [],
            "simulations": [
                {
                    "id": "a",
                    "task_id": "1",
                    "messages": [
                        USER,
                        {"role": "assistant", "tool_calls": [{"id": "c0", "name": "f", "arguments": {}}]},
                        {"role": "tool", "id": "c0", "content": "x", "error": True},
                        {"role": "assistant", "tool_calls": [{"id": "c1", "name": "f", "arguments": {}}]},
                        {"role": "tool", "id": "c1", "content": "x", "error": False},
                    ],
                }
            ],
        },
        [True, False],
    ),
    "inspect": (
        ".json",
        {
            "version": 2,
            "status": "success",
            "eval": {"task": "t", "model": "m"},
            "samples": [
                {
                    "id": "a",
                    "epoch": 1,
                    "input": "x",
                    "messages": [
                        USER,
                        {"role": "assistant", "content": "", "tool_calls": INSPECTED},
                        {"role": "tool", "content": "", "tool_call_id": "c0", "function": "find"}
                        | {"error": {"type": "timeout", "message": "too late"}},
                        {"role": "tool", "content": "Rome", "tool_call_id": "c1", "function": "find"},
                    ],
                }
            ],
        },
        [True, False],
    ),
    "openhands": (
        ".json",
        [
            {"kind": "MessageEvent", "source": "user", "llm_message": USER},
            *[
                {"kind": "ActionEvent", "tool_call_id": f"c{n}", "action": {}, "llm_response_id": "r"} | EVENT
                for n in range(4)
            ],
            {"kind": "ObservationEvent", "tool_call_id": "c0", "observation": {"content": "x", "is_error": True}}
            | EVENT,
            {"kind": "ObservationEvent", "tool_call_id": "c1", "observation": {"content": "x", "is_error": False}}
            | EVENT,
            {"kind": "AgentErrorEvent", "tool_call_id": "c2", "error": "no such tool"} | EVENT,
            {"kind": "ObservationEvent", "tool_call_id": "c3", "observation": {"content": "x"}} | EVENT,
        ],
        [True, False, True, None],
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_says_which_calls_failed(name: str, tmp_path: Path) -> None:
    suffix, record, expected = SOURCES[name]
    result, [row] = imported(record, tmp_path, suffix)
    assert (result, errors(row)) == (name, expected)
    assert row.n_tool_errors == expected.count(True)


def test_an_observation_of_kind_error_is_one(tmp_path: Path) -> None:
    history = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "x"}},
        {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls"}},
        {"id": 2, "cause": 1, "source": "agent", "observation": "error", "content": "x"},
        {"id": 3, "source": "agent", "action": "run", "args": {"command": "ls"}},
        {"id": 4, "cause": 3, "source": "agent", "observation": "run", "content": "x"},
    ]
    name, [row] = imported({"instance_id": "a", "history": history}, tmp_path)
    assert (name, errors(row), row.n_tool_errors) == ("openhands", [True, False], 1)


def test_what_is_no_tools_message_has_no_error(tmp_path: Path) -> None:
    path = tmp_path / "given.jsonl"
    message = {"role": "assistant", "content": "hm", "is_error": True}
    path.write_text(json.dumps({"messages": [USER, message]}) + "\n")
    source = Source(path, Notes())
    [row] = FORMATS["openai-chat"].read(source)
    assert [message.error for message in row.messages] == [None, None]
    assert source.notes.ignored["messages.is_error"] == 1


@pytest.mark.parametrize("name", ["verifiers", "verifiers-v1", "atif", "swe-agent", "tau2", "anthropic"])
def test_an_export_that_can_says_which_calls_failed(name: str, tmp_path: Path) -> None:
    [row] = KINDS["failed"]
    write = FORMATS[name].write
    assert write is not None
    path = tmp_path / f"out{FORMATS[name].suffix}"
    write([row], path)
    file = next(iter(path.iterdir())) if path.is_dir() else path
    [again] = FORMATS[name].read(Source(file, Notes()))
    assert errors(again) == errors(row) == [True, False]


OF_AN_ORIGIN = "a76387c36207abadc8be754a9cd7ad23"
"""The digest of ``build(1, model="m", cost_usd=0.5)`` before messages had ``error``."""


def test_a_row_that_does_not_know_it_has_the_digest_of_before() -> None:
    assert digest(build(1, model="m", cost_usd=0.5)) == OF_AN_ORIGIN


def test_which_call_failed_is_content() -> None:
    [row] = KINDS["failed"]
    first, second = (position for position, message in enumerate(row.messages) if message.role is Role.TOOL)
    result = {}
    for told in [(None, None), (True, None), (None, True), (False, None), (True, False), (False, True)]:
        messages = list(row.messages)
        for position, error in zip((first, second), told, strict=True):
            messages[position] = messages[position].model_copy(update={"error": error})
        result[told] = digest(row.model_copy(update={"messages": messages}))
    assert len(set(result.values())) == len(result)
    bare = build(3, messages=[Message(role=Role.USER, content="q")])
    table = to_table([bare, row, build(1), row], TRAJECTORY_SCHEMA)
    assert [content.hex() for content in contents(table.slice(1)).to_pylist()] == [
        digest(row),
        digest(build(1)),
        digest(row),
    ]
    assert contents(table).to_pylist()[0].hex() == digest(bare)


def test_rows_of_an_older_store_do_not_say_it_and_are_told_by_words(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "old_store_version_4", tmp_path, dirs_exist_ok=True)
    buffer = TrajectoryBuffer(tmp_path)
    ids = [build(number).trajectory_id for number in range(4)]
    rows, query = buffer.get_many(ids), "select * from tool_calls order by trajectory_id, step, call"
    before = buffer.sql(query)
    assert before.height == 4 * rows[0].n_tool_calls
    assert {message.error for row in rows for message in row.messages} == {None}
    migrate(buffer)
    assert buffer.sql(query).equals(before)
    assert [row.model_dump_json() for row in buffer.get_many(ids)] == [row.model_dump_json() for row in rows]
    [known] = KINDS["failed"]
    buffer.append([known], stage="s", fingerprint="f")
    query = f"select error from tool_calls where trajectory_id = '{known.trajectory_id}' order by call"
    assert buffer.sql(query)["error"].to_list() == [True, False]
