"""Databases that agent frameworks wrote: openai-agents 0.24.0 (``SQLiteSession``, ``AdvancedSQLiteSession``), and
LangGraph 1.2.24 with langgraph-checkpoint-sqlite 3.1.2, whose models answered by rote."""

import json
import pickle
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from format_files import shape

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import NOT_TRAINED, Termination, Trajectory

WRITTEN = Path(__file__).parent / "sessions/frameworks"


def read(path: Path, quarantine: bool = False) -> tuple[list[Trajectory], Notes]:
    notes = Notes(quarantine)
    source = Source(path, notes)
    name = detect(source)
    assert name
    return list(FORMATS[name].read(source)), notes


def changed(tmp_path: Path, name: str, *statements: tuple[str, tuple[Any, ...]]) -> Path:
    path = tmp_path / name
    shutil.copy(WRITTEN / name, path)
    with closing(sqlite3.connect(path)) as database, database:
        for statement, values in statements:
            database.execute(statement, values)
    return path


def test_sessions_of_the_openai_agents_sdk() -> None:
    (first, second), notes = read(WRITTEN / "agents.db")
    assert shape(first) == [
        ("user", "where are Ann and Bob?"),
        ("assistant", 'find{"who": "Ann"} find{"who": "Bob"}'),
        ("tool", "Rome"),
        ("tool", "An error occurred while running the tool. Please try again."),
        ("assistant", "Ann is in Rome."),
        ("user", "thanks"),
        ("assistant", "You are welcome."),
    ]
    assert first.messages[1].reasoning == "I look them up."
    assert (first.episode_id, second.episode_id, second.source_id) == ("first", "second", "second")
    assert first.source_time is not None
    assert notes.ignored == {"items.id": 4, "items.status": 3}


def test_branches_of_a_session_are_rows_with_their_usage() -> None:
    (main, other), _ = read(WRITTEN / "branches.db")
    assert (main.episode_id, main.segment, other.segment) == ("branched", 0, 1)
    assert shape(main) == [("user", "count"), ("assistant", "one"), ("user", "go on"), ("assistant", "two")]
    assert shape(other)[2:] == [("user", "go on, please"), ("assistant", "three")]
    assert other.tags == ["branch:other"]
    assert [(row.prompt_tokens, row.completion_tokens) for row in (main, other)] == [(60, 8), (30, 4)]


def test_checkpoints_of_langgraph() -> None:
    rows, notes = read(WRITTEN / "graph.db")
    by_name = {row.trajectory_id: row for row in rows}
    assert sorted(by_name) == ["failed-0", "forked-0", "forked-1", "summarised-0", "summarised-1", "tools-0"]
    tools = by_name["tools-0"]
    assert shape(tools)[:3] == [
        ("user", "where are Ann and Bob?"),
        ("assistant", 'find{"who": "Ann"} find{"who": "Bob"}'),
        ("tool", "Rome"),
    ]
    assert (tools.n_tool_errors, tools.model, tools.prompt_tokens, tools.completion_tokens) == (1, "m-1", 60, 8)
    assert by_name["failed-0"].termination is Termination.ENV_ERROR
    assert shape(by_name["forked-0"])[-1] == ("assistant", "other two")
    assert by_name["forked-1"].tags == ["rewound", NOT_TRAINED]
    assert (by_name["forked-0"].prompt_tokens, by_name["forked-1"].prompt_tokens) == (60, 30), "shared calls count once"
    before, after = by_name["summarised-0"], by_name["summarised-1"]
    assert (before.episode_id, before.segment, after.segment) == ("summarised", 0, 1)
    assert shape(after) == [("user", "Summary: They counted."), ("user", "go on"), ("assistant", "second answer")]
    assert notes.ignored == {"channel_values.notes": 5}


