"""A file's format is found by evidence over many records, a format that is named wins, and each record of a file of
several formats is read by its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from format_files import CALL, CHAT, USER, chat, count, lines
from format_samples import SAMPLES

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.imported import Imported
from agentrl.datastore.formats.imports import import_paths
from agentrl.datastore.formats.recognise import recognise
from agentrl.datastore.formats.source import SAMPLE_RECORDS, Source

USED = {"type": "tool_use", "id": "t1", "name": "find", "input": {"who": "Ann"}}
TOLD = {"type": "tool_result", "tool_use_id": "t1", "content": "in Rome"}
BLOCKS = {
    "messages": [
        USER,
        {"role": "assistant", "content": [USED]},
        {"role": "user", "content": [TOLD]},
        {"role": "assistant", "content": "In Rome."},
    ]
}
CALLED = {
    "messages": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "in Rome"},
    ]
}
TURNS = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    return TrajectoryBuffer(tmp_path / "store")


def imported(path: Path, format: str | None = None, **options: Any) -> Imported:
    return import_paths(TrajectoryBuffer(path.parent / "store"), [path], format, dry_run=True, **options)


@pytest.mark.parametrize("plain", [1, 5, SAMPLE_RECORDS - 1])
def test_an_anthropic_file_whose_first_records_have_no_block(plain: int, tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", *(chat(f"q{i}") for i in range(plain)), BLOCKS)
    result = imported(path)
    assert (result.files[0]["format"], result.rows, result.calls) == ("anthropic", plain + 1, 1)
    assert f"{plain + 1} of the first {plain + 1} records fit it" in result.files[0]["evidence"]


def test_a_block_after_the_first_records_is_no_text(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    records = [chat(f"q{i}") for i in range(SAMPLE_RECORDS + 3)]
    report = import_paths(buffer, [lines(tmp_path / "x.jsonl", *records, BLOCKS, CHAT)])
    assert report.files[0]["format"] == "openai-chat"
    assert "anthropic and trl-sft as well" in report.files[0]["evidence"]
    assert report.remarks == {"records read as anthropic in a file of openai-chat": 1}
    assert (report.rows, report.calls) == (len(records) + 2, 1)
    frame = buffer.sql("select source, n_tool_calls from trajectories order by trajectory_id")
    assert frame.rows()[-3:] == [("openai-chat", 0), ("anthropic", 1), ("openai-chat", 0)]


@pytest.mark.parametrize("system", ["be brief", [{"type": "text", "text": "be brief"}]])
def test_a_system_prompt_beside_the_messages_is_not_lost(system: Any, tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    report = import_paths(buffer, [lines(tmp_path / "x.jsonl", CHAT, CHAT | {"system": system})])
    assert (report.files[0]["format"], report.ignored) == ("anthropic", {})
    [row] = [
        row
        for row in buffer.get_many(buffer.sql("select trajectory_id from trajectories")["trajectory_id"].to_list())
        if len(row.messages) == 3
    ]
    assert row.messages[0].content == "be brief"


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_file_of_several_formats_is_read_record_by_record(suffix: str, tmp_path: Path) -> None:
    records = [CALLED, BLOCKS, TURNS, CALLED, BLOCKS, {"prompt": "a", "completion": "b"}]
    path = tmp_path / f"x{suffix}"
    path.write_text("".join(json.dumps(r) + "\n" for r in records) if suffix == ".jsonl" else json.dumps(records))
    result = imported(path)
    assert (result.rows, result.calls) == (6, 4)
    assert sum(count for text, count in result.remarks.items() if text.startswith("records read as")) == 4
    with pytest.raises(StoreError, match=r"\[2\]: lacks 'messages'|:3: lacks 'messages'"):
        imported(path, "openai-chat")


def test_a_record_that_fits_no_format_is_refused_by_its_place(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", CALLED, {"talk": []}, BLOCKS)
    with pytest.raises(StoreError, match=r"x\.jsonl:2: lacks 'messages'"):
        imported(path)
    result = imported(path, on_error="quarantine")
    assert (result.rows, [item["place"].rpartition(":")[2] for item in result.unreadable]) == (2, ["2"])


def test_a_format_that_is_named_wins(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = lines(tmp_path / "x.jsonl", CHAT, chat("and?"))
    report = import_paths(buffer, [path], "anthropic")
    assert (report.files[0]["format"], report.files[0]["evidence"], report.rows) == ("anthropic", "named", 2)
    assert buffer.sql("select distinct source from trajectories").item() == "anthropic"
    other = imported(lines(tmp_path / "y.jsonl", CALLED, BLOCKS), "openai-chat")
    assert (other.rows, other.calls) == (2, 1)
    assert other.ignored == {"messages.content.tool_use": 1, "messages.content.tool_result": 1}
    forced = imported(lines(tmp_path / "z.jsonl", BLOCKS), "openai-chat")
    assert forced.remarks == {"files that look like anthropic and are read as openai-chat, which is named": 1}


def test_no_format_that_is_named_gives_anything_but_rows_or_an_error_that_names_the_file(tmp_path: Path) -> None:
    paths = []
    for name, files in SAMPLES.items():
        suffix, document = files[0]
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(r) + "\n" for r in document) if suffix == ".jsonl" else json.dumps(document, indent=1)
        paths.append(tmp_path / name / f"file{suffix}")
        paths[-1].write_text(text)
    for path in paths:
        for name in FORMATS:
            try:
                assert imported(path, name, on_error="quarantine").rows
            except StoreError as error:
                assert path.name in str(error)  # noqa: PT017


def test_a_folder_takes_the_files_that_have_a_record_of_the_named_format(
    tmp_path: Path, buffer: TrajectoryBuffer
) -> None:
    folder = tmp_path / "logs"
    lines(folder / "a.jsonl", CHAT, BLOCKS)
    lines(folder / "b.jsonl", TURNS)
    report = import_paths(buffer, [folder], "anthropic")
    assert ([Path(item["path"]).name for item in report.files], report.calls) == (["a.jsonl"], 1)
    assert [Path(item).name for item in report.skipped] == ["b.jsonl"]
    assert count(buffer) == 2


def test_what_the_evidence_says_of_one_record(tmp_path: Path) -> None:
    format_ = recognise(Source(lines(tmp_path / "x.jsonl", CALLED)))
    assert format_ is not None
    assert (format_.format, format_.evidence) == ("openai-chat", "its first record fits it, and trl-sft as well")
