"""Content digests of rows: computed at append, stored, and all that a selection's digest reads."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_rows import FP, Make, build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.storage.delta_paths import FOLDER
from agentrl.datastore.table.row_digests import CONTENT, VOLATILE, contents
from agentrl.datastore.table.writer import write_parquet
from agentrl.datastore.upkeep import check, compact, migrate
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, ToolCall, Trajectory, trajectory_id

OTHER = "fedcba9876543210"


def digests(rows: list[Trajectory]) -> list[bytes]:
    result: list[bytes] = contents(to_table(rows, TRAJECTORY_SCHEMA)).to_pylist()
    return result


def test_a_selections_digest_reads_no_content(tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(i) for i in range(300)], stage="s", fingerprint=FP)
    columns: set[str] = set()
    read = pq.ParquetFile.read_row_groups

    def watched(self: pq.ParquetFile, *args: Any, **options: Any) -> pa.Table:
        columns.update(options["columns"])
        return read(self, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", watched)
    buffer.digest(buffer.ids(FP))
    assert columns == {"trajectory_id", CONTENT}


def test_the_digest_follows_content_and_order(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    again = [make(i, fingerprint=OTHER, run_id="friday", policy="other") for i in range(9)]
    buffer.append([make(i) for i in range(9)], stage="s", fingerprint=FP, run_id="monday")
    buffer.append(again, stage="s", fingerprint=OTHER)
    ids, others = buffer.ids(FP), buffer.ids(OTHER)
    assert ids != others
    assert buffer.digest(ids) == buffer.digest(others)
    assert (
        len({buffer.digest(ids), buffer.digest(ids[::-1]), buffer.digest(ids[1:]), buffer.digest(ids + ids[:1])}) == 4
    )
    digest = buffer.digest(ids)
    compact(buffer)
    assert TrajectoryBuffer(tmp_path).digest(ids) == digest


def test_the_digest_is_stored_and_in_no_view(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    rows = [make(i) for i in range(3)]
    buffer.append(rows, stage="s", fingerprint=FP)
    stored = pq.read_table(next((tmp_path / FOLDER).glob("*.parquet")))
    assert stored.schema.names == [*TRAJECTORY_SCHEMA.names, CONTENT]
    assert set(stored[CONTENT].to_pylist()) == set(digests([row.model_copy(update={"stage": "s"}) for row in rows]))
    assert CONTENT not in buffer.sql("select * from trajectories").columns
    assert buffer.read(buffer.ids(FP)).schema.names == TRAJECTORY_SCHEMA.names


def test_check_finds_rows_that_are_not_what_was_appended(tmp_path: Path, make: Make) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([make(i) for i in range(3)], stage="s", fingerprint=FP)
    file = next((tmp_path / FOLDER).glob("*.parquet"))
    rows = pq.read_table(file)
    prompts = pa.chunked_array([["another", *rows["prompt"].to_pylist()[1:]]])
    index = rows.schema.get_field_index("prompt")
    write_parquet([rows.set_column(index, rows.schema.field(index), prompts)], file)
    (fault,) = check(TrajectoryBuffer(tmp_path))
    assert (fault.kind, fault.what) == ("rows", f"{rows['trajectory_id'][0]} in {file.name}")
    assert "not what was appended" in fault.advice


def test_an_older_table_has_the_digests_that_it_takes_to_this_one(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "old_store_version_1", tmp_path, dirs_exist_ok=True)
    buffer = TrajectoryBuffer(tmp_path)
    ids = sorted(buffer.scan().select("trajectory_id").collect()["trajectory_id"])
    before = buffer.digest(ids)
    migrate(buffer)
    assert buffer.digest(ids) == before


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(0, 11), st.integers(0, 12))
def test_a_rows_digest_does_not_depend_on_its_neighbours(numbers: list[int], start: int, length: int) -> None:
    rows = [build(n, input_ids=list(range(n)), tags=["x"] * (n % 3), messages=messages(n)) for n in numbers]
    table = to_table(rows, TRAJECTORY_SCHEMA)
    alone = [digests([row])[0] for row in rows]
    assert contents(table).to_pylist() == alone
    assert contents(table.slice(start, length)).to_pylist() == alone[start : start + length]
    assert contents(pa.concat_tables([table.slice(start), table])).to_pylist() == alone[start:] + alone


def messages(number: int) -> list[Message]:
    calls = [ToolCall(id=f"c{i}", name="find", arguments="{}") for i in range(number % 4)]
    return [
        Message(role="assistant", content="x" * (number % 3), tool_calls=calls[i:], reasoning=None if i % 2 else "")
        for i in range(number % 5)
    ]


CHANGES: dict[str, list[Any]] = {
    "reward": [None, 0.0, 1.0],
    "success": [None, False, True],
    "group_id": [None, "", "g"],
    "tags": [[], [""], ["", ""], ["ab"], ["a", "b"]],
    "level": [0, 1],
    "messages": [
        [],
        [Message(role="user", content="a")],
        [Message(role="user", content="a"), Message(role="user")],
        [Message(role="user"), Message(role="user", content="a")],
        [Message(role="user", content="a", reasoning="")],
        [Message(role="user", content="", reasoning="a")],
    ],
    "input_ids": [[], [0], [0, 0], [1]],
    "action_mask": [[], [False], [True]],
    "logprobs": [[], [float("nan")], [0.0]],
    "prompt": ["", "a"],
    "final_state": ["", "a"],
    "source_id": [None, "", "a"],
    "source_time": [None, datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 1, 31, tzinfo=UTC)],
    "model": [None, "", "a"],
    "prompt_tokens": [None, 0, 1],
    "cost_usd": [None, 0.0, 0.5],
}


def test_each_difference_is_one_of_content() -> None:
    for name, values in CHANGES.items():
        rows = [build(1).model_copy(update={name: value}) for value in values]
        assert len(set(digests(rows))) == len(values), name
    swapped = [build(1).model_copy(update={"prompt": a, "final_state": b}) for a, b in (("ab", "c"), ("a", "bc"))]
    assert len(set(digests(swapped))) == 2


OF_VERSION_4 = "28b6cda90cde19bf15b89e53ce6e36cf"
"""What version 4 of the schema gave for ``build(0)`` to ``build(3)``, the rows of ``old_store_version_4``."""


def migrated(folder: Path, version: int, digest: str) -> TrajectoryBuffer:
    """A store of an older version, whose four rows have a digest before it is migrated and after."""
    shutil.copytree(Path(__file__).parent / f"old_store_version_{version}", folder, dirs_exist_ok=True)
    buffer, ids = TrajectoryBuffer(folder), [build(number).trajectory_id for number in range(4)]
    assert buffer.digest(ids) == digest
    migrate(buffer)
    assert buffer.digest(ids) == digest
    return buffer


def test_columns_that_came_later_leave_the_digests_of_rows_without_them(tmp_path: Path) -> None:
    buffer = migrated(tmp_path, 4, OF_VERSION_4)
    named = [build(number, stage="other", model="m") for number in range(4)]
    buffer.append(named, stage="rollout", fingerprint="g")
    assert buffer.digest([row.trajectory_id for row in named]) != OF_VERSION_4


OF_VERSION_5 = "50d5f183eb22f711c3d8f09c4cf00bc7"
"""What version 5 gave for the rows of ``old_store_version_5``."""


def test_seconds_of_messages_leave_the_digests_as_they_were(tmp_path: Path) -> None:
    buffer = migrated(tmp_path, 5, OF_VERSION_5)
    timed = [build(number, stage="other", message_seconds=[None, 1.5, 0.25, number]) for number in range(4)]
    buffer.append(timed, stage="other", fingerprint="g")
    cut = build(4, stage="other", message_seconds=[1.0])
    buffer.append([cut, build(5, stage="other", message_seconds=[1.0] * 4)], stage="other", fingerprint="h")
    assert buffer.get(cut.trajectory_id).message_seconds is None, "whose they are is lost"
    compact(buffer)
    assert digests(timed) == digests([row.model_copy(update={"message_seconds": None}) for row in timed])
    assert [row.message_seconds for row in buffer.get_many([row.trajectory_id for row in timed])] == [
        [None, 1.5, 0.25, number] for number in range(4)
    ]


def test_a_rows_digest_does_not_follow_its_neighbours() -> None:
    without, named = build(1), build(2, model="m", cost_usd=0.5)
    assert digests([without, named]) == digests([without]) + digests([named])


def test_what_differs_between_two_runs_does_not_count() -> None:
    item = build(
        1, created_at="2026-01-01T00:00:00Z", run_id="monday", policy="p/1", parent_id=trajectory_id("a", FP, 1)
    )
    two = item.model_copy(update={"run_id": "friday", "policy": "p/2", "fingerprint": OTHER, "pipeline": "q"})
    two = two.model_copy(update={"source_file": "elsewhere.jsonl", "message_seconds": [None, 1.5, 0.1, 0.25]})
    two = two.model_copy(update={"created_at": build(1).created_at, "parent_id": trajectory_id("a", OTHER, 1)})
    assert all(getattr(item, name) != getattr(two, name) for name in VOLATILE)
    assert digests([item]) == digests([two])
