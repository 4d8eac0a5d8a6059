"""Real rows out in every format, and in again by the evidence of the file: equal, or the loss is named."""

from pathlib import Path

import pytest
from real_rows import ENVIRONMENTS, RECORDED, real_rows

from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.imports import reading
from agentrl.datastore.formats.row_parts import lost, present
from agentrl.schemas.arrow import from_table
from agentrl.schemas.trajectory import Trajectory

GROUPS = [*ENVIRONMENTS, *(path.name for path in sorted(RECORDED.iterdir()) if path.suffix != ".md")]
WRITTEN = [name for name, format_ in FORMATS.items() if format_.write and name != "trl-preference"]


def imported(path: Path, name: str) -> list[Trajectory]:
    with reading([path]) as result:
        rows = [row for table in result.tables("back") for row in from_table(Trajectory, table)]
        assert {item["format"] for item in result.result.files} == {name}
        assert result.notes.unreadable == []
        return rows


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", WRITTEN)
def test_real_rows_come_back_or_the_loss_is_named(name: str, group: str, tmp_path: Path) -> None:
    format = FORMATS[name]
    rows = [row for row in real_rows()[group] if not (format.leaves_out and format.leaves_out(row))]
    if not rows:
        assert all(row.success is None for row in real_rows()[group])
        return
    path = tmp_path / f"out{format.suffix}"
    assert format.write is not None
    assert format.write(rows, path) == len(rows)
    back = imported(path, name)
    assert len(back) == len(rows)
    for before, after in zip(rows, back, strict=True):
        assert lost(before, after) <= format.loses & present(before)
        assert after.n_tool_calls == before.n_tool_calls


def test_the_real_rows_have_calls_of_every_source() -> None:
    assert [group for group in GROUPS if not sum(row.n_tool_calls for row in real_rows()[group])] == []
    assert sum(row.n_tool_errors > 0 for rows in real_rows().values() for row in rows)


def test_every_anthropic_export_keeps_its_calls_whatever_its_first_record_is(tmp_path: Path) -> None:
    """A first record without a block once made chat of the whole file: 143 calls became none."""
    rows = sorted((row for rows in real_rows().values() for row in rows), key=lambda row: row.n_tool_calls)
    path = tmp_path / "out.jsonl"
    assert FORMATS["anthropic"].write is not None
    FORMATS["anthropic"].write(rows, path)
    assert rows[0].n_tool_calls == 0
    assert [row.n_tool_calls for row in imported(path, "anthropic")] == [row.n_tool_calls for row in rows]
