"""Copies of scalar columns on this machine: what one process has read, the next one finds."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_rows import Make

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.unfinished import leftovers
from agentrl.datastore.read import scalar_cache as scalar_copies
from agentrl.datastore.read.scalar_cache import ScalarCopies
from agentrl.datastore.upkeep import compact, vacuum

NAMES = ["trajectory_id", "success", "created_at", "parent_id", "policy_version", "reward"]


@pytest.fixture
def parquet(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Files of which columns are read from Parquet."""
    read: list[Any] = []
    scan = pl.scan_parquet

    def counted(source: Any, **options: Any) -> pl.LazyFrame:
        read.append(source)
        return scan(source, **options)

    monkeypatch.setattr(pl, "scan_parquet", counted)
    return read


def filled(store: str | Path, make: Make, shards: int = 2) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(store)
    for shard in range(shards):
        buffer.append([make(2 * shard), make(2 * shard + 1)], stage="s", fingerprint="f", shard=shard)
    return buffer


def asked(store: str | Path, names: list[str] = NAMES) -> pl.DataFrame:
    """As a process asks that has just opened the buffer."""
    return TrajectoryBuffer(store).scan().select(names).collect().sort("trajectory_id")


def test_the_next_process_reads_no_parquet(store: str, make: Make, parquet: list[Any]) -> None:
    filled(store, make)
    first = asked(store)
    assert len(parquet) == 2
    again = asked(store)
    assert len(parquet) == 2
    assert again.equals(first)
    assert again.schema == first.schema
    filled(store, make, 3)
    assert asked(store)["trajectory_id"].to_list() == [make(number).trajectory_id for number in range(6)]
    assert len(parquet) == 3, "only the new file is read"
    assert asked(store, [*NAMES, "env"]).height == 6
    assert len(parquet) == 6, "only the new column is read"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_copy_that_is_not_whole_is_read_from_parquet(
    tmp_path: Path, make: Make, parquet: list[Any], damage: str
) -> None:
    buffer = filled(tmp_path, make)
    first = asked(tmp_path)
    path = sorted(ScalarCopies(buffer.storage).folder.rglob("success.arrow"))[0]
    data = path.read_bytes()
    changed = data.replace(b"\x01", b"\x00", 1)
    path.write_bytes({"cut": data[:-20], "changed": changed, "empty": b""}[damage])
    assert asked(tmp_path).equals(first)
    assert len(parquet) == 3
    assert asked(tmp_path).equals(first)
    assert len(parquet) == 3


def test_a_store_that_takes_no_files_is_read(tmp_path: Path, make: Make, parquet: list[Any]) -> None:
    buffer = filled(tmp_path, make)
    ScalarCopies(buffer.storage).folder.write_text("a file where the folder should be")
    assert asked(tmp_path).equals(asked(tmp_path))
    assert len(parquet) == 4


def test_a_copy_counts_only_while_its_data_file_is_there(tmp_path: Path, make: Make) -> None:
    filled(tmp_path, make)
    asked(tmp_path)
    next((tmp_path / "trajectories").glob("*.parquet")).unlink()
    with pytest.raises((OSError, pl.exceptions.PolarsError)):
        asked(tmp_path)


def test_vacuum_removes_copies_of_files_that_are_gone(tmp_path: Path, make: Make, parquet: list[Any]) -> None:
    buffer = filled(tmp_path, make)
    first = asked(tmp_path)
    compact(buffer)
    assert asked(tmp_path).equals(first)
    copies = ScalarCopies(buffer.storage).folder
    assert len(list(copies.iterdir())) == 3
    vacuum(buffer, retention_hours=0)
    assert len(list(copies.iterdir())) == 3, "a dry run"
    vacuum(buffer, retention_hours=0, dry_run=False)
    [left] = copies.iterdir()
    assert (tmp_path / "trajectories" / left.name).exists()
    assert leftovers(buffer.storage) == []
    read = len(parquet)
    assert asked(tmp_path).equals(first)
    assert len(parquet) == read


@given(st.lists(st.none() | st.text()), st.lists(st.none() | st.booleans()), st.lists(st.none() | st.floats()))
def test_columns_come_back(texts: list[str | None], flags: list[bool | None], numbers: list[float | None]) -> None:
    import tempfile

    kinds = {"texts": (texts, pl.String), "flags": (flags, pl.Boolean), "numbers": (numbers, pl.Float64)}
    with tempfile.TemporaryDirectory() as folder:
        for name, (values, kind) in kinds.items():
            column = pl.Series(name, values, dtype=kind)
            path = Path(folder, name)
            path.write_bytes(scalar_copies._bytes(column))
            result = scalar_copies._column(path)
            assert result is not None
            assert result.dtype == column.dtype
            assert result.equals(column, null_equal=True, check_names=False)
