"""Copies of token columns on this machine: the same rows as from Parquet, or none."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import FP, Make

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.unfinished import leftovers
from agentrl.datastore.read.token_cache import COLUMNS, Copies, warm
from agentrl.datastore.upkeep import compact


def filled(store: str | Path, make: Make, shards: int = 3) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        rows = [make(shard + shards * i, input_ids=[shard] * 12) for i in range(20)]  # files overlap in their ids
        buffer.append(rows, stage="s", fingerprint=FP, shard=shard)
    return buffer


def parquet_reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every read of row groups."""
    matches: list[object] = []
    read = pq.ParquetFile.read_row_groups

    def counted(self: pq.ParquetFile, *args: object, **options: object) -> pa.Table:
        matches.append(args)
        return read(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    return matches


def same(first: pa.Table, other: pa.Table) -> bool:
    if first.schema != other.schema or first.num_rows != other.num_rows:
        return False
    flat = [[table["logprobs"].combine_chunks().flatten().to_numpy() for table in (first, other)]]
    rest = [name for name in first.schema.names if name != "logprobs"]
    return first.select(rest).equals(other.select(rest)) and all(np.array_equal(a, b, equal_nan=True) for a, b in flat)


def test_copies_give_the_rows_of_parquet(store: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(store, make)
    ids = np.random.default_rng(0).permutation(buffer.ids(FP))[:37].tolist()
    before = buffer.read(ids, COLUMNS)
    assert warm(buffer)["copied"] == 3
    reads = parquet_reads(monkeypatch)
    assert same(TrajectoryBuffer(store).read(ids, COLUMNS), before)
    assert same(buffer.read(ids, ["logprobs"]), before.select(["logprobs"]))
    assert reads == []
    assert buffer.get(ids[0]).trajectory_id == ids[0]  # all columns, which no copy has
    assert reads != []


def test_what_has_no_copy_is_read_from_parquet(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(tmp_path, make)
    before = buffer.read(buffer.ids(FP), COLUMNS)
    warm(buffer)
    first, second, _ = sorted(Copies(buffer.storage).folder.iterdir())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-50])  # torn
    buffer.append([make(900)], stage="s", fingerprint=FP, shard=9)
    reads = parquet_reads(monkeypatch)
    assert same(buffer.read(before["trajectory_id"].to_pylist(), COLUMNS), before)
    assert len(reads) == 2
    assert buffer.read([make(900).trajectory_id], COLUMNS).num_rows == 1


def test_warm_follows_the_table(tmp_path: Path, make: Make) -> None:
    buffer = filled(tmp_path, make)
    assert warm(buffer) | {"bytes": 0} == {"files": 3, "copied": 3, "removed": 0, "bytes": 0}
    assert warm(buffer)["copied"] == 0
    ids = buffer.ids(FP)
    before = buffer.read(ids, COLUMNS)
    compact(buffer)
    assert warm(buffer) | {"bytes": 0} == {"files": 1, "copied": 1, "removed": 3, "bytes": 0}
    assert same(buffer.read(ids, COLUMNS), before)
    assert not [path for path in leftovers(buffer.storage) if "tokens" in str(path)]
