"""Sessions of agent programs: files that the programs themselves wrote when they ran before the recorder."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from format_files import Read, lines, shape
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS, detect
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.sessions.conversations import SessionLine, conversations
from agentrl.datastore.formats.source import Source
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

RECORDED = Path(__file__).parent / "sessions"
CLAUDE = RECORDED / "claude/projects/-tmp-agent-files-work"
AGENTS = next(path.with_suffix(".jsonl") for path in CLAUDE.iterdir() if path.is_dir())
FILES = [path for path in sorted(RECORDED.rglob("*.json*")) if "subagents" not in path.parts]


def read(path: Path) -> tuple[list[Trajectory], Notes]:
    notes = Notes()
    source = Source(path, notes)
    name = detect(source)
    assert name
    return list(FORMATS[name].read(source)), notes


def told(rows: list[Trajectory]) -> list[tuple[Any, ...]]:
    return [(row.agent, row.n_steps, row.n_tool_calls, row.termination, row.prompt_tokens) for row in rows]


def session(name: str) -> Path:
    """The session of Claude Code that printed a file."""
    first = json.loads((RECORDED / f"claude/printed/{name}.jsonl").read_text().splitlines()[0])
    return CLAUDE / f"{first['session_id']}.jsonl"


HELPER = ("general-purpose", 2, 1, "answered", 16104)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("parallel", [("main", 2, 3, "answered", 23330)]),
        ("turns", [("main", 2, 2, "max_steps", 23129)]),
        ("agents", [("main", 2, 2, "answered", 23712), HELPER, HELPER]),
        ("compacted", [("main", 5, 5, "unknown", 197635), ("main", 2, 1, "answered", 22554)]),
    ],
)
def test_a_session_of_claude_code_has_the_turns_that_the_recorder_saw(name: str, wanted: list[Any]) -> None:
    rows, notes = read(session(name))
    assert told(rows) == wanted
    assert not notes.remarks
    assert all(row.model == "tiny" and row.source_time and row.episode_id == session(name).stem for row in rows)
    printed, notes = read(RECORDED / f"claude/printed/{name}.jsonl")
    assert [row.n_tool_calls for row in printed] == [row.n_tool_calls for row in rows]
    assert printed[0].termination == rows[0].termination
    assert printed[0].prompt_tokens == sum(row.prompt_tokens or 0 for row in rows if row.agent == "main")
    assert printed[0].cost_usd
    assert notes.remarks["runs without their task, which is not printed"] == 1


def test_after_a_compaction_the_row_has_the_summary_and_what_was_kept() -> None:
    (before, after), _ = read(session("compacted"))
    assert after.messages[0].content.startswith("This session is being continued")
    assert after.messages[1:3] == before.messages[-2:]
    assert after.messages[3].content == "There are two files."


def test_sub_agents_are_rows_with_parents() -> None:
    (main, first, second), _ = read(AGENTS)
    assert (first.parent_id, second.parent_id) == (main.trajectory_id, main.trajectory_id)
    assert [row.messages[0].content[-1] for row in (first, second)] == ["1", "2"]
    assert [row.tags for row in (main, first)] == [[], ["kind:subagent"]]
    alone, notes = read(next(AGENTS.with_suffix("").rglob("*.jsonl")))
    assert (alone[0].agent, alone[0].parent_id, len(alone)) == ("general-purpose", None, 1)
    assert notes.remarks == {"sub-agents whose call is in no file of their session": 1}


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("codex/rollout-parallel.jsonl", [("main", 2, 3, "answered", 36243)]),
        ("codex/printed-parallel.jsonl", [("main", 3, 3, "answered", 36243)]),
        ("codex/rollout-compacted.jsonl", [("main", 1, 1, "unknown", 46102), ("main", 1, 0, "answered", 18227)]),
        ("codex/printed-compacted.jsonl", [("main", 2, 1, "answered", 64329)]),
        ("opencode/export.json", [("main", 2, 3, "answered", 17465)]),
        ("opencode/printed.jsonl", [("main", 2, 3, "answered", 17465)]),
    ],
)
def test_sessions_of_codex_and_opencode(path: str, wanted: list[Any]) -> None:
    rows, _ = read(RECORDED / path)
    assert told(rows) == wanted
    assert (NOT_TRAINED in rows[0].tags) == ("codex/printed" in path)


def test_a_rollout_has_instructions_and_what_a_compaction_made_of_the_conversation() -> None:
    (before, after), notes = read(RECORDED / "codex/rollout-compacted.jsonl")
    assert [before.messages[0].role, after.messages[0].content] == ["system", before.messages[0].content]
    assert [message.role for message in after.messages] == ["system", "system", "user", "user", "user", "assistant"]
    assert "files were counted" in after.messages[4].content
    assert notes.remarks == {"summaries before a compaction, whose prompt is not in the file, left out": 1}


def test_the_folder_of_projects_is_imported_as_it_is(tmp_path: Path) -> None:
    projects = tmp_path / "projects"
    shutil.copytree(CLAUDE.parent, projects)
    (projects / CLAUDE.name / "memory").mkdir()
    (projects / CLAUDE.name / "memory/MEMORY.md").write_text("# notes")
    (projects / CLAUDE.name / "sessions-index.json").write_text('{"version": 1, "entries": []}')
    buffer = TrajectoryBuffer(tmp_path / "store")
    result = import_paths(buffer, [projects])
    assert (result.rows, len(result.files), len(result.skipped)) == (7, 4, 4)
    assert result.remarks == {"files that are read with another file: sub-agents with their session": 2}
    rows = buffer.sql("select trajectory_id, parent_id, episode_id, segment from trajectories where agent != 'main'")
    mains = set(buffer.sql("select trajectory_id from trajectories where agent = 'main'")["trajectory_id"])
    assert set(rows["parent_id"]) <= mains
    assert rows["episode_id"].n_unique() == 1
    assert import_paths(buffer, [projects]).rows == 0
    [helper, _] = (projects / CLAUDE.name).rglob("agent-*.jsonl")
    helper.unlink()  # the session is another one now, whose rows are there
    again = import_paths(buffer, [projects], dry_run=True)
    assert (again.rows, again.present) == (0, 2)


def line(number: int, parent: int | None, kind: str, content: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": kind,
        "sessionId": "s",
        "uuid": str(number),
        "parentUuid": None if parent is None else str(parent),
        "message": {"role": kind, "content": content, **more},
    }


TALK = [
    line(1, None, "user", "count"),
    line(2, 1, "assistant", [{"type": "text", "text": "I"}], id="a"),
    line(3, 2, "assistant", [{"type": "text", "text": " do"}], id="a"),
    line(4, 3, "user", "again"),
    line(5, 4, "assistant", "2", id="b"),
]


@given(st.permutations(TALK[:-1]))
def test_lines_stand_anywhere(order: list[dict[str, Any]]) -> None:
    [talk] = conversations([SessionLine(number, item) for number, item in enumerate([*order, TALK[-1]], 1)])
    texts = [line.record["uuid"] for line in talk.lines]
    pieces = [item["uuid"] for item in order if item["uuid"] in "23"]
    assert texts == ["1", *pieces, "4", "5"]


def test_a_session_that_begins_with_something_else(tmp_path: Path) -> None:
    for first in ({"type": "last-prompt"}, {"type": "ai-title", "aiTitle": "x"}, {"type": "mode", "mode": "normal"}):
        records = [first | {"sessionId": "s"}, TALK[1], TALK[2], TALK[0], *TALK[3:]]
        read = Read(tmp_path, "claude-code", records, ".jsonl")
        texts = [("user", "count"), ("assistant", "I do"), ("user", "again"), ("assistant", "2")]
        assert shape(read.row) == texts


def test_a_branch_that_was_left_is_a_row_that_is_not_trained_on(tmp_path: Path) -> None:
    again = [line(6, 3, "user", "better"), line(7, 6, "assistant", "3", id="c")]
    read = Read(tmp_path, "claude-code", [*TALK, *again], ".jsonl")
    left, last = sorted(read.rows, key=lambda row: len(row.tags), reverse=True)
    assert left.tags == ["rewound", "not-trained"]
    assert [shape(row)[-2:] for row in (left, last)] == [
        [("user", "again"), ("assistant", "2")],
        [("user", "better"), ("assistant", "3")],
    ]
    stray = Read(tmp_path, "claude-code", [*TALK[:3], line(9, 1, "user", "no"), *TALK[3:]], ".jsonl")
    assert len(stray.rows) == 1
    assert stray.notes.remarks == {"messages of a branch that was left, without an answer": 1}


def test_what_the_program_says_for_the_model_is_not_the_models(tmp_path: Path) -> None:
    for text, end in (("Prompt is too long", "max_context"), ("API Error: 529", "infra_error")):
        error = line(6, 5, "assistant", [{"type": "text", "text": text}], model="<synthetic>")
        read = Read(tmp_path, "claude-code", [*TALK, error | {"isApiErrorMessage": True}], ".jsonl")
        assert (read.row.termination, shape(read.row)[-1]) == (end, ("assistant", "2"))
    stop = line(6, 5, "user", [{"type": "text", "text": "[Request interrupted by user]"}])
    assert Read(tmp_path, "claude-code", [*TALK, stop], ".jsonl").row.termination == "cancelled"


def test_gemini_replaces_patches_and_takes_back(tmp_path: Path) -> None:
    def said(number: int, text: str, **more: Any) -> dict[str, Any]:
        return {"id": f"{number}", "type": "gemini" if number % 2 else "user", "content": text, **more}

    call = {"id": "c", "name": "ls", "args": {}, "status": "error"}
    answer = {"functionResponse": {"id": "c", "name": "ls", "response": {"error": "none"}}}
    chat = [
        {"sessionId": "s", "projectHash": "p", "startTime": "2026-01-31T12:00:00Z"},
        {"$set": {"messages": [said(0, "count")]}},
        said(1, "", toolCalls=[call]),
        said(1, "", toolCalls=[call | {"result": [answer]}], tokens={"input": 3, "output": 1, "thoughts": 2}),
        {"id": "2", "type": "user", "content": [answer, {"inlineData": {}}]},
        said(3, "one", model="m"),
        said(4, "no"),
        {"$rewindTo": "4"},
    ]
    read = Read(tmp_path, "gemini-cli", chat, ".jsonl")
    assert shape(read.row) == [("user", "count"), ("assistant", "ls{}"), ("tool", "none"), ("assistant", "one")]
    assert (read.row.n_tool_errors, read.row.prompt_tokens, read.row.completion_tokens) == (1, 3, 3)
    assert read.notes.remarks == {"messages that were taken back": 1}
    assert read.notes.ignored["messages.content.inlineData"] == 1
    document = {"sessionId": "s", "projectHash": "p", "messages": [said(0, "count"), said(1, "one")]}
    assert shape(Read(tmp_path, "gemini-cli", document).row) == [("user", "count"), ("assistant", "one")]


def test_a_trace_of_langfuse_stands_beside_its_observations_and_scores(tmp_path: Path) -> None:
    generation = {"traceId": "t", "type": "GENERATION", "input": "hi", "output": "ho", "model": "m"}
    document = {
        "trace": {"id": "t", "name": "agent"},
        "observations": [generation],
        "scores": [{"name": "reward", "value": 1.0}],
    }
    read = Read(tmp_path, "otel", document)
    assert (read.row.source_id, shape(read.row)) == ("t", [("user", "hi"), ("assistant", "ho")])
    assert [(part.name, part.value) for part in read.row.reward_components] == [("reward", 1.0)]
    buffer = TrajectoryBuffer(tmp_path / "store")
    lines(tmp_path / "t.jsonl", document)
    assert import_paths(buffer, [tmp_path / "t.jsonl"]).rows == 1


JUNK = st.sampled_from([None, 3, "x", [], [3], {}, {"type": []}, True, [[]], {"id": {}}, -1.5])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(result for key, part in inside for result in places(part, (*path, key)))]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_mutilated_files_are_read_or_refused_by_their_place(path: Path, data: st.DataObject) -> None:
    """One value of one line is something else, or a line ends too early."""
    whole = path.suffix == ".json"
    records = (
        [json.loads(path.read_text())]
        if whole
        else [json.loads(character) for character in path.read_text().splitlines()]
    )
    number = data.draw(st.integers(0, len(records) - 1))
    way = data.draw(st.sampled_from(places(records[number])))
    odd = deepcopy(records[number])
    texts = [json.dumps(record) for record in records]
    if way:
        holder = odd
        for key in way[:-1]:
            holder = holder[key]
        holder[way[-1]] = data.draw(JUNK)
        texts[number] = json.dumps(odd)
    else:
        texts[number] = texts[number][: data.draw(st.integers(1, len(texts[number]) - 1))]
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"odd{path.suffix}"
        file.write_text("\n".join(texts) + "\n")
        buffer = TrajectoryBuffer(Path(folder) / "store")
        try:
            import_paths(buffer, [file], dry_run=True)
        except StoreError as error:
            assert "odd.json" in str(error)  # noqa: PT017
            try:
                import_paths(buffer, [file], dry_run=True, on_error="quarantine")
            except StoreError as second:
                assert whole or "gives no row" in str(second) or "nothing to import" in str(second)  # noqa: PT017
