"""Exports: what is lost is said before, nothing is overwritten, and a file is whole or not there."""

import gzip
from pathlib import Path

import pytest
from format_rows import KINDS
from store_rows import build

from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.formats import FORMATS
from agentrl.datastore.formats.exports import export_rows, losses


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    return TrajectoryBuffer(tmp_path / "store")


def test_exports_say_what_they_lose_and_never_overwrite(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    rows = [*KINDS["tokens"], *KINDS["reasoning"], *KINDS["unscored"]]
    buffer.append(rows, stage="s", fingerprint="f")
    ids = [row.trajectory_id for row in rows]
    lost = losses(buffer, ids, "sharegpt")
    assert (lost["token ids"], lost["reasoning"], lost["text beside calls"]) == (3, 4, 2)
    assert losses(buffer, ids, "trl-kto")["the whole row"] == 1
    assert losses(buffer, ids, "atif") == {}
    path = tmp_path / "out.jsonl.gz"
    assert export_rows(buffer, ids, path, "openai-chat").records == len(rows)
    assert len(gzip.decompress(path.read_bytes()).splitlines()) == len(rows)
    with pytest.raises(StoreError, match="is there already; --force replaces it"):
        export_rows(buffer, ids, path, "openai-chat")
    before = path.read_bytes()
    export_rows(buffer, ids, path, "openai-chat", force=True)
    assert path.read_bytes() == before
    folder = tmp_path / "traj"
    export_rows(buffer, ids, folder, "swe-agent")
    export_rows(buffer, ids[:2], folder, "swe-agent", force=True)
    assert len(list(folder.iterdir())) == 2
    with pytest.raises(StoreError, match="nemo-gym is only read"):
        export_rows(buffer, ids, tmp_path / "x", "nemo-gym")


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    buffer.append([build(0)], stage="s", fingerprint="f")
    path = tmp_path / "deep" / "out.jsonl"
    path.parent.mkdir()
    path.write_text("old")
    with pytest.raises(KeyError):
        export_rows(buffer, [build(0).trajectory_id, "missing"], path, "openai-chat", force=True)
    assert [item.name for item in path.parent.iterdir()] == ["out.jsonl"]
    assert path.read_text() == "old"


def test_ids_cannot_leave_the_folder(tmp_path: Path) -> None:
    write = FORMATS["swe-agent"].write
    assert write is not None
    write([build(0, trajectory_id="../../evil"), build(1, trajectory_id="../../evil")], tmp_path / "out" / "x")
    assert sorted(path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*.traj")) == [("out", "x")] * 2


@pytest.mark.parametrize("name", ["trl-kto", "trl-preference"])
def test_an_export_without_a_record_is_refused(name: str, tmp_path: Path, buffer: TrajectoryBuffer) -> None:
    rows = KINDS["unscored"]
    buffer.append(rows, stage="s", fingerprint="f")
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    ids = [row.trajectory_id for row in rows]
    with pytest.raises(StoreError, match=f"none of the 1 rows gives a record of {name}"):
        export_rows(buffer, ids, path, name, force=True)
    assert path.read_text() == "old"
