"""The table of annotations: appended once, read at any version, on a folder and on S3, by several at once."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_rows import FP, Make, build

from agentrl.datastore.annotations.current import current
from agentrl.datastore.annotations.table import MERGED, PARTS, AnnotationTable
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import CorruptError, StoreError
from agentrl.datastore.storage.object_store import storage_of
from agentrl.flows.api.store import Store
from agentrl.flows.cli import call
from agentrl.schemas.annotation import ANNOTATION_SCHEMA, Annotation, message_json, number_of
from agentrl.schemas.arrow import from_table, to_table

MERGE_PARTS = 8
NOW = datetime(2026, 1, 2, tzinfo=UTC)


def said(row: str, value: object, **fields: object) -> Annotation:
    return Annotation.model_validate(
        {"trajectory_id": row, "name": "thumbs", "value": value, "author": "ann", "created_at": NOW} | fields
    )


def filled(store: str, make: Make, rows: int = 4) -> Store:
    TrajectoryBuffer(store).append([make(number) for number in range(rows)], stage="rollout", fingerprint=FP)
    return Store(store)


def test_an_annotation_is_appended_once_and_all_versions_are_kept(store: str) -> None:
    table = AnnotationTable(storage_of(store))
    assert table.version == 0
    assert table.rows().num_rows == 0
    first = said("a", "up")
    assert table.append([first, first]).rows == 1
    done = table.append([first, said("b", "down")])
    assert (done.version, done.rows, done.already) == (2, 1, 1)
    assert table.append([first]).version == 2  # and no empty version
    other = AnnotationTable(storage_of(store))
    assert other.rows()["value"].to_pylist() == ["up", "down"]
    assert other.rows(1)["value"].to_pylist() == ["up"]
    assert other.rows(0).num_rows == 0
    with pytest.raises(StoreError, match="no version 3 of the annotations; the newest is 2"):
        other.rows(3)


def test_writers_at_once_lose_nothing_and_double_nothing(store: str) -> None:
    every = [[said("a", str(writer), annotation_id=f"{writer}-{number}") for number in range(6)] for writer in range(4)]

    def write(own: list[Annotation]) -> int:
        table = AnnotationTable(storage_of(store))
        return sum(table.append([each, *own[:number]]).rows for number, each in enumerate(own))

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(write, every)) == 24
    rows = AnnotationTable(storage_of(store)).rows()
    assert sorted(rows["annotation_id"].to_pylist()) == sorted(each.annotation_id for own in every for each in own)
    assert sorted(rows["version"].to_pylist()) == list(range(1, 25))


def test_a_merged_copy_says_what_the_parts_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.datastore.annotations.table.MERGE_PARTS", MERGE_PARTS)
    storage = storage_of(tmp_path)
    table = AnnotationTable(storage)
    for number in range(2 * MERGE_PARTS + 3):
        table.append([said("a", number, annotation_id=str(number))])
    assert [*storage.keys(MERGED)] == [f"{MERGED}/{n * MERGE_PARTS:012d}.parquet" for n in (1, 2)]
    assert len([*storage.keys(PARTS)]) == 2 * MERGE_PARTS + 3
    reader = AnnotationTable(storage)
    assert reader.rows().equals(table.rows().combine_chunks()) or reader.rows() == table.rows()
    assert reader.rows(MERGE_PARTS - 1).num_rows == MERGE_PARTS - 1
    (tmp_path / MERGED / f"{2 * MERGE_PARTS:012d}.parquet").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="the parts are read instead"):
        assert AnnotationTable(storage).rows() == table.rows()
    (tmp_path / PARTS / f"{7:012d}.parquet").unlink()
    for path in (tmp_path / MERGED).iterdir():
        path.unlink()
    with pytest.raises(CorruptError, match=r"000000000007.parquet.*not there"):
        AnnotationTable(storage).rows()


def test_the_newest_of_an_author_counts_and_all_are_kept(tmp_path: Path, make: Make) -> None:
    store = filled(str(tmp_path), make)
    row = make(0).trajectory_id
    later = NOW + timedelta(minutes=1)
    about = {"trajectory_id": row, "name": "thumbs"}
    store.annotate(**about, value="up", author="ann", created_at=later)
    store.annotate(**about, value="down", author="ann", created_at=NOW)  # said before, appended after
    store.annotate(**about, value="down", author="bob", created_at=NOW)
    store.annotate(**about, value=True, author="ann", turn=1, created_at=NOW)
    counts = store.annotations.select("author", "turn", "value", "number").rows()
    assert sorted(counts, key=str) == [("ann", 1, "true", 1.0), ("ann", None, "up", 1.0), ("bob", None, "down", 0.0)]
    assert store.annotation_log().height == 4
    store.annotate([{**about, "value": None, "author": "bob"}])
    assert store.annotations.filter(author="bob").is_empty()
    assert store.annotation_log().height == 5
    assert store.annotation_log(3).height == 3


def test_sql_reads_the_annotations_that_count(tmp_path: Path, make: Make) -> None:
    store = filled(str(tmp_path), make)
    names = [make(number).trajectory_id for number in range(4)]
    assert store.sql("select * from annotations").is_empty()
    store.annotate([{"trajectory_id": name, "name": "thumbs", "value": "up", "author": "ann"} for name in names[:2]])
    store.annotate(trajectory_id=names[1], name="thumbs", value="down", author="ann")
    up = "trajectory_id in (select trajectory_id from annotations where name = 'thumbs' and number = 1)"
    query = f"select trajectory_id from trajectories where {up} order by trajectory_id"
    assert store.sql(query)["trajectory_id"].to_list() == names[:1]
    assert store.buffer.sql(query, annotations=1)["trajectory_id"].to_list() == names[:2]


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, make: Make) -> None:
    store = filled(str(tmp_path), make)
    row = make(0).trajectory_id
    fine = {"trajectory_id": row, "name": "thumbs", "value": "up", "author": "ann"}
    wrong = {
        "no row 'nobody'": fine | {"trajectory_id": "nobody"},
        "turn: is 2; the row has 2 assistant messages": fine | {"turn": 2},
        "token_end: is 13; the row has 12 tokens": fine | {"token_start": 1, "token_end": 13},
        "token_start and token_end go together": fine | {"token_start": 1},
        "autor: is no field of an annotation; did you mean 'author'": fine | {"autor": "x"},
        "author: is missing": {name: value for name, value in fine.items() if name != "author"},
        "says nothing": {name: value for name, value in fine.items() if name != "value"},
        "a correction is an assistant message": fine | {"correction": {"role": "user", "content": "no"}},
        "is no value": fine | {"value": [1]},
        "unable to parse raw data as a unicode string": fine | {"comment": "\ud800"},
    }
    for reason, fields in wrong.items():
        with pytest.raises(StoreError, match="nothing was written") as refused:
            store.annotate([fine, fields])
        assert reason in str(refused.value), str(refused.value)
    assert store.annotation_log().is_empty()


def test_tokens_of_a_row_that_has_none_are_refused_with_what_to_name(tmp_path: Path) -> None:
    bare = {"input_ids": [], "action_mask": [], "logprobs": [], "n_tokens": 0, "n_action_tokens": 0, "tokenizer": ""}
    messages = [each.model_copy(update={"token_start": None, "token_end": None}) for each in build().messages]
    TrajectoryBuffer(tmp_path).append([build(messages=messages, **bare)], stage="import", fingerprint=FP)
    store, row = Store(str(tmp_path)), build().trajectory_id
    with pytest.raises(StoreError, match="the row has no tokens, only messages: name a turn instead, and quote"):
        store.annotate(
            [{"trajectory_id": row, "name": "wrong", "value": 1, "author": "a", "token_start": 0, "token_end": 2}]
        )
    store.annotate(
        [{"trajectory_id": row, "name": "wrong", "value": 1, "author": "a", "turn": 1, "comment": "'Bob 0'"}]
    )
    assert store.annotation_log()["turn"].to_list() == [1]


LINES = """
{"trajectory_id": "%(row)s", "name": "stars", "value": 4, "author": "ann"}
{"trajectory_id": "%(row)s", "name": "correction", "turn": 1, "correction": "Eve", "author": "ann"}
{"trajectory_id": "nobody", "name": "stars", "value": 4, "author": "ann"}
not json
{"trajectory_id": "%(row)s", "name": "stars", "value": 5}
"""


def test_a_file_is_taken_once_and_its_bad_lines_are_set_aside(tmp_path: Path, make: Make) -> None:
    store = filled(str(tmp_path / "store"), make)
    path = tmp_path / "labels.jsonl"
    path.write_text(LINES % {"row": make(0).trajectory_id})
    done = store.annotate(path)
    assert (done.rows, done.already) == (2, 0)
    assert [(bad.place, bad.key) for bad in done.refused] == [
        ("labels.jsonl:4", "trajectory_id"),
        ("labels.jsonl:5", ""),
        ("labels.jsonl:6", "author"),
    ]
    [correction] = store.annotations.filter(name="correction")["correction"]
    assert json.loads(correction) == {"role": "assistant", "content": "Eve"}
    again = store.annotate(path)
    assert (again.rows, again.already, len(again.refused)) == (0, 2, 3)
    assert len(store.buffer.unreadable()) == 3  # the same lines are written once
    assert store.annotate(path, author="bob").rows == 1  # the line without an author
    assert set(store.annotations["source"]) == {"labels.jsonl"}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_are_read_as_lines_are(tmp_path: Path, make: Make, suffix: str) -> None:
    store = filled(str(tmp_path / "store"), make)
    names = [make(number).trajectory_id for number in range(3)]
    frame = pl.DataFrame(
        {"trajectory_id": names, "name": "ok", "value": ["up", None, "no"], "comment": [None, "hm", ""]}
    )
    path = tmp_path / f"labels.{suffix}"
    (frame.write_csv if suffix == "csv" else frame.write_parquet)(path)
    done = store.annotate(path, author="ann")
    assert (done.rows, done.refused) == (3, [])
    assert store.annotations.sort("trajectory_id")["number"].to_list() == [1.0, None, 0.0]
    exported = tmp_path / "exported.parquet"
    store.annotation_log().write_parquet(exported)
    assert store.annotate(exported).already == 3  # what was exported comes back as the same


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
values = (
    st.none() | texts | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
)


@given(
    value=values,
    comment=texts | st.just(""),
    correction=st.none() | texts.filter(str.strip),
    turn=st.none() | st.integers(0, 9),
)
@settings(max_examples=25, deadline=None)
def test_any_annotation_comes_back_as_it_was(
    value: object, comment: str, correction: str | None, turn: int | None
) -> None:
    annotation = said("a", value, comment=comment, correction=correction, turn=turn)
    [back] = from_table(Annotation, to_table([annotation], ANNOTATION_SCHEMA))
    assert back == annotation


def test_numbers_of_values_and_forms_of_corrections() -> None:
    assert [number_of(value) for value in ("up", "No", "3.5", "nan", "1e999", "good", None)] == [1, 0, 3.5, *[None] * 4]
    assert said("a", 3.0).value == "3"
    call = {"content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}]}
    assert json.loads(message_json(call))["tool_calls"][0]["name"] == "f"
    assert json.loads(message_json('{"content": "a text"}'))["content"] == '{"content": "a text"}'
    again = message_json("Eve")
    assert message_json(again) == again


def test_equal_times_go_by_the_order_of_appends() -> None:
    frame = pl.DataFrame(to_table([said("a", "up"), said("a", "down")], ANNOTATION_SCHEMA))
    assert current(frame)["value"].to_list() == ["down"]


def test_the_commands_annotate_and_tell_how_far_authors_agree(
    tmp_path: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    store = filled(str(tmp_path / "store"), make)
    rows = [make(number).trajectory_id for number in range(4)]
    path = tmp_path / "labels.csv"
    path.write_text("trajectory_id,value\n" + "".join(f"{row},up\n" for row in [*rows, "nobody"]))
    options = ["--store", store.path, "--label", "thumbs"]
    assert call(["buffer", "annotate", str(path), *options, "--author", "ann"]) == 0
    told = capsys.readouterr().out
    assert "4 annotations added, 0 there already; version 1 of the annotations" in told
    assert "1 lines are set aside in quarantine/annotations-" in told
    assert "labels.csv[4]: trajectory_id: no row 'nobody' in the buffer" in told
    path.write_text(path.read_text().replace("up", "down", 1).replace("nobody,up\n", ""))
    assert call(["buffer", "annotate", str(path), *options, "--author", "m", "--judge", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "version": 2,
        "rows": 4,
        "already": 0,
        "refused": [],
        "quarantine": None,
    }
    assert store.annotations.filter(author="m")["author_kind"].unique().to_list() == ["judge"]
    assert call(["buffer", "agreement", "thumbs", "--store", store.path, "--json"]) == 0
    [every, two] = json.loads(capsys.readouterr().out)
    assert (every["measure"], every["units"], every["agreed"]) == ("alpha", 4, 0.75)
    assert (two["measure"], two["authors"], two["value"]) == ("kappa", "ann, m", 0.0)
    assert call(["buffer", "agreement", "thumb", "--store", store.path]) == 2
    assert "did you mean 'thumbs'" in capsys.readouterr().err
    where = "trajectory_id in (select trajectory_id from annotations where author = 'm' and number = 0)"
    assert call(["buffer", "select", "bad", "--store", store.path, "--where", where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 1
