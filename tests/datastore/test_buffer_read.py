import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from store_rows import FP, Make, build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.read import lookup, scalars
from agentrl.datastore.read.batches import Position
from agentrl.datastore.table.row_digests import CONTENT
from agentrl.datastore.upkeep import compact
from agentrl.schemas.trajectory import Message, Role


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryBuffer:
    made = TrajectoryBuffer(tmp_path_factory.mktemp("store"))
    for shard in range(3):
        rows = [build(i) for i in range(shard * 150, shard * 150 + 150)]
        made.append(rows, stage="rollout", fingerprint=FP, shard=shard)
    return made


def test_rows_are_found_in_any_file_and_order(buffer: TrajectoryBuffer) -> None:
    ids = [f"rollout-01234567-{i:06d}" for i in (449, 0, 127, 128, 300, 0)]
    assert [row.trajectory_id for row in buffer.get_many(ids)] == ids  # an id may be asked for twice
    assert buffer.read(ids, ["reward", "input_ids"]).column_names == ["reward", "input_ids"]
    assert buffer.read([], ["reward"]).num_rows == 0


def test_ids_may_be_columns_and_each_is_looked_for_where_it_may_lie(
    buffer: TrajectoryBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(rows: pa.ChunkedArray, value_set: pa.Array) -> pa.ChunkedArray:
        sizes.append(len(value_set))
        return is_in(rows, value_set=value_set)

    is_in = pc.is_in
    monkeypatch.setattr(lookup.pc, "is_in", counted)
    ids = [f"rollout-01234567-{i:06d}" for i in range(449, -1, -1)]
    parts = pa.chunked_array([ids[:100], ids[100:]])
    assert buffer.read(parts, ["trajectory_id"])["trajectory_id"].to_pylist() == ids
    assert sum(sizes) == 450  # three files; asking each for all ids took most of the time of large selections
    assert buffer.digest(parts) == buffer.digest(ids)


def test_a_reader_sees_what_was_appended_after_it_was_made(tmp_path: Path, make: Make) -> None:
    reader, writer = TrajectoryBuffer(tmp_path), TrajectoryBuffer(tmp_path)
    writer.append([make(0)], stage="s", fingerprint="a")
    assert reader.get(make(0).trajectory_id)
    writer.append([make(1)], stage="s", fingerprint="b")
    assert reader.get(make(1).trajectory_id)


def test_views(buffer: TrajectoryBuffer) -> None:
    steps = buffer.sql("select * from steps where trajectory_id = 'rollout-01234567-000007' order by step")
    assert steps["step"].to_list() == [0, 1]
    assert steps["observation"].to_list() == ["Bob 7", ""]
    assert steps["content"].to_list() == ["", "Bob 7"]
    assert steps["n_tool_calls"].to_list() == [1, 0]
    assert steps["n_tokens"].to_list() == [4, 2]
    calls = buffer.sql("select name, count(*) as n, avg(success) as rate from tool_calls group by name")
    assert calls.rows() == [("find", 450, 0.5)]
    table = buffer.sql("select arguments, observation from tool_calls where trajectory_id = 'rollout-01234567-000007'")
    assert table.rows() == [('{"who": "Ann", "rel": "boss"}', "Bob 7")]


def test_views_of_rows_without_messages_or_calls(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    bare = {"input_ids": [], "action_mask": [], "logprobs": []}
    say = [Message(role=Role.USER, content="hi"), Message(role=Role.ASSISTANT, content="ho")]
    buffer.append([make(0, messages=[], **bare), make(1, messages=say, **bare)], stage="s", fingerprint="f")
    assert buffer.sql("select content from steps").rows() == [("ho",)]
    assert buffer.sql("select * from tool_calls").height == 0


def test_sql_errors_name_the_columns(buffer: TrajectoryBuffer) -> None:
    with pytest.raises(StoreError, match="columns of trajectories: trajectory_id"):
        buffer.sql("select nonsense from trajectories")
    with pytest.raises(StoreError, match="did you mean 'reward'"):
        buffer.sql("select rewardd from trajectories")
    with pytest.raises(StoreError, match="query failed"):
        buffer.sql("select from where")


def test_time_travel_and_diff(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    first = buffer.append([make(0)], stage="a", fingerprint="f").version
    moment = datetime.now(UTC)
    second = buffer.append([make(i, "b") for i in (1, 2)], stage="b", fingerprint="g").version
    assert buffer.scan(moment).select(pl.len()).collect().item() == 1
    assert buffer.diff(first, second).to_dicts() == [{"stage": "b", "fingerprint": "g", "added": 2, "removed": 0}]
    assert buffer.diff(second, first).to_dicts() == [{"stage": "b", "fingerprint": "g", "added": 0, "removed": 2}]
    assert [commit["rows"] for commit in buffer.history()] == [2, 1, None]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 60), size=st.integers(1, 17), world=st.integers(1, 5), seed=st.integers(0, 9))
def test_every_row_once_per_epoch_whatever_the_readers(
    buffer: TrajectoryBuffer, rows: int, size: int, world: int, seed: int
) -> None:
    ids = [f"rollout-01234567-{i:06d}" for i in range(rows)]
    seen: dict[int, list[str]] = {0: [], 1: []}
    for rank in range(world):
        options = {"seed": seed, "epochs": 2, "columns": ["trajectory_id"], "rank": rank, "world": world}
        for batch in buffer.batches(ids, size, **options):
            seen[batch.epoch] += batch.rows["trajectory_id"].to_pylist()
    assert sorted(seen[0]) == sorted(seen[1]) == ids
    if rows > 20 and world == 1:
        assert seen[0] != seen[1]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 19), world=st.integers(1, 3))
