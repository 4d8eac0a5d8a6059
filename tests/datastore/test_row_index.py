"""The index of ids: it finds what a search finds, is believed only if it is right, and may be lost at any time."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import FP, build
from xxhash import xxh3_128_digest

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.unfinished import leftovers
from agentrl.datastore.errors import UnknownTrajectoryError
from agentrl.datastore.read import footers, lookup, row_index
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.table import writer
from agentrl.datastore.upkeep import compact, vacuum

KILLED = """
import os, signal, sys
from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.read import row_index

def killed(source, target):
    os.kill(os.getpid(), signal.SIGKILL)

buffer = TrajectoryBuffer(sys.argv[1])
ids = buffer.ids("0123456789abcdef")
row_index.os.replace = killed
buffer.get(ids[7])
"""


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group has eight rows."""
    monkeypatch.setattr(writer, "GROUP_ROWS", 8)
    monkeypatch.setattr(writer, "GROUP_SMALL_BYTES", 1)


def fill(store: str | Path, shards: range) -> TrajectoryBuffer:
    """Shards of 260 rows, whose ids lie among one another."""
    buffer = TrajectoryBuffer(store)
    for shard in shards:
        rows = [build(i * 10 + shard) for i in range(260)]
        buffer.append(rows, stage="rollout", fingerprint=FP, shard=shard)
    return buffer


