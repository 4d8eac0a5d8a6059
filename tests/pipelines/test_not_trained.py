import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datastore import TrajectoryBuffer
from pipelines.handles import SELECTION_SCHEMA, Trajectories
from pipelines.stages.selected import Selected
from schemas.trajectory import NOT_TRAINED, Message, Role, Termination, Trajectory


def test_rows_that_are_tagged_reach_no_training_stage(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def row(name: str, tags: list[str]) -> Trajectory:
        fields = {"episode_id": name, "task_id": "t", "source": "x", "env": "e", "split": "train", "prompt": "q"}
        said = [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content="a")]
        outcome = {"reward": None, "success": None, "termination": Termination.UNKNOWN}
        return Trajectory(trajectory_id=name, messages=said, tags=tags, **fields, **outcome)

    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([row("solver", []), row("judge", [NOT_TRAINED])], stage="s", fingerprint="f")
    chosen = pa.table({"trajectory_id": ["solver", "judge"], "weight": [2.0, 1.0]}).cast(SELECTION_SCHEMA)
    pq.write_table(chosen, tmp_path / "chosen.parquet")
    selection = Trajectories(tmp_path / "chosen.parquet", "s", "trajectories", "f", buffer)
    with pytest.warns(UserWarning, match="1 of 2 rows are tagged 'not-trained' and are not trained on"):
        chosen = Selected([selection])
    assert [row.trajectory_id for row in chosen.trajectories()] == ["solver"]
    assert chosen.weights.tolist() == [2.0]