def test_a_subgraph_with_messages_of_its_own_is_a_row_with_a_parent(tmp_path: Path) -> None:
    """The messages of LangGraph's subgraph are renamed here, as in a graph that shares none of them."""
    with closing(sqlite3.connect(WRITTEN / "graph.db")) as database:
        query = "select checkpoint_ns, checkpoint_id, checkpoint from checkpoints where checkpoint_ns <> ''"
        own = [
            (data.replace(b"I ask my helper.", b"I am the helper."), ns, name)
            for ns, name, data in database.execute(query)
        ]
    statement = "update checkpoints set checkpoint = ? where checkpoint_ns = ? and checkpoint_id = ?"
    rows, _ = read(changed(tmp_path, "graph.db", *((statement, values) for values in own)))
    [helper] = [row for row in rows if "kind:subagent" in row.tags]
    assert (helper.agent, helper.parent_id, helper.episode_id) == ("helper", "failed-0", "failed")


def test_a_folder_of_databases_is_imported_once(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN, tmp_path / "logs")
    with closing(sqlite3.connect(tmp_path / "logs/other.db")) as database, database:
        database.execute("create table notes (text)")
    buffer = TrajectoryBuffer(tmp_path / "store")
    result = import_paths(buffer, [tmp_path / "logs"])
    assert (result.rows, len(result.files), len(result.skipped)) == (10, 3, 1)
    with closing(sqlite3.connect(tmp_path / "logs/agents.db")) as database:
        database.execute("vacuum")  # other bytes, the same rows
    assert import_paths(buffer, [tmp_path / "logs"]).rows == 0


def test_what_is_in_a_write_ahead_log_is_read(tmp_path: Path) -> None:
    path = changed(tmp_path, "agents.db", ("delete from agent_messages where session_id = 'second'", ()))
    with closing(sqlite3.connect(path)) as database:
        database.execute("pragma journal_mode = wal")
        item = json.dumps({"role": "assistant", "content": "more", "type": "message"})
        database.execute("insert into agent_messages (session_id, message_data) values ('first', ?)", (item,))
        database.commit()
        assert shape(read(path)[0][0])[-1] == ("assistant", "more")


@pytest.mark.parametrize(
    ("name", "statement", "values", "reason"),
    [
        ("agents.db", "update agent_messages set message_data = ? where id = 1", ("{",), "is not JSON|Expecting"),
        ("agents.db", "update agent_messages set message_data = ? where id = 1", ('{"__enc__": 1}',), "is encrypted"),
        ("agents.db", "update agent_messages set message_data = ? where id = 1", ("[3]",), "list"),
        ("graph.db", "update checkpoints set type = ?", ("pickle",), "'pickle' is read by Python alone"),
        ("graph.db", "update checkpoints set checkpoint = ?", (b"\xc1",), "."),
        ("graph.db", "update checkpoints set checkpoint = ?", (msgpack.packb({"v": 1}),), "lacks 'channel_values'"),
        (
            "graph.db",
            "update checkpoints set checkpoint = ?",
            (msgpack.packb({"channel_values": {"messages": msgpack.ExtType(7, msgpack.packb([1]))}}),),
            "msgpack's type 7 is not known here",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(
    tmp_path: Path, name: str, statement: str, values: tuple[Any, ...], reason: str
) -> None:
    path = changed(tmp_path, name, (statement, values))
    with pytest.raises(StoreError, match=rf"{name}\[\d+\]: .*({reason})"):
        read(path)
    _, notes = read(path, quarantine=True)
    assert notes.unreadable


def test_names_of_classes_are_not_imported(tmp_path: Path) -> None:
    """A checkpoint may name any class; of a value that names one only the fields are read."""

    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was run",)

    message = msgpack.ExtType(5, msgpack.packb(["os", "system", {"type": "ai", "content": "hi"}, "model_validate"]))
    bad = msgpack.ExtType(0, msgpack.packb(["pickle", "loads", pickle.dumps(Bad())]))
    data = msgpack.packb({"channel_values": {"messages": [message], "other": bad}})
    path = changed(tmp_path, "graph.db", ("update checkpoints set checkpoint = ?", (data,)))
    rows, _ = read(path)
    assert {shape(row)[0] for row in rows} == {("assistant", "hi")}


def test_a_broken_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agents.db"
    path.write_bytes((WRITTEN / "agents.db").read_bytes()[:6000])
    with pytest.raises(StoreError, match=r"agents\.db"):
        import_paths(TrajectoryBuffer(tmp_path / "store"), [path])
