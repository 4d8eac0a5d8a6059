import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from store_rows import Make

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.errors import NewerSchemaError, NoBufferError, UnknownTrajectoryError
from agentrl.datastore.table.delta_table import VERSION_PROPERTY
from agentrl.datastore.table.row_digests import with_content
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

FP = "0123456789abcdef"


def test_rows_come_back_exactly_as_written(store: str, make: Make) -> None:
    buffer = TrajectoryBuffer(store)
    rows = [make(i) for i in range(10)]
    result = buffer.append(iter(rows), stage="rollout", fingerprint=FP, run_id="r1")
    assert (result.rows, result.skipped) == (10, False)
    actual = buffer.get_many([rows[7].trajectory_id, rows[2].trajectory_id])
    for back, row in zip(actual, (rows[7], rows[2]), strict=True):
        filled = row.model_copy(update={"stage": "rollout", "fingerprint": FP, "run_id": "r1"})
        assert back.model_dump_json() == filled.model_dump_json()  # as JSON, where NaN equals NaN


def test_append_is_idempotent_by_fingerprint_and_shard(store: str, make: Make) -> None:
    buffer = TrajectoryBuffer(store)
    assert not buffer.has(FP)
    buffer.append([make(0)], stage="rollout", fingerprint=FP)
    again = buffer.append([make(1)], stage="rollout", fingerprint=FP)
    assert again.skipped
    assert again.rows == 0
    buffer.append([make(1)], stage="rollout", fingerprint=FP, shard=1)
    assert buffer.has(FP)
    assert buffer.has(FP, 1)
    assert not buffer.has(FP, 2)
    assert len(buffer.ids(FP)) == 2


def test_an_empty_shard_counts_as_appended(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    assert buffer.append([], stage="s", fingerprint="f").rows == 0
    assert buffer.has("f")


def test_concurrent_appends_lose_and_double_nothing(store: str, make: Make) -> None:
    def one(shard: int) -> int:
        # every shard is sent twice, as two runs of one stage would
        return TrajectoryBuffer(store).append([make(shard // 2)], stage="s", fingerprint=FP, shard=shard // 2).rows

    with ThreadPoolExecutor(8) as pool:
        written = sum(pool.map(one, range(16)))
    assert written == 8
    assert len(TrajectoryBuffer(store).ids(FP)) == len(set(TrajectoryBuffer(store).ids(FP))) == 8


def test_an_arrow_table_is_appended_and_conformed(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    table = to_table([make(i) for i in range(5)], TRAJECTORY_SCHEMA)
    buffer.append(table, stage="s", fingerprint="f")
    assert buffer.read(buffer.ids("f"), ["input_ids"])["input_ids"].to_pylist() == table["input_ids"].to_pylist()
    with pytest.raises(StoreError, match="did you mean 'reward'"):
        buffer.append(table.append_column("rewrd", pa.nulls(5)), stage="s", fingerprint="g")
    with pytest.raises(StoreError, match="lacks the column reward"):
        buffer.append(table.drop_columns(["reward"]), stage="s", fingerprint="g")


def test_an_error_of_the_iterator_leaves_the_table_as_it_was(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(0)], stage="s", fingerprint="a")
    before = buffer.version

    def broken():  # type: ignore[no-untyped-def]
        for i in range(3000):
            yield make(i + 1)
        raise RuntimeError("engine died")

    with pytest.raises(RuntimeError, match="engine died"):
        buffer.append(broken(), stage="s", fingerprint="b")
    assert buffer.version == before
    assert not buffer.has("b")


def test_unknown_ids_name_the_nearest(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(i) for i in range(20)], stage="rollout", fingerprint=FP)
    with pytest.raises(UnknownTrajectoryError, match="did you mean rollout-01234567-00001") as caught:
        buffer.get("rollout-01234567-00021")
    assert isinstance(caught.value, KeyError)
    with pytest.raises(StoreError, match="did you mean 'reward'"):
        buffer.read(["x"], ["rewards"])


def test_questions_to_an_absent_store_write_nothing(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    assert buffer.version is None
    assert not buffer.has("f")
    assert buffer.ids("f") == []
    with pytest.raises(NoBufferError, match="no trajectory buffer"):
        buffer.scan()
    with pytest.raises(NoBufferError):
        buffer.sql("select 1 from trajectories")
    assert not (tmp_path / "store").exists()


def test_a_newer_schema_is_refused(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(0)], stage="s", fingerprint="f")
    buffer.table().alter.set_table_properties({VERSION_PROPERTY: "99"}, raise_if_not_exists=False)
    for call in (buffer.scan, lambda: buffer.append([make(1)], stage="s", fingerprint="g")):
        with pytest.raises(NewerSchemaError, match="schema_version 99"):
            call()


def test_digest_is_over_content_alone(tmp_path: Path, make: Make) -> None:
    rows = [make(i) for i in range(600)]
    first, two = TrajectoryBuffer(tmp_path / "one"), TrajectoryBuffer(tmp_path / "two")
    first.append(rows, stage="s", fingerprint="f", run_id="monday")
    later = [make(i) for i in reversed(range(600))]  # another created_at, another order, other files
    for shard in range(3):
        two.append(later[shard * 200 : (shard + 1) * 200], stage="s", fingerprint="f", shard=shard, run_id="friday")
    assert first.digest(first.ids("f")) == two.digest(two.ids("f"))
    assert first.digest(first.ids("f")[1:]) != two.digest(two.ids("f"))


def test_sql_and_time_travel(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    first = buffer.append([make(i) for i in range(4)], stage="a", fingerprint="f").version
    buffer.append([make(i, "b") for i in range(4)], stage="b", fingerprint="g")
    query = "select stage, count(*) as n, avg(success) as rate from trajectories group by stage order by stage"
    assert buffer.sql(query).rows() == [("a", 4, 0.5), ("b", 4, 0.5)]
    assert buffer.sql(query, version=first).rows() == [("a", 4, 0.5)]
    assert buffer.scan(version=first).select(pl.len()).collect().item() == 4
    with pytest.raises(StoreError, match="no version 99"):
        buffer.scan(99)
    with pytest.raises(StoreError, match="query failed"):
        buffer.sql("select nonsense from trajectories")


def test_contents_are_digested_by_the_threads_that_write(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that digests of one file are made while another one is compressed, and rows of a third are checked."""
    threads: list[str] = []

    def spy(rows: pa.Table) -> pa.Table:
        threads.append(threading.current_thread().name)
        return with_content(rows)

    monkeypatch.setattr("agentrl.datastore.table.append.with_content", spy)
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(0)], stage="s", fingerprint="a")
    assert threads
    assert threading.main_thread().name not in threads
