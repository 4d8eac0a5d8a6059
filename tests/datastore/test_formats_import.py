"""Imports: each file once, under ids that do not collide, with everything that is not carried said."""

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from format_rows import KINDS, hard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rows import build

from datastore import StoreError, TrajectoryBuffer
from datastore.formats import FORMATS
from datastore.formats.exports import export_rows, losses
from datastore.formats.imports import Imported, Labels, import_paths
from datastore.upkeep import check

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def chat(text: str = "hi", answer: str = "ho", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}], **more}


def lines(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    return TrajectoryBuffer(tmp_path / "store")


def count(buffer: TrajectoryBuffer) -> int:
    return 0 if buffer.version is None else int(buffer.sql("select count(*) from trajectories").item())


# refuse or report


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.write])
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
    assert {one["format"] for one in result.files} == {name}
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
    assert (result.rows, [one["place"].rpartition(":")[2] for one in result.unreadable]) == (1, ["2"])


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


def test_content_parts_that_are_not_known_are_kept_as_json(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    part = {"type": "image_url", "image_url": {"url": "cat.png"}}
    record = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}, CHAT["messages"][1]]}
    import_paths(buffer, [lines(tmp_path / "x.jsonl", record)])
    [row] = buffer.get_many(buffer.sql("select trajectory_id from trajectories")["trajectory_id"].to_list())
    text, image = row.messages[0].content.split("\n")
    assert (text, json.loads(image)) == ("what?", part)


