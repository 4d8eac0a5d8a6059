"""Training rows as columns: files read by position, and rows checked all at once."""

from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCABULARY, random_rows, small_policy

from agentrl.schemas.training import TrainingRow
from agentrl.training.batch import TrainingError, check_rows, collate, unit_starts
from agentrl.training.loop import epochs
from agentrl.training.rows import TrainingRows, holds_true, write_rows


def text(rows: TrainingRows) -> str:
    """All that rows hold; NaN equals NaN."""
    return str(rows.table().to_pylist())


def test_a_file_gives_the_rows_of_memory_and_reads_only_those_asked_for(tmp_path: Path) -> None:
    rows = random_rows(40)
    whole = TrainingRows.of(rows)
    parts = [whole.take(range(start, start + 8)).batches[0] for start in range(0, 40, 8)]
    before = pa.total_allocated_bytes()
    opened = TrainingRows.open(write_rows(tmp_path / "rows.arrow", parts))
    assert pa.total_allocated_bytes() - before < 2**12  # mapped, not read
    assert len(opened) == 40
    for positions in islice(epochs(whole, 7, 3), 9):
        assert text(opened.take(positions)) == text(whole.take(positions))


def test_rows_that_lie_in_another_order_are_read_in_that_of_their_units(tmp_path: Path) -> None:
    """Rows are written as the buffer keeps them; the order of a selection is that of its units."""
    whole = TrainingRows.of(random_rows(12, pairs=True))
    parts = [whole.take(places).batches[0] for places in ([6, 7, 8, 9], [0, 1, 10, 11], [2, 3, 4, 5])]
    opened = TrainingRows.open(write_rows(tmp_path / "rows.arrow", parts))
    assert text(opened.take(range(12))) == text(opened) == text(whole)
    assert unit_starts(opened).tolist() == list(range(0, 13, 2))


def test_a_batch_holds_the_numbers_of_its_rows() -> None:
    rows = random_rows(5)
    batch = collate(TrainingRows.of(rows))
    for number, row in enumerate(rows):
        size = len(row.input_ids)
        assert batch.input_ids[number].tolist() == row.input_ids + [0] * (batch.input_ids.shape[1] - size)
        assert batch.mask[number, :size].tolist() == row.mask
        assert not batch.mask[number, size:].any()
        for name in ("weights", "logprobs", "ref_logprobs"):
            expected = [np.float32(value) if m else 0 for value, m in zip(getattr(row, name), row.mask, strict=True)]
            assert getattr(batch, name)[number, :size].tolist() == expected
        assert batch.label[number] == row.label


def problems_of(row: TrainingRow) -> str | None:
    """What a check of one row at a time says first."""
    for name in ("mask", "weights", "logprobs", "ref_logprobs"):
        if len(getattr(row, name)) not in (len(row.input_ids), 0 if "logprobs" in name else len(row.input_ids)):
            return f"{name} and input_ids differ in length"
    for name in ("weights", "logprobs", "ref_logprobs"):
        if any(m and not np.isfinite(value) for value, m in zip(getattr(row, name), row.mask, strict=False)):
            return f"{name} not finite"
    if not any(row.mask[1:]):
        return "no action token"
    return "outside the model's vocabulary" if not all(0 <= token < VOCABULARY for token in row.input_ids) else None


values = st.sampled_from([0.5, -1.0, float("nan"), float("inf")])


@st.composite
def any_row(draw: st.DrawFn) -> TrainingRow:
    length = draw(st.integers(0, 5))

    def some(elements: st.SearchStrategy, empty: bool = False) -> list:
        size = draw(st.sampled_from([length] * 6 + [length + 1] + [0] * empty))
        return draw(st.lists(elements, min_size=size, max_size=size))

    return TrainingRow(
        row_id=draw(st.uuids()).hex,
        input_ids=draw(st.lists(st.sampled_from([0, 1, 60, 61, -1]), min_size=length, max_size=length)),
        mask=some(st.booleans()),
        weights=some(values),
        logprobs=some(values, empty=True),
        ref_logprobs=some(values, empty=True),
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(any_row(), min_size=1, max_size=6, unique_by=lambda row: row.row_id))
def test_all_broken_rows_are_named_and_no_other(rows: list[TrainingRow]) -> None:
    expected = {row.row_id: problem for row in rows if (problem := problems_of(row))}
    try:
        check_rows(TrainingRows.of(rows), POLICY)
        text = ""
    except TrainingError as error:
        text = str(error)
    parts = text.split("; ")
    for part in parts:
        assert sum(row.row_id in part for row in rows) == 5 or "more" not in part, "five are named, others counted"
    for row in rows:
        if row.row_id in expected:
            of_problem = [part for part in parts if expected[row.row_id] in part]
            assert any(row.row_id in part or part.endswith(" and 1 more") for part in of_problem)
        else:
            assert row.row_id not in text


POLICY = small_policy()


@given(st.lists(st.lists(st.booleans(), max_size=4), max_size=6))
def test_parts_that_hold_a_true_value_are_found(parts: list[list[bool]]) -> None:
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    starts = ends - [len(part) for part in parts]
    values = np.array([value for part in parts for value in part], dtype=bool)
    assert holds_true(starts, ends, values).tolist() == [any(part) for part in parts]
    assert holds_true(starts + 1, ends, values).tolist() == [any(part[1:]) for part in parts]
