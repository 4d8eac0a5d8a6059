"""Imports: each file once, under ids that do not collide, with everything that is not carried said."""

import gzip
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_files import CHAT, chat, count, lines
from format_rows import hard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.exports import export_rows
from agentrl.datastore.formats.imported import Imported
from agentrl.datastore.formats.imports import Labels, import_paths
from agentrl.datastore.upkeep import check


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    return TrajectoryBuffer(tmp_path / "store")


# refuse or report


@pytest.mark.parametrize("name", [name for name, format_ in FORMATS.items() if format_.write])
def test_what_is_exported_imports_once_and_passes_validation(
    name: str, tmp_path: Path, buffer: TrajectoryBuffer
) -> None:
    source = TrajectoryBuffer(tmp_path / "a")
    rows = [*(build(i) for i in range(4)), hard(4)]
    source.append(rows, stage="s", fingerprint="f", pipeline="p")
    path = tmp_path / f"file{FORMATS[name].suffix}"
    written = export_rows(source, [row.trajectory_id for row in rows], path, name)
    result = import_paths(buffer, [path], labels=Labels(env="shop", split="dev"))
    assert result.rows >= written.records > 0
    assert {item["format"] for item in result.files} == {name}
    assert buffer.sql("select distinct pipeline, fork_at from trajectories").rows() == [(None, 0)]
    again = import_paths(buffer, [path], labels=Labels(env="shop", split="dev"))
    assert (again.rows, len(again.known)) == (0, len(result.files))
    assert buffer.sql("select distinct env, split, stage from trajectories").rows() == [("shop", "dev", "import")]
    assert check(buffer) == []


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("trl-preference", CHAT),
        ("verifiers", CHAT),
        ("tau2", CHAT),
        ("sharegpt", {"prompt": "a", "completion": "b"}),
        ("openai-chat", {"conversations": [{"from": "human", "value": "x"}]}),
    ],
)
def test_a_file_of_another_format_is_refused(name: str, record: Any, tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    with pytest.raises(StoreError, match=f"does not look like {name}, it looks like"):
        import_paths(buffer, [lines(tmp_path / "x.jsonl", record)], name)
    assert count(buffer) == 0


def test_a_file_that_fits_none_is_described(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    for text, expected in (
        ('{"a": 1, "b": 2}\n{"a": 3}\n', "fits no format: it is JSON Lines with the keys a, b"),
        ("[[1]]", "a JSON array of lists"),
        ("plain words", "text that is not a JSON document"),
        ("", "it is empty"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(StoreError, match=expected):
            import_paths(buffer, [tmp_path / "x.json"])
    with pytest.raises(StoreError, match="did you mean 'sharegpt'"):
        import_paths(buffer, [tmp_path / "x.json"], "share-gpt")
    with pytest.raises(StoreError, match="nothing to import at"):
        import_paths(buffer, [tmp_path / "none"])


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": ""}], [{"role": "assistant", "content": None}]])
def test_rows_without_messages_are_refused(messages: list[Any], tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = lines(tmp_path / "x.jsonl", CHAT, {"messages": messages})
    with pytest.raises(StoreError, match=r"x.jsonl:2: has (no )?messages"):
        import_paths(buffer, [path])
    assert count(buffer) == 0
    result = import_paths(buffer, [path], on_error="quarantine")
    assert (result.rows, [record["place"].rpartition(":")[2] for record in result.unreadable]) == (1, ["2"])


def test_no_row_at_all_is_an_error(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    (tmp_path / "x.json").write_text('{"simulations": [], "tasks": []}')
    with pytest.raises(StoreError, match="gives no row"):
        import_paths(buffer, [tmp_path / "x.json"])
    path = lines(tmp_path / "y.jsonl", CHAT, {"messages": []})
    path.write_text(path.read_text().splitlines()[1])
    with pytest.raises(StoreError, match="fits no format"):
        import_paths(buffer, [path], on_error="quarantine")


def test_what_is_not_carried_is_counted_by_key(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    first = chat(images=["a.png"], note="", flag=False)
    first["messages"][0]["annotations"] = [1]
    result = import_paths(buffer, [lines(tmp_path / "x.jsonl", first, chat("b", images=["b.png"], score=0))])
    assert result.ignored == {"images": 2, "messages.annotations": 1, "score": 1}


def test_content_parts_that_are_no_text_are_counted_by_type(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    part = {"type": "image_url", "image_url": {"url": "cat.png"}}
    record = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}, CHAT["messages"][1]]}
    result = import_paths(buffer, [lines(tmp_path / "x.jsonl", record)])
    [row] = buffer.get_many(buffer.sql("select trajectory_id from trajectories")["trajectory_id"].to_list())
    assert (row.messages[0].content, result.ignored) == ("what?", {"messages.content.image_url": 1})


def test_a_dry_run_counts_and_appends_nothing(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    record = {"messages": [CHAT["messages"][0], call, {"role": "tool", "content": "x"}], "extra": 1, "label": True}
    result = import_paths(buffer, [lines(tmp_path / "x.jsonl", record)], dry_run=True)
    actual = (result.rows, result.messages, result.calls, result.tokens, result.successes, result.ignored)
    assert actual == (1, 3, 1, 0, 1, {"extra": 1})
    assert buffer.version is None
    with pytest.raises(StoreError, match=r":1: messages\.0\.role"):
        import_paths(
            buffer, [lines(tmp_path / "y.jsonl", {"messages": [{"role": "robot", "content": "x"}]})], dry_run=True
        )


def test_records_that_cannot_be_read_are_set_aside(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = tmp_path / "x.jsonl"
    good = json.dumps(CHAT)
    path.write_text(f'{good}\n{{"messages": \n{{"message": []}}\n"text"\n{good}\n')
    with pytest.raises(StoreError, match=r"x.jsonl:2: is not JSON.*--quarantine sets such records aside"):
        import_paths(buffer, [path])
    assert count(buffer) == 0
    result = import_paths(buffer, [path], on_error="quarantine")
    assert result.rows == 2
    assert [record["place"].rpartition(":")[2] for record in result.unreadable] == ["2", "3", "4"]
    assert result.unreadable[1]["key"] == "messages"
    [key] = [key for key in buffer.storage.keys("quarantine") if key.endswith(".jsonl")]
    kept = [json.loads(line) for line in (buffer.storage.read(key) or b"").splitlines()]
    assert json.loads(kept[1]["excerpt"]) == {"message": []}
    assert buffer.quarantined().height == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200) | st.text(max_size=200).map(str.encode),
    st.sampled_from(["", '{"messages": ', "[{", "\x1f\x8b"]),
)
def test_no_bytes_give_anything_but_an_error_that_names_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, start: str
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "x.jsonl").write_bytes(start.encode("latin-1") + data)
    for quarantine in ("raise", "quarantine"):
        with pytest.raises(StoreError, match=r"x\.jsonl"):
            import_paths(TrajectoryBuffer(folder / "store"), [folder / "x.jsonl"], on_error=quarantine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("depth", "shape"), [(300, "lines"), (300, "document"), (10**5, "lines"), (10**5, "array"), (10**5, "document")]
)
def test_deep_json_is_refused_by_name(depth: int, shape: str, tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    deep = (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": '
        + "[" * depth
        + "]" * depth
        + "}]}"
    )
    text = {"lines": f"{json.dumps(CHAT)}\n{deep}\n", "array": f"[{json.dumps(CHAT)}, {deep}]", "document": deep}[shape]
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(StoreError, match=r"x\.json"):
        import_paths(buffer, [tmp_path / "x.json"])
    assert count(buffer) == 0


# files


def test_compressed_files_byte_order_marks_and_arrays(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    records = [chat(f"q{i}") for i in range(3)]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace("q", "r").encode())
    (tmp_path / "c.json").write_text(json.dumps([chat(f"s{i}") for i in range(3)], indent=1))
    (tmp_path / "d.json").write_text(json.dumps(chat("t"), indent=2))
    result = import_paths(buffer, sorted(tmp_path.glob("*.*")))
    assert [item["rows"] for item in result.files] == [3, 3, 3, 1]
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(text.replace("q", "u").encode())[:60])
    with pytest.raises(StoreError, match=r"torn\.jsonl\.gz"):
        import_paths(buffer, [torn])
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(chat("é"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(StoreError, match=r"latin\.jsonl .*is not UTF-8 text"):
        import_paths(buffer, [tmp_path / "latin.jsonl"], "openai-chat")


def test_standard_input(monkeypatch: pytest.MonkeyPatch, buffer: TrajectoryBuffer) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(CHAT).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    result = import_paths(buffer, ["-"])
    assert (result.rows, result.files[0]["path"]) == (1, "standard input")


def test_a_folder_is_taken_file_by_file(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    folder = tmp_path / "logs"
    for name in ("a", "sub/b"):
        lines(folder / f"{name}.jsonl", chat(name))
    lines(folder / "other.json", {"a": 1})
    lines(folder / ".hidden" / "c.jsonl", chat("c"))
    first = import_paths(buffer, [folder])
    assert (first.rows, [Path(item).name for item in first.skipped]) == (2, ["other.json"])
    lines(folder / "d.jsonl", chat("d"))
    second = import_paths(buffer, [folder])
    assert (second.rows, len(second.known), [Path(item["path"]).name for item in second.files]) == (1, 2, ["d.jsonl"])
    assert import_paths(buffer, [folder]).rows == 0
    assert count(buffer) == 3
    with pytest.raises(StoreError, match="no format fits"):
        import_paths(buffer, [lines(tmp_path / "odd" / "x.json", {"a": 1}).parent])


def test_an_error_in_one_file_leaves_the_table_as_it_was(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    good, bad = lines(tmp_path / "a.jsonl", CHAT), lines(tmp_path / "b.jsonl", CHAT, {"messages": 3})
    with pytest.raises(StoreError, match=r"b.jsonl:2"):
        import_paths(buffer, [good, bad])
    assert count(buffer) == 0
    assert import_paths(buffer, [good]).rows == 1


def test_the_result_is_plain_data(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    result = import_paths(buffer, [lines(tmp_path / "x.jsonl", CHAT)])
    assert isinstance(result, Imported)
    assert json.loads(json.dumps(result.as_dict()))["rows"] == 1
    assert len(result.fingerprint) == 32


def test_a_line_that_is_no_text_is_set_aside_alone(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = tmp_path / "x.jsonl"
    latin = json.dumps(chat("é"), ensure_ascii=False).encode("latin-1")
    path.write_bytes(b"\n".join([json.dumps(CHAT).encode(), latin, json.dumps(chat("b")).encode()]))
    with pytest.raises(StoreError, match=r"x\.jsonl:2: is not UTF-8 text"):
        import_paths(buffer, [path])
    result = import_paths(buffer, [path], on_error="quarantine")
    assert (result.rows, [record["place"].rpartition(":")[2] for record in result.unreadable]) == (2, ["2"])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", {"messages_display": "user: hi"}, "tau-bench's few-shot texts"),
        ("a.json", {"tasks": [], "simulation_index": []}, "import the folder it is in"),
        ("a.jsonl", {"id": 1, "timestamp": "t", "input": "a", "output": "b"}, "export its observations"),
        ("a.jsonl", {"responses_create_params": {}, "agent_ref": {}}, "NeMo Gym's inputs"),
        ("a.jsonl", {"prompt": "a", "completions": ["b"], "labels": [True]}, "stepwise supervision"),
        ("a.csv", "question,answer\n1,2\n", "CSV with the columns question, answer"),
        ("a.jsonl", "{} {}\n", r"is not JSON Lines \(is not JSON"),
    ],
)
def test_what_no_reader_takes_is_named(
    name: str, content: Any, expected: str, tmp_path: Path, buffer: TrajectoryBuffer
) -> None:
    path = tmp_path / name
    path.write_text(
        content if isinstance(content, str) else json.dumps(content, indent=1 if name == "a.json" else None)
    )
    with pytest.raises(StoreError, match=f"fits no format: it is .*{expected}"):
        import_paths(buffer, [path])


def test_a_label_that_is_no_verdict_is_not_taken_for_one(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = lines(tmp_path / "x.jsonl", {"prompt": "a", "completion": "b", "label": "false"})
    with pytest.raises(StoreError, match="label is true or false, not 'false'"):
        import_paths(buffer, [path])
    assert import_paths(buffer, [lines(tmp_path / "y.jsonl", chat(label="no"))]).ignored == {"label": 1}


def test_a_pipe_is_read_once(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[json.dumps(CHAT).encode()])
    writer.start()
    result = import_paths(buffer, [pipe])
    writer.join()
    assert (result.rows, result.files[0]["path"]) == (1, str(pipe))


def test_a_folder_names_every_file_that_it_leaves_out(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    lines(tmp_path / "logs" / "_old" / "a.jsonl", CHAT)
    lines(tmp_path / "logs" / "_notes.json", {"a": 1})
    lines(tmp_path / "logs" / "readme.md", "text")
    result = import_paths(buffer, [tmp_path / "logs"])
    assert (result.rows, [Path(item).name for item in result.skipped]) == (1, ["_notes.json", "readme.md"])


def test_a_table_of_chat_comes_in_without_its_nulls(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    """Parquet of a dataset gives every message every key that any has."""
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    rows = [{"messages": asked, "source": "x"}, {"messages": CHAT["messages"], "source": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    result = import_paths(buffer, [tmp_path / "x.parquet"])
    assert (result.rows, result.messages, result.calls, result.ignored) == (2, 4, 1, {"source": 1})