def test_a_dry_run_counts_and_appends_nothing(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    record = {"messages": [CHAT["messages"][0], call, {"role": "tool", "content": "x"}], "extra": 1, "label": True}
    result = import_paths(buffer, [lines(tmp_path / "x.jsonl", record)], dry_run=True)
    found = (result.rows, result.messages, result.calls, result.tokens, result.successes, result.ignored)
    assert found == (1, 3, 1, 0, 1, {"extra": 1})
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
    assert [one["place"].rpartition(":")[2] for one in result.unreadable] == ["2", "3", "4"]
    assert result.unreadable[1]["key"] == "messages"
    [key] = [key for key in buffer.place.keys("quarantine") if key.endswith(".jsonl")]
    kept = [json.loads(line) for line in (buffer.place.read(key) or b"").splitlines()]
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
    text = "".join(json.dumps(one) + "\n" for one in records)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace("q", "r").encode())
    (tmp_path / "c.json").write_text(json.dumps([chat(f"s{i}") for i in range(3)], indent=1))
    (tmp_path / "d.json").write_text(json.dumps(chat("t"), indent=2))
    result = import_paths(buffer, sorted(tmp_path.glob("*.*")))
    assert [one["rows"] for one in result.files] == [3, 3, 3, 1]
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(text.replace("q", "u").encode())[:60])
    with pytest.raises(StoreError, match=r"torn\.jsonl\.gz"):
        import_paths(buffer, [torn])
    (tmp_path / "latin.jsonl").write_bytes(json.dumps(chat("é"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(StoreError, match=r"latin\.jsonl is not UTF-8 text"):
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
    assert (first.rows, [Path(one).name for one in first.skipped]) == (2, ["other.json"])
    lines(folder / "d.jsonl", chat("d"))
    second = import_paths(buffer, [folder])
    assert (second.rows, len(second.known), [Path(one["path"]).name for one in second.files]) == (1, 2, ["d.jsonl"])
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


# identity


def test_the_same_content_says_so(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = lines(tmp_path / "a.jsonl", CHAT)
    assert import_paths(buffer, [path]).rows == 1
    (tmp_path / "b.jsonl").write_text(path.read_text())
    named = import_paths(buffer, [tmp_path / "b.jsonl"])
    assert (named.rows, named.known) == (0, [str(tmp_path / "b.jsonl")])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert import_paths(buffer, [tmp_path / "c.jsonl.gz"]).rows == 0
    labelled = import_paths(buffer, [path], labels=Labels(env="shop"))
    assert (labelled.rows, labelled.repeats) == (1, [str(path)])
    twice = import_paths(TrajectoryBuffer(tmp_path / "other"), [path, tmp_path / "b.jsonl"])
    assert (twice.rows, twice.known) == (1, [str(tmp_path / "b.jsonl")])


def tasks(buffer: TrajectoryBuffer) -> list[str]:
    return buffer.sql("select task_id from trajectories order by episode_id")["task_id"].to_list()


def test_tasks_are_the_same_across_files_and_never_collide(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    def simulation(number: str, domain: str, name: str) -> Path:
        task = {"id": number, "user_scenario": f"{domain} {number}"}
        one = {"id": name, "task_id": number, "termination_reason": "user_stop", "messages": CHAT["messages"]}
        document = {"info": {"environment_info": {"domain_name": domain}}, "tasks": [task], "simulations": [one]}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(document))
        return path

    import_paths(
        buffer, [simulation("5", "airline", "x"), simulation("5", "retail", "y"), simulation("5", "airline", "z")]
    )
    airline, retail, again = tasks(buffer)  # x, y, z
    assert airline == again != retail
    assert airline.startswith("tau2/airline/5-")
    import_paths(buffer, [lines(tmp_path / "q.jsonl", chat("same", "a"), chat("same", "b"), chat("other"))])
    chats = [one for one in tasks(buffer) if one.startswith("openai-chat/")]
    assert (len(chats), len(set(chats))) == (3, 2)


def test_labels(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    records = [
        {
            "example_id": i,
            "prompt": f"q{i}",
            "completion": "a",
            "reward": r,
            "metrics": {"exact": e},
            "stats": {"final": f},
        }
        for i, (r, e, f) in enumerate([(0.2, 1.0, 7), (0.9, 0.0, None)])
    ]
    path = lines(tmp_path / "r.jsonl", *records)
    columns = "select reward, success, policy, split, task_id from trajectories order by prompt"

    def rows(**labels: Any) -> list[tuple[Any, ...]]:
        fresh = TrajectoryBuffer(tmp_path / f"store{len(list(tmp_path.iterdir()))}")
        import_paths(fresh, [path], labels=Labels(**labels))
        return fresh.sql(columns).rows()

    assert [row[:2] for row in rows()] == [(0.2, None), (0.9, None)]
    assert [row[:2] for row in rows(success="reward >= 0.5")] == [(0.2, False), (0.9, True)]
    assert [row[:2] for row in rows(success="exact = 1", reward="exact")] == [(1.0, True), (0.0, False)]
    assert [row[:2] for row in rows(reward="stats.final", success="reward > 5")] == [(7.0, True), (None, None)]
    first = rows(policy="m", split="dev", task_prefix="mine/")[0]
    assert first[2:4] == ("m", "dev")
    assert first[4].startswith("mine/verifiers/")
    with pytest.raises(StoreError, match="names are reward"):
        import_paths(buffer, [path], labels=Labels(success="nothing > 1"))
    assert count(buffer) == 0


def test_episodes_and_groups_of_two_imports_stay_apart(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    record = {"example_id": 0, "prompt": "q", "completion": "a", "reward": 1.0}
    import_paths(buffer, [lines(tmp_path / "a.jsonl", record, record | {"completion": "b"})])
    import_paths(buffer, [lines(tmp_path / "b.jsonl", record | {"completion": "c"})])
    found = buffer.sql(
        "select count(distinct task_id), count(distinct group_id), count(distinct episode_id) from trajectories"
    )
    assert found.row(0) == (1, 2, 3)


# tokens


def test_tokens_take_the_tokenizer_that_is_named_and_checked(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    path = tmp_path / "a.jsonl"
    row = build(0, tokenizer="")
    write = FORMATS["atif"].write
    assert write is not None
    write([row], path)
    plain = import_paths(TrajectoryBuffer(tmp_path / "plain"), [path])
    assert "rows with tokens of an unknown tokenizer: name it with --tokenizer to train on them" in plain.remarks
    with pytest.raises(StoreError, match="not of the tokenizer that is named: says no"):
        import_paths(buffer, [path], labels=Labels(tokenizer="tok"), check_tokens=lambda row: "says no")
    seen: list[int] = []

    def good(row: Any) -> None:
        seen.append(row.n_tokens)

    import_paths(buffer, [path], labels=Labels(tokenizer="tok"), check_tokens=good)
    assert seen == [12]
    assert buffer.sql("select tokenizer, n_tokens from trajectories").rows() == [("tok", 12)]


def test_completion_ids_without_prompt_ids_come_without_tokens(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "q"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "a",
            "metrics": {"completion_token_ids": [1, 2], "logprobs": [-1, -2]},
        },
    ]
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps({"schema_version": "ATIF-v1.7", "session_id": "s", "agent": {"name": "x"}, "steps": steps})
    )
    result = import_paths(buffer, [path])
    assert result.tokens == 0
    assert "completion ids without prompt ids: the row comes without tokens" in result.remarks


# exports


def test_exports_say_what_they_lose_and_never_overwrite(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    rows = [*KINDS["tokens"], *KINDS["reasoning"], *KINDS["unscored"]]
    buffer.append(rows, stage="s", fingerprint="f")
    ids = [row.trajectory_id for row in rows]
    lost = losses(buffer, ids, "sharegpt")
    assert (lost["token ids"], lost["reasoning"], lost["text beside calls"]) == (3, 4, 2)
    assert losses(buffer, ids, "trl-kto")["the whole row"] == 1
    assert losses(buffer, ids, "atif") == {}
    path = tmp_path / "out.jsonl.gz"
    assert export_rows(buffer, ids, path, "openai-chat").records == len(rows)
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == len(rows)
    with pytest.raises(StoreError, match="is there already; --force replaces it"):
        export_rows(buffer, ids, path, "openai-chat")
    before = path.read_bytes()
    export_rows(buffer, ids, path, "openai-chat", force=True)
    assert path.read_bytes() == before
    folder = tmp_path / "traj"
    export_rows(buffer, ids, folder, "swe-agent")
    export_rows(buffer, ids[:2], folder, "swe-agent", force=True)
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(StoreError, match="nemo-gym is only read"):
        export_rows(buffer, ids, tmp_path / "x", "nemo-gym")


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    buffer.append([build(0)], stage="s", fingerprint="f")
    path = tmp_path / "deep" / "out.jsonl"
    path.parent.mkdir()
    path.write_text("old")
    with pytest.raises(KeyError):
        export_rows(buffer, [build(0).trajectory_id, "missing"], path, "openai-chat", force=True)
    assert [one.name for one in path.parent.iterdir()] == ["out.jsonl"]
    assert path.read_text() == "old"


def test_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    write = FORMATS["swe-agent"].write
    assert write is not None
    write([build(0, trajectory_id="../../evil"), build(1, trajectory_id="../../evil")], tmp_path / "out" / "x")
    assert sorted(path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.traj")) == [("out", "x")] * 2


def test_the_result_is_plain_data(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    result = import_paths(buffer, [lines(tmp_path / "x.jsonl", CHAT)])
    assert isinstance(result, Imported)
    assert json.loads(json.dumps(result.as_dict()))["rows"] == 1
    assert len(result.fingerprint) == 32
