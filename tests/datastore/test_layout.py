"""What grows with the rows of a table, and what with its bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import FP, Make

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.read import lookup
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.table.writer import GROUP_ROWS
from agentrl.datastore.upkeep import check, compact, compaction
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA


def groups(folder: Path) -> list[int]:
    """Rows of each row group."""
    footers = [pq.read_metadata(file) for file in sorted((folder / FOLDER).glob("*.parquet"))]
    return [footer.row_group(number).num_rows for footer in footers for number in range(footer.num_row_groups)]


def test_footers_grow_with_bytes_and_not_with_rows(tmp_path: Path, make: Make) -> None:
    small = TrajectoryBuffer(tmp_path / "small")
    small.append([make(i) for i in range(600)], stage="s", fingerprint=FP)
    assert max(groups(tmp_path / "small")) > 3 * GROUP_ROWS
    large = TrajectoryBuffer(tmp_path / "large")
    text = "x" * 20_000
    large.append([make(i, prompt=text) for i in range(2 * GROUP_ROWS + 8)], stage="s", fingerprint=FP)
    assert groups(tmp_path / "large") == [GROUP_ROWS, GROUP_ROWS, 8]


def test_footers_in_memory_are_bounded(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(8):
        buffer.append([make(8 * shard + i) for i in range(8)], stage="s", fingerprint=FP, shard=shard)
    file = next((tmp_path / FOLDER).glob("*.parquet"))
    limit = int(2.5 * pq.read_metadata(file).serialized_size)
    monkeypatch.setattr(lookup, "FOOTER_BYTES", limit)
    ids = buffer.ids(FP)
    for seed in range(3):
        asked = np.random.default_rng(seed).permutation(ids).tolist()
        assert [row.trajectory_id for row in buffer.get_many(asked)] == asked
        assert buffer.get(asked[0]).trajectory_id == asked[0]
    kept = buffer._lookup._footers.values()
    assert 0 < sum(item.serialized_size for item in kept) <= limit


def test_footers_that_fit_stay_when_all_files_are_read_in_turn(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(8):
        buffer.append([make(8 * shard + i) for i in range(8)], stage="s", fingerprint=FP, shard=shard)
    file = next((tmp_path / FOLDER).glob("*.parquet"))
    monkeypatch.setattr(lookup, "FOOTER_BYTES", int(5.5 * pq.read_metadata(file).serialized_size))
    ids = buffer.ids(FP)
    buffer.get_many(ids)
    parsed: list[object] = []
    opened = pq.ParquetFile

    def opening(source: object, metadata: object = None, **options: object) -> pq.ParquetFile:
        parsed.extend([source] if metadata is None else [])
        return opened(source, metadata=metadata, **options)

    monkeypatch.setattr(lookup.pq, "ParquetFile", opening)
    buffer.get_many(ids)
    assert len(parsed) == 3  # those that there is no room for
    compact(buffer)
    buffer.get_many(ids)
    parsed.clear()
    buffer.get_many(ids)
    assert not parsed  # files that left the table take no room


def test_small_files_become_one_whatever_their_number_of_rows(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    item = to_table([make(0)], TRAJECTORY_SCHEMA).take(pa.array(np.zeros(6_000, dtype=np.int64)))
    for shard in range(2):
        ids = pa.array([f"row-{shard}-{number:04d}" for number in range(6_000)])
        made = item.set_column(0, TRAJECTORY_SCHEMA.field(0), ids)
        buffer.append(made, stage="s", fingerprint=FP, shard=shard)
    assert compact(buffer)["files_after"] == 1
    assert compact(buffer)["files_before"] == 1


def test_a_compaction_that_ends_half_way_keeps_the_files_that_it_merged(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(6):
        buffer.append([make(8 * shard + i) for i in range(8)], stage="s", fingerprint=FP, shard=shard)
    sizes = [path.stat().st_size for path in (tmp_path / FOLDER).glob("*.parquet")]
    monkeypatch.setattr(compaction, "GOAL_BYTES", int(2.5 * min(sizes)))  # three files make a group
    rows_of, merged = compaction._sorted, []

    def torn(*of: Any) -> Iterator[pa.Table]:
        merged.append(of)
        for table in rows_of(*of):
            yield table
            if len(merged) == 2:
                raise OSError("No space left on device")

    monkeypatch.setattr(compaction, "_sorted", torn)
    with pytest.raises(OSError, match="No space left"):
        compact(buffer)
    assert len(buffer.table().file_uris()) == 4
    assert not list((tmp_path / FOLDER).glob(".*"))  # nothing half written stays
    assert len(list((tmp_path / FOLDER).glob("*.parquet"))) == 7
    assert check(buffer) == []
    assert [row.trajectory_id for row in buffer.get_many(buffer.ids(FP))] == buffer.ids(FP)


def test_a_file_of_a_compaction_is_written_row_group_by_row_group(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes are on the disk before the last rows are read."""
    buffer = TrajectoryBuffer(tmp_path)
    for shard in range(3):
        buffer.append([make(8 * shard + i) for i in range(8)], stage="s", fingerprint=FP, shard=shard)
    monkeypatch.setattr(compaction, "FILE_BYTES", 1)
    rows_of, written = compaction._sorted, []

    def watched(*of: Any) -> Iterator[pa.Table]:
        for table in rows_of(*of):
            yield table
            written.append(sum(path.stat().st_size for path in (tmp_path / FOLDER).glob(".*.tmp")))

    monkeypatch.setattr(compaction, "_sorted", watched)
    assert compact(buffer)["files_after"] == 1
    assert len(written) == 3
    assert 0 < written[0] < written[1] < written[2]
