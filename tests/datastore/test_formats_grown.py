"""Sessions that have grown since they were imported."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.formats import grown
from agentrl.datastore.formats.imported import Imported
from agentrl.datastore.formats.imports import Labels, import_paths
from agentrl.schemas.annotation import Annotation

CLAUDE = Path(__file__).parent / "sessions/claude/projects/-tmp-agent-files-work"
AGENTS_DATABASE = Path(__file__).parent / "sessions/frameworks/agents.db"
AGENTS = next(path.with_suffix(".jsonl") for path in CLAUDE.iterdir() if path.is_dir())
QUERY = (
    "select trajectory_id, episode_id, parent_id, agent, segment, n_steps, tags from trajectories order by episode_id, "
    "segment, trajectory_id"
)


def line(number: int, kind: str, content: str, parent: int | None = None) -> str:
    message = {"role": kind, "content": content, **({"id": f"m{number}"} if kind == "assistant" else {})}
    above = number - 1 if parent is None else parent
    record = {"type": kind, "sessionId": "s", "uuid": str(number), "message": message}
    return json.dumps({**record, "parentUuid": str(above) if above else None}) + "\n"


def rows(buffer: TrajectoryBuffer) -> list[tuple[object, ...]]:
    """What the buffer holds, without the names of imports."""
    frame = buffer.sql(QUERY)
    order = {name: number for number, name in enumerate(frame["trajectory_id"])}
    return [
        (episode.partition("@")[0], order.get(parent), agent, segment, steps, tuple(tags))
        for _, episode, parent, agent, segment, steps, tags in frame.iter_rows()
    ]


def test_a_session_in_parts_is_the_session_as_a_whole(tmp_path: Path) -> None:
    """A real session with two sub-agents is imported as it grows, line by line."""
    whole, parts = TrajectoryBuffer(tmp_path / "whole"), TrajectoryBuffer(tmp_path / "parts")
    import_paths(whole, [AGENTS])
    file = tmp_path / "logs" / AGENTS.name
    file.parent.mkdir()
    lines = AGENTS.read_text().splitlines(keepends=True)
    answers = [number for number, text in enumerate(lines, 1) if '"type":"assistant"' in text.replace(" ", "")]
    ends = sorted({answers[0], answers[len(answers) // 2], answers[-1], len(lines)})
    for number, end in enumerate(ends):
        file.write_text("".join(lines[:end]))
        if number == 1:
            shutil.copytree(AGENTS.with_suffix(""), file.with_suffix(""))
        import_paths(parts, [file.parent])
        assert import_paths(parts, [file.parent]).rows == 0
    assert rows(parts) == rows(whole)
    assert parts.sql("select count(distinct episode_id) as n from trajectories")["n"][0] == 1


def grow(buffer: TrajectoryBuffer, file: Path, *lines: str, **labels: str) -> Imported:
    with file.open("a") as more:
        more.write("".join(lines))
    return import_paths(buffer, [file], labels=Labels(**labels))


TALK = (line(1, "user", "count"), line(2, "assistant", "one"), line(3, "user", "go on"), line(4, "assistant", "two"))


def test_only_what_is_new_comes_in(tmp_path: Path) -> None:
    buffer, file = TrajectoryBuffer(tmp_path / "store"), tmp_path / "s.jsonl"
    assert grow(buffer, file, *TALK[:2]).rows == 1
    result = grow(buffer, file, *TALK[2:])
    assert (result.rows, result.present, result.superseded) == (1, 0, 1)
    assert rows(buffer) == [("s", None, "main", 0, 2, ())]
    [name] = buffer.sql("select trajectory_id from trajectories")["trajectory_id"]
    result = grow(buffer, file, json.dumps({"type": "last-prompt", "sessionId": "s"}) + "\n")
    assert (result.rows, result.present, result.superseded) == (0, 1, 0)
    assert buffer.sql("select trajectory_id from trajectories")["trajectory_id"].to_list() == [name]
    other = grow(buffer, file, line(5, "user", "bye"), env="mine")
    assert (other.rows, other.superseded) == (1, 0), "other labels are another import"


def test_sessions_whose_ids_users_chose_are_known_by_their_files_too(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    for name in ("shop.db", "zoo.db"):  # both have sessions of the same names, of which those of the shop went on
        shutil.copy(AGENTS_DATABASE, tmp_path / name)
    with closing(sqlite3.connect(tmp_path / "zoo.db")) as database, database:
        newest = "select max(id) from agent_messages where session_id = 'first'"
        database.execute(f"delete from agent_messages where id = ({newest})")
    brought = [import_paths(buffer, [tmp_path / name]) for name in ("zoo.db", "shop.db", "shop.db")]
    assert [(result.rows, result.superseded) for result in brought] == [(2, 0), (2, 0), (0, 0)]


def test_a_branch_that_is_left_later_is_not_trained_on_any_more(tmp_path: Path) -> None:
    buffer, file = TrajectoryBuffer(tmp_path / "store"), tmp_path / "s.jsonl"
    grow(buffer, file, *TALK)
    result = grow(buffer, file, line(5, "user", "better", parent=2), line(6, "assistant", "three"))
    assert (result.rows, result.superseded) == (2, 1)
    assert sorted(tags for *_, tags in rows(buffer)) == [(), ("rewound", "not-trained")]


def test_a_row_that_somebody_annotated_stays(tmp_path: Path) -> None:
    buffer, file = TrajectoryBuffer(tmp_path / "store"), tmp_path / "s.jsonl"
    grow(buffer, file, *TALK[:2])
    [name] = buffer.sql("select trajectory_id from trajectories")["trajectory_id"]
    buffer.annotations.append([Annotation(trajectory_id=name, name="good", value="yes", author="ann")])
    result = grow(buffer, file, *TALK[2:])
    assert (result.rows, result.superseded, len(rows(buffer))) == (1, 0, 2)
    assert result.remarks == {"earlier states of sessions that stay, since a stage or an annotation names them": 1}


def test_an_import_that_is_killed_before_it_removes_is_ended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, file = TrajectoryBuffer(tmp_path / "store"), tmp_path / "s.jsonl"
    grow(buffer, file, *TALK[:2])
    with monkeypatch.context() as patched:
        patched.setattr("agentrl.datastore.formats.imports.remove_superseded", lambda buffer: (0, 0))
        grow(buffer, file, *TALK[2:])
    assert len(rows(buffer)) == 2
    assert import_paths(buffer, [file]).rows == 0
    assert rows(buffer) == [("s", None, "main", 0, 2, ())]


@pytest.mark.parametrize(
    ("now", "goes_on"), [("I look.", True), ("I look. More", True), ("You look.", False), ("I", False)]
)
def test_the_last_message_may_have_been_cut(now: str, goes_on: bool) -> None:
    empty = {"reasoning": None, "tool_calls": [], "tool_call_id": None}
    first = {"role": "user", "content": "hi", **empty}
    before, after = ({"role": "assistant", "content": text, **empty} for text in ("I look.", now))
    assert grown.goes_on([first, after], [first, before]) is goes_on
