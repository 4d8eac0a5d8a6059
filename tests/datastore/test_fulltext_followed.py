"""A question for words follows the table, which takes longer to open than words to look up."""

from pathlib import Path

import pytest
from store_rows import FP, build

from agentrl.datastore import TrajectoryBuffer

pytest.importorskip("tantivy")


def test_a_question_opens_no_table_and_finds_what_others_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(0)], stage="s", fingerprint=FP)
    assert len(buffer.text.ids("find")) == 1
    with monkeypatch.context() as patched:
        patched.delattr(type(buffer.committed), "open")
        assert len(buffer.text.ids("find")) == 1
    TrajectoryBuffer(tmp_path).append([build(1)], stage="s", fingerprint="b" * 32)
    assert len(buffer.text.ids("find")) == 2