def test_batches_resume_at_any_point(buffer: TrajectoryBuffer, stop: int, world: int) -> None:
    ids = [f"rollout-01234567-{i:06d}" for i in range(50)]
    options = {"seed": 3, "epochs": 2, "rank": world - 1, "world": world}
    whole = [batch.rows for batch in buffer.batches(ids, 5, **options)]
    position, read = Position(), []
    for batch in buffer.batches(ids, 5, **options):
        if len(read) == stop:
            break
        read.append(batch.rows)
        position = batch.next
    read += [batch.rows for batch in buffer.batches(ids, 5, **options, start=position)]
    assert [rows["trajectory_id"] for rows in read] == [rows["trajectory_id"] for rows in whole]


def test_batches_refuse_nonsense(buffer: TrajectoryBuffer) -> None:
    with pytest.raises(ValueError, match="rank is below world"):
        buffer.batches(["a"], 1, rank=2, world=2)
    with pytest.raises(ValueError, match="twice"):
        buffer.batches(["a", "a"], 1)


QUERIES: list[Callable[[pl.LazyFrame], pl.LazyFrame]] = [
    lambda rows: rows.group_by("task_id").agg(pl.col("reward").mean(), pl.len()),
    lambda rows: rows.select(pl.len()),
    lambda rows: rows.filter(pl.col("success"), pl.col("n_steps") > 1).select("trajectory_id", "reward"),
    lambda rows: rows.filter(pl.col("messages").list.len() > 2).select("trajectory_id", "prompt"),
    lambda rows: rows.sort("trajectory_id").head(7).select("trajectory_id", "input_ids"),
    lambda rows: rows.sort("trajectory_id").slice(3, 5),
    lambda rows: rows.with_row_index().select(pl.col("index").sum()),
    lambda rows: rows.select("env").head(3),
    lambda rows: rows.join(rows.group_by("task_id").agg(pl.len()), on="task_id").select("trajectory_id", "len"),
]


@pytest.mark.parametrize("query", QUERIES)
def test_a_scan_answers_as_the_files_do_from_memory_too(
    buffer: TrajectoryBuffer, query: Callable[[pl.LazyFrame], pl.LazyFrame]
) -> None:
    expected = query(pl.scan_delta(buffer.table()).drop(CONTENT)).collect()
    for _ in range(2):  # the second time from memory
        assert_frame_equal(query(buffer.scan()).collect(), expected, check_row_order=False)
        assert_frame_equal(query(buffer.scan()).collect(engine="streaming"), expected, check_row_order=False)


def test_columns_in_memory_follow_appends_and_old_versions(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)

    def found(version: int | None = None) -> list[str]:
        return sorted(buffer.scan(version).select("trajectory_id").collect()["trajectory_id"].to_list())

    ids = [make(i).trajectory_id for i in range(6)]
    versions = []
    for shard in range(3):
        made = buffer.append([make(2 * shard), make(2 * shard + 1)], stage="s", fingerprint="f", shard=shard)
        versions.append(made.version)
        assert found() == ids[: 2 * shard + 2]
    assert found(versions[0]) == ids[:2]
    assert found() == ids
    compact(buffer)
    assert found() == ids
    assert found(versions[1]) == ids[:4]


def test_columns_beyond_the_limit_are_read_each_time(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scalars, "LIMIT_BYTES", -1)
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(0)], stage="s", fingerprint="f")
    assert buffer.scan().select("env").collect().height == 1
    assert buffer._scalars is not None
    assert not buffer._scalars._held.columns


def test_a_table_made_anew_in_the_same_place_is_noticed(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(2):
        buffer.append([make(shard)], stage="s", fingerprint="f", shard=shard)
    assert buffer.scan().select("trajectory_id").collect().height == 2
    shutil.rmtree(tmp_path / "trajectories")
    assert buffer.version is None
    TrajectoryBuffer(tmp_path).append([make(5)], stage="s", fingerprint="f")
    assert buffer.get(make(5).trajectory_id).trajectory_id == make(5).trajectory_id
    assert buffer.scan().select("trajectory_id").collect().height == 1


def test_threads_that_share_a_buffer_see_what_they_appended(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)

    def append_and_look(shard: int) -> None:
        row = make(shard)
        buffer.append([row], stage="s", fingerprint="f", shard=shard)
        assert buffer.get(row.trajectory_id).trajectory_id == row.trajectory_id
        rows = buffer.scan()  # columns from memory and from files are of one version
        joined = rows.select("trajectory_id").join(rows.select("trajectory_id", "input_ids"), on="trajectory_id")
        assert joined.collect().height == rows.select("env").collect().height > 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append_and_look, range(16)))
    assert buffer.scan().select("trajectory_id").collect().height == 16


def test_a_used_buffer_goes_to_another_process(buffer: TrajectoryBuffer) -> None:
    buffer.scan().select("env").collect()
    assert pickle.loads(pickle.dumps(buffer)).version == buffer.version


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_few_rows_are_cut_out_and_many_are_filtered(asked: list[bool]) -> None:
    table = pa.table({"place": range(len(asked))})
    result = lookup._chosen(table, pa.chunked_array([asked]))
    assert result["place"].to_pylist() == [position for position, request in enumerate(asked) if request]
