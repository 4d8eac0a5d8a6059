"""Labels that people give in the viewer: which rows come next, and what is written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewer_store import Browser, make_store, publish

from agentrl.datastore.annotations.labels import Label, LabelSchema
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.errors import CorruptError, StoreError
from agentrl.datastore.formats import annotations
from agentrl.flows.api.store import Store
from agentrl.flows.commands._selections import checked_rules
from agentrl.flows.viewer.app import application, opening
from agentrl.flows.viewer.guard import Door
from agentrl.schemas.manifest import Kind, Manifest

KEY = "the-key"
ALLOWED = {"x-agentrl-key": KEY}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def writer(store: Path) -> Browser:
    return Browser(store, Door("127.0.0.1", 8322, write=True, key=KEY))


def given(writer: Browser, row: str, value: str | None = "up", status: int = 200, **more: Any) -> Any:
    fields = {"annotation_id": f"{row} {value} {more}"[:100], "trajectory_id": row, "name": "thumbs", "author": "ann"}
    answer = writer.ask("/api/annotation", "POST", headers=ALLOWED, body={**fields, "value": value, **more})
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_label_is_written_once_and_read_back(writer: Browser, store: Path) -> None:
    ids = writer.json("/api/labels", author="ann")["ids"]
    assert given(writer, ids[0], turn=0) == {"added": True, "version": 1}
    assert given(writer, ids[0], turn=0) == {"added": False, "version": 1}  # sent again, after a lost answer
    given(writer, ids[0], None, name="correction", correction="it is Bob")
    given(writer, ids[0], None, name="comment", comment="hm")
    [comment, correction, thumb] = writer.json("/api/labels/row", row=ids[0])["annotations"]
    assert (thumb["value"], thumb["turn"], thumb["author"]) == ("up", 0, "ann")
    assert (correction["correction"], comment["comment"]) == ("it is Bob", "hm")
    given(writer, ids[0], None, turn=0)  # taken back
    assert len(writer.json("/api/labels/row", row=ids[0])["annotations"]) == 2
    rows = Store(store).annotation_log()
    assert rows.height == 4
    assert set(rows["source"]) == {"viewer"}


def test_the_page_of_a_row_has_all_that_was_said_of_it(writer: Browser, store: Path) -> None:
    row = writer.json("/api/labels")["ids"][0]
    given(writer, row, "up")
    given(writer, row, "down")
    Store(store).annotate(trajectory_id=row, name="stars", value=2, author="gpt", author_kind="judge", turn=0)
    call = {"name": "find", "arguments": '{"who": "Ann"}'}
    said_and_called = {"content": "I look", "tool_calls": [{"id": "1", **call}]}
    Store(store).annotate(trajectory_id=row, name="correction", correction=said_and_called, author="ann", turn=0)
    given(writer, row, None, name="stars", author="gpt", turn=0)  # taken back
    answer = writer.json("/api/labels/row", row=row)
    correction, thumb = answer["annotations"]
    assert (thumb["name"], thumb["value"], thumb["turn"]) == ("thumbs", "down", None)
    assert correction["correction"] == 'I look\nfind({"who": "Ann"})'
    before = [(each["name"], each["value"], each["author"], each["author_kind"]) for each in answer["earlier"]]
    assert before == [
        ("stars", None, "gpt", "person"),
        ("stars", "2", "gpt", "judge"),
        ("thumbs", "up", "ann", "person"),
    ]
    assert [each["created_at"] for each in answer["earlier"]] == sorted(
        (each["created_at"] for each in answer["earlier"]), reverse=True
    )
    nobody = writer.json("/api/labels/row", row="nobody")
    assert nobody == {"author": writer.json("/api/labels")["author"], "annotations": [], "earlier": []}


def test_what_does_not_fit_is_refused(writer: Browser, store: Path) -> None:
    row = writer.json("/api/labels")["ids"][0]
    assert given(writer, "nobody", status=400)["field"] == "trajectory_id"
    assert "assistant messages" in given(writer, row, turn=99, status=400)["error"]
    assert given(writer, row, author="", status=400)["field"] == "author"
    reader = Browser(store)
    assert reader.ask("/api/annotation", "POST", body={}).status_code == 405
    refused = writer.ask("/api/annotation", "POST", headers={"x-agentrl-key": "wrong"}, body={})
    assert refused.status_code == 403
    assert Store(store).annotation_log().is_empty()


def test_what_is_said_of_a_pair_names_one_that_there_is(writer: Browser, store: Path) -> None:
    row, other = Store(store).rows.select("trajectory_id").collect()["trajectory_id"].sort()[:2]
    fields = {"trajectory_id": row, "name": "thumbs", "value": "up", "author": "ann", "pair_id": "p1"}
    with pytest.raises(StoreError, match="pair_id: is 'p1'; the row is preferred in no pair of this store"):
        Store(store).annotate(**fields)
    pairs = pa.table({"pair_id": ["p1", "p2"], "chosen_id": [row, row], "rejected_id": [other, other]})
    publish(Catalog(store), "two", "f" * 32, "pairs.outcome", {"pairs": (Kind.PAIRS, pairs)})
    assert Store(store).annotate(**fields).rows == 1
    with pytest.raises(StoreError, match="pair_id: is 'p3'; the row is preferred in p1, p2"):
        Store(store).annotate(**{**fields, "pair_id": "p3"})
    with pytest.raises(StoreError, match="pair_id: is 'p1'; the row is preferred in no pair of this store"):
        Store(store).annotate(**{**fields, "trajectory_id": other})
    [thumb] = writer.json("/api/labels/row", row=row)["annotations"]
    assert (thumb["pair_id"], thumb["turn"]) == ("p1", None)
    given(writer, row, "tie", name="preference", pair_id="p2")
    assert (
        "is preferred in no pair" in given(writer, other, "tie", name="preference", pair_id="p2", status=400)["error"]
    )
    assert writer.json("/api/labels/row", row=row)["annotations"][0]["pair_id"] == "p2"


def test_tokens_are_labelled_by_where_they_begin_and_end(writer: Browser, store: Path) -> None:
    row, tokens = Store(store).rows.filter(pl.col("n_tokens") > 9).select("trajectory_id", "n_tokens").collect().row(0)
    given(writer, row, "down", token_start=4, token_end=9)
    given(writer, row, "up", token_start=4, token_end=8)
    spans = writer.json("/api/labels/row", row=row)["annotations"]
    assert {(each["token_start"], each["token_end"], each["value"]) for each in spans} == {(4, 9, "down"), (4, 8, "up")}
    assert f"the row has {tokens} tokens" in given(writer, row, token_start=4, token_end=9999, status=400)["error"]
    assert "go together" in given(writer, row, token_start=4, status=400)["error"]


def test_of_pairs_only_the_row_groups_of_the_rows_that_are_labelled_are_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = Store(store).rows.select("trajectory_id").collect()["trajectory_id"].sort().to_list()[:8]
    pairs = pa.table({"pair_id": [f"p{row}" for row in ids], "chosen_id": ids, "rejected_id": ids[::-1]})
    catalog = Catalog(store)
    made = publish(catalog, "two", "f" * 32, "pairs.outcome", {"pairs": (Kind.PAIRS, pairs)})  # four to a row group
    path = Path(catalog.open(made, "pairs.parquet"))
    damaged = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = damaged.dictionary_page_offset
    data[start : start + damaged.total_compressed_size] = bytes(damaged.total_compressed_size)
    path.write_bytes(data)
    listed, every = [0], Catalog.all

    def counted(self: Catalog) -> Iterator[Manifest]:
        listed[0] += 1
        return every(self)

    monkeypatch.setattr(Catalog, "all", counted)
    monkeypatch.setattr(annotations, "AT_ONCE", 1)
    thumbs = [{"trajectory_id": row, "pair_id": f"p{row}", "name": "thumbs", "value": "up"} for row in ids]
    assert Store(store).annotate(thumbs[:4], author="ann").rows == 4
    assert listed == [1]
    with pytest.raises(CorruptError, match=r"pairs\.parquet"):
        Store(store).annotate(thumbs[4:5], author="ann")


def test_queues_bring_what_is_unlabelled_uncertain_or_disputed(writer: Browser, store: Path) -> None:
    every = writer.json("/api/labels", queue="all")
    ids, total = every["ids"], every["total"]
    assert (len(ids), ids) == (total, sorted(ids))
    given(writer, ids[0])
    given(writer, ids[1], author="bob")
    assert writer.json("/api/labels", author="ann")["ids"] == ids[1:]
    assert writer.json("/api/labels", author="ann", name="stars")["total"] == total
    chosen = f"trajectory_id = '{ids[1]}'"
    assert writer.json("/api/labels", author="ann", filter=chosen)["ids"] == [ids[1]]
    assert writer.json("/api/labels", queue="disagreements")["ids"] == []
    given(writer, ids[1], "down", author="cleo")
    given(writer, ids[1], "down", author="dora")
    given(writer, ids[2], "up", author="bob")
    given(writer, ids[2], "down", author="cleo")
    assert writer.json("/api/labels", queue="disagreements")["ids"] == [ids[2], ids[1]]  # 1 of 1 pairs, 2 of 3
    uncertain = writer.json("/api/labels", queue="uncertain", author="ann")["ids"]
    assert uncertain[0] == ids[2]  # half of the others say up
    assert ids[0] not in uncertain
    rows = Store(store).rows.select("trajectory_id", "task_id", "success").collect()
    rates = rows.with_columns(pl.col("success").cast(pl.Float64).mean().over("task_id").alias("rate"))
    known = dict(rates.filter(~pl.col("trajectory_id").is_in(ids[:3])).select("trajectory_id", "rate").iter_rows())
    rest = [known[row] for row in uncertain if known.get(row) is not None]
    assert rest == sorted(rest, key=lambda rate: abs(rate - 0.5))


def test_labels_of_a_schema_come_after_thumbs_and_stars(store: Path) -> None:
    content = {"labels": [{"name": "fault", "values": ["tool", 2]}, {"name": "stars", "values": ["bad", "good"]}]}
    schema = checked_rules(content, "labels.yaml", LabelSchema, "labels")
    assert schema.labels[0] == Label(name="fault", values=["tool", "2"])
    browser = Browser(store)
    browser.app = application(opening(str(store), schema), Door("127.0.0.1", 8322))
    assert [label["name"] for label in browser.json("/api/labels")["labels"]] == ["thumbs", "fault", "stars"]
    for wrong, reason in [
        ({"labels": [{"name": "a", "values": ["b"]}]}, r"labels.0.values: List should have at least 2 items"),
        ({"labels": [{"name": "a", "values": ["b", "b"]}]}, "names something twice: b, b"),
        ({"label": []}, "label: Extra inputs are not permitted"),
        ({"labels": [{"name": "a", "values": ["b", "c"]}] * 2}, "names something twice: a, a"),
    ]:
        with pytest.raises(StoreError, match=reason):
            checked_rules(wrong, "labels.yaml", LabelSchema, "labels")
    assert LabelSchema().every[0].name == "thumbs"
