"""A cut says which rows of the buffer it was compared with, and holds to them."""

from pathlib import Path

from store_rows import build
from test_cuts import harness, made  # noqa: F401  (a fixture)

from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.cuts.export import export_cut
from agentrl.datastore.cuts.folder import CutFolder
from agentrl.datastore.cuts.verify import verify
from agentrl.pipelines.harness import Harness


def test_the_version_whose_held_out_rows_were_read_is_recorded_and_verified(harness: Harness, tmp_path: Path) -> None:  # noqa: F811
    chosen = harness.trajectories([build(i) for i in range(100, 110)])
    harness.trajectories([build(200, split="test"), build(201)])
    folder = made(harness, {"rules": [{"rule": "decontaminate"}]}, trajectories=[chosen])  # the version is not named
    held = folder.manifest.heldout
    assert held is not None
    assert (held.version, held.splits, held.rows) == (3, ["heldout", "test"], 9)
    assert verify(harness.buffer, folder).ok
    harness.trajectories([build(202, split="test")])
    assert verify(harness.buffer, folder).ok, "a row that came later was not read"
    gone = TrajectoryBuffer(tmp_path / "gone")
    gone.append(
        [row for row in harness.buffer.get_many(_ids(harness)) if row.split != "test"], stage="x", fingerprint="x"
    )
    assert verify(gone, folder).ok, "another table"
    same = folder.manifest.model_copy(
        update={"table": folder.manifest.table.model_copy(update={"id": _table_id(gone)})}
    )
    (folder.path / "cut.json").write_text(same.text())
    checked = verify(gone, CutFolder(folder.path))
    assert (checked.ok, checked.missing, checked.heldout) == (False, [], [build(200).trajectory_id])
    assert checked.problems() == [
        f"1 held-out rows that it was compared with are gone or have other content: {build(200).trajectory_id}"
    ]
    assert export_cut(gone, CutFolder(folder.path), "gold", tmp_path / "gold").rows == len(folder.ids())
    assert "9 rows of split heldout, test in version 3 of the table" in (tmp_path / "gold/README.md").read_text()


def _ids(harness: Harness) -> list[str]:  # noqa: F811
    return harness.buffer.scan().select("trajectory_id").collect()["trajectory_id"].to_list()


def _table_id(buffer: TrajectoryBuffer) -> str:
    return str(buffer.table().metadata().id)
