"""What other programs read of the buffer: torch's loaders, Ray, DuckDB, Polars and Daft."""

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_rows import Make
from torch.utils.data import DataLoader

import agentrl
from agentrl.datastore.errors import StoreError

COLUMNS = ["trajectory_id", "messages", "input_ids", "action_mask", "logprobs"]
ROWS = 23


def filled(path: str | Path, make: Make) -> agentrl.Store:
    store = agentrl.Store(str(path))
    for part in range(2):  # two files
        rows = [make(number) for number in range(ROWS) if number % 2 == part]
        store.buffer.append(rows, stage="rollout", fingerprint=f"f{part}")
    return store


@pytest.fixture
def filled_store(tmp_path: Path, make: Make) -> agentrl.Store:
    return filled(tmp_path / "store", make)


def ids_of(batches: Any) -> list[str]:
    return [name for batch in batches for name in batch["trajectory_id"]]


def test_a_stream_gives_rows_as_they_are_stored(filled_store: agentrl.Store) -> None:
    batches = list(filled_store.stream(4, split=None, columns=COLUMNS))
    names = ids_of(batches)
    assert sorted(names) == filled_store.rows.collect()["trajectory_id"].sort().to_list()
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4, 4, 4, 3]
    for batch in batches:
        for number, name in enumerate(batch["trajectory_id"]):
            row = filled_store.row(name)
            assert batch["input_ids"][number].tolist() == row.input_ids
            assert batch["action_mask"][number].tolist() == row.action_mask
            assert batch["messages"][number][0]["content"] == row.messages[0].content


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 11), workers=st.integers(1, 3), rank=st.integers(0, 1))
def test_workers_in_turn_give_the_order_of_one_from_any_position(
    filled_store: agentrl.Store, stop: int, workers: int, rank: int
) -> None:
    def stream(position: dict[str, Any] | None) -> Any:
        return filled_store.stream(
            4, split=None, columns=["trajectory_id"], epochs=2, position=position, rank=rank, world=2
        ).batches

    whole = [batch.rows["trajectory_id"].to_pylist() for batch in stream(None)]
    begun = list(stream(None))[:stop]
    last = begun[-1].next if begun else None
    position = {**vars(last), "rows": filled_store.stream(4, split=None).rows} if last else None
    shares = [stream(position).share(worker, workers) for worker in range(workers)]
    rest = []
    while batch := next(shares[len(rest) % workers], None):
        rest.append(batch.rows["trajectory_id"].to_pylist())
    assert whole == [batch.rows["trajectory_id"].to_pylist() for batch in begun] + rest


def test_a_position_is_of_the_rows_that_it_was_taken_among(filled_store: agentrl.Store, make: Make) -> None:
    version = filled_store.buffer.version
    options: dict[str, Any] = {"split": None, "columns": ["trajectory_id"]}
    whole = list(filled_store.stream(4, **options))
    filled_store.buffer.append([make(99)], stage="rollout", fingerprint="later")
    with pytest.raises(ValueError, match=r"among other rows.*at=N"):
        filled_store.stream(4, position=whole[1]["position"], **options)
    rest = filled_store.stream(4, position=whole[1]["position"], at=version, **options)
    assert ids_of(rest) == ids_of(whole[2:])


@pytest.mark.slow
def test_a_loader_with_workers_that_is_stopped_goes_on_without_loss(filled_store: agentrl.Store) -> None:
    def loader(**options: Any) -> Any:
        stream = filled_store.stream(3, split=None, columns=["trajectory_id", "input_ids"], epochs=2, seed=5, **options)
        return DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")

    whole = ids_of(filled_store.stream(3, split=None, columns=["trajectory_id"], epochs=2, seed=5))
    begun = []
    for batch in loader():  # two workers have fetched more than is taken here
        begun.append(batch)
        if len(begun) == 5:
            break
    rest = list(loader(position=begun[-1]["position"]))
    assert ids_of([*begun, *rest]) == whole
    ranks = [ids_of(loader(rank=rank, world=2)) for rank in range(2)]
    assert sorted(ranks[0] + ranks[1]) == sorted(whole)


def test_duckdb_and_polars_read_messages_tokens_and_masks_typed(filled_store: agentrl.Store) -> None:
    table = filled_store.buffer.table()
    assert (table.protocol().min_reader_version, table.protocol().reader_features) == (1, None)
    query = """
        select trajectory_id, messages[1].content, input_ids, action_mask, list_sum(action_mask::int[])
        from read_parquet(?) order by trajectory_id"""
    rows = duckdb.execute(query, [table.file_uris()]).fetchall()
    assert len(rows) == ROWS
    for name, question, tokens, mask, sampled in rows:
        row = filled_store.row(name)
        assert (question, tokens, mask) == (row.messages[0].content, row.input_ids, row.action_mask)
        assert sampled == row.n_action_tokens
    frame = pl.scan_delta(filled_store.buffer.uri).select(COLUMNS).collect()
    assert frame.schema["action_mask"] == pl.List(pl.Boolean)
    assert frame.height == ROWS


@pytest.mark.slow
def test_ray_reads_the_table_and_a_selection(store: str, make: Make) -> None:
    import ray

    rows = filled(store, make)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        whole = rows.to_ray_dataset(COLUMNS).take_all()
        good = rows.to_ray_dataset(COLUMNS, where="success").take_all()
    finally:
        ray.shutdown()
    assert sorted(row["trajectory_id"] for row in whole) == rows.rows.collect()["trajectory_id"].sort().to_list()
    expected = rows.rows.filter(pl.col("success")).collect()["trajectory_id"].sort().to_list()
    assert sorted(row["trajectory_id"] for row in good) == expected
    for read in (whole[0], good[0]):
        row = rows.row(read["trajectory_id"])
        assert (list(read["input_ids"]), list(read["action_mask"])) == (row.input_ids, row.action_mask)
        assert read["messages"][0]["content"] == row.messages[0].content


def test_what_is_not_installed_or_no_column_is_said(filled_store: agentrl.Store) -> None:
    with pytest.raises(StoreError, match=r"daft.*is not installed here.*pip install daft"):
        filled_store.to_daft()
    with pytest.raises(StoreError, match=r"no column 'mesages'.*messages"):
        filled_store.to_ray_dataset(["mesages"])


@pytest.mark.adapters
def test_daft_reads_messages_tokens_and_masks_typed(filled_store: agentrl.Store) -> None:
    script = """
        import daft, json, sys
        frame = daft.read_deltalake(sys.argv[1]).select("trajectory_id", "messages", "input_ids", "action_mask")
        print(json.dumps(frame.to_arrow().to_pylist()))"""
    command = [os.environ["DAFT_PYTHON"], "-c", textwrap.dedent(script), filled_store.buffer.uri]
    env = os.environ | {"DO_NOT_TRACK": "1"}
    printed = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300).stdout
    rows = json.loads(printed.splitlines()[-1])
    assert len(rows) == ROWS
    for read in rows:
        row = filled_store.row(read["trajectory_id"])
        assert (read["input_ids"], read["action_mask"]) == (row.input_ids, row.action_mask)
        assert read["messages"][0]["content"] == row.messages[0].content