def whole_footers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The files whose footers are parsed as a whole from now on."""
    parsed: list[object] = []
    opened = pq.ParquetFile

    def opening(source: object, metadata: object = None, **options: object) -> pq.ParquetFile:
        parsed.extend([source] if metadata is None else [])
        return opened(source, metadata=metadata, **options)

    monkeypatch.setattr(lookup.pq, "ParquetFile", opening)
    return parsed


def asked(buffer: TrajectoryBuffer, numbers: list[int]) -> None:
    """These rows are found, with what belongs to them."""
    rows = buffer.get_many([build(number).trajectory_id for number in numbers])
    assert [row.prompt for row in rows] == [build(number).prompt for number in numbers]
    assert [row.input_ids for row in rows] == [build(number).input_ids for number in numbers]


NUMBERS = [2, 1501, 40, 2592, 331, 330, 12]


def test_a_second_look_up_parses_no_whole_footer(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(store, range(3))
    asked(buffer, NUMBERS)
    parsed = whole_footers(monkeypatch)
    for reader in (buffer, TrajectoryBuffer(store)):  # the second one as another process
        for seed in range(3):
            numbers = np.random.default_rng(seed).permutation(260)[:50] * 10 + seed
            asked(reader, numbers.tolist())
    assert not parsed
    fill(store, range(3, 4))
    parsed.clear()
    asked(buffer, [*NUMBERS, 13, 2593])
    assert len(parsed) == 2  # the new file, to read it and to index it
    asked(TrajectoryBuffer(store), [*NUMBERS, 23, 2583])
    assert len(parsed) == 2


def test_old_versions_and_compactions_are_found_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fill(tmp_path, range(2))
    asked(buffer, [0, 11, 2591])
    assert compact(buffer)["files_after"] == 1
    asked(buffer, [0, 11, 2591])
    parsed = whole_footers(monkeypatch)
    asked(buffer, [*range(0, 2600, 10), *range(1, 2600, 10)])
    assert not parsed
    row = buffer.read([build(2591).trajectory_id], ["prompt"], version=2)
    assert row["prompt"].to_pylist() == [build(2591).prompt]
    with pytest.raises(UnknownTrajectoryError):
        buffer.read([build(2591).trajectory_id], version=1)
    with pytest.raises(UnknownTrajectoryError):
        buffer.get("rollout-01234567-nothing")
    fill(tmp_path, range(2, 3))
    asked(buffer, [2, 12])
    vacuum(buffer, retention_hours=0, dry_run=False)
    asked(TrajectoryBuffer(tmp_path), [0, 11, 2591, 2, 12])


def gone(path: Path) -> None:
    path.unlink()


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    data = path.read_bytes()[:-16]
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(change(table).replace_schema_metadata(table.schema.metadata))
    new = sink.getvalue().to_pybytes()
    path.write_bytes(new + xxh3_128_digest(new))


def other_rows(path: Path) -> None:
    rewritten(path, lambda table: table.set_column(0, "hash", pa.array(np.arange(len(table), dtype=np.uint64))))


def other_groups(path: Path) -> None:
    rewritten(path, lambda table: table.set_column(2, "offset", pa.array(np.full(len(table), 77, np.uint32))))


def other_group(path: Path) -> None:
    """Every row is said to be in the same row group, which exists."""
    rewritten(
        path,
        lambda table: table.set_column(2, "offset", pa.array([table["offset"][0].as_py()] * len(table), pa.uint32())),
    )


@pytest.mark.parametrize("harm", [gone, torn, flipped, other_rows, other_groups, other_group])
def test_a_lost_or_wrong_index_costs_time_alone(
    tmp_path: Path, harm: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = fill(tmp_path, range(2))
    asked(buffer, [0, 11])
    segments = list((tmp_path / "tmp/rows/trajectory_id").glob("*.arrow"))
    assert segments
    for path in segments:
        harm(path)
    asked(TrajectoryBuffer(tmp_path), [0, 11, 2590, 331])
    again = TrajectoryBuffer(tmp_path)
    asked(again, [0, 11, 2590, 331])
    parsed = whole_footers(monkeypatch)
    asked(again, [20, 51])
    assert not parsed  # it was made again


def test_a_kill_while_the_index_is_written_costs_nothing(tmp_path: Path) -> None:
    fill(tmp_path, range(1))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "tmp/rows/trajectory_id"
    assert [path.suffix for path in folder.iterdir()] == [".tmp"]
    asked(TrajectoryBuffer(tmp_path), [0, 2590])
    assert len(list(folder.glob("*.arrow"))) == 1
    assert set(folder.glob(".*.tmp")) <= set(leftovers(LocalStorage(tmp_path)))


def test_segments_are_merged_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_index, "SEGMENT_ROWS", 1100)
    buffer = fill(tmp_path, range(8))
    for shard in range(8):
        asked(TrajectoryBuffer(tmp_path), [shard, 2590 + shard])
    index = buffer._lookup._index
    assert len(index.layouts()) == 8
    assert sum(segment.rows for segment in index._segments.values()) == 8 * 260
    assert all(segment.rows <= 1100 for segment in index._segments.values())
    assert len(index._segments) <= 4
    asked(buffer, list(range(8)))


def test_small_files_are_not_indexed(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(i) for i in range(20)], stage="rollout", fingerprint=FP)
    asked(buffer, [3])
    assert not (tmp_path / "tmp/rows").exists()


@pytest.mark.parametrize("count", [1, 2, 14, 15, 16, 127, 128, 300])
def test_parts_of_footers_are_footers(tmp_path: Path, count: int) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({name: [f"{name}-{i}" for i in range(count)] for name in "abcdefghijklmnopqrst"})
    table = table.replace_schema_metadata({"agentrl": "1", "more": "\0\x19\x2c\x18"})
    pq.write_table(table, path, row_group_size=1)
    whole = pq.read_metadata(path)
    with pa.OSFile(str(path)) as file:
        parts = footers.split(file, whole)
        assert parts is not None
        layout, bounds = parts
        assert len(bounds) == count + 1
        numbers = sorted({0, count // 2, count - 1})
        places = [(int(bounds[at]), int(bounds[at + 1] - bounds[at])) for at in numbers]
        some = footers.part(file, layout, places)
        read = pq.ParquetFile(file, metadata=some).read_row_groups(range(len(numbers)))
    assert read.equals(table.take(numbers))


def test_a_footer_that_cannot_be_split_for_certain_is_not(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "a.parquet", row_group_size=1)
    pq.write_table(pa.table({"b": ["x", "y"]}), tmp_path / "b.parquet", row_group_size=1)
    with pa.OSFile(str(tmp_path / "a.parquet")) as file:
        assert footers.split(file, pq.read_metadata(tmp_path / "b.parquet")) is None


def test_all_rows_of_a_task_are_found(store: str) -> None:
    buffer = fill(store, range(2))
    expected = sorted(build(number).trajectory_id for number in (40, 41))  # t10 has the numbers 40 to 43
    for reader in (buffer, buffer, TrajectoryBuffer(store)):
        rows = reader.attempts("t10", ["trajectory_id", "prompt"])
        assert rows["trajectory_id"].to_pylist() == expected
        assert rows["prompt"].to_pylist() == [build(number).prompt for number in (40, 41)]
    assert buffer.attempts("t10").schema.names == buffer.read([expected[0]]).schema.names
    before = buffer.version
    fill(store, range(2, 4))
    buffer.append([build(9_000, task_id="t10")], stage="other", fingerprint="few", shard=0)  # a small file
    assert buffer.attempts("t10").num_rows == 5
    assert buffer.attempts("t10", version=before).num_rows == 2
    compact(buffer)
    assert TrajectoryBuffer(store).attempts("t10").num_rows == 5
    assert buffer.attempts("no such task").num_rows == 0


@pytest.mark.parametrize("harm", [gone, torn, flipped])
def test_a_lost_index_of_tasks_is_made_again(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    fill(tmp_path, range(2)).attempts("t10")
    for path in (tmp_path / "tmp/rows/task_id").glob("*.arrow"):
        harm(path)
    assert TrajectoryBuffer(tmp_path).attempts("t10").num_rows == 2
    assert len(list((tmp_path / "tmp/rows/task_id").glob("*.arrow"))) == 1
