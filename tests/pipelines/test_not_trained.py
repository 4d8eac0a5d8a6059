import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datastore import TrajectoryBuffer
from pipelines.handles import SELECTION_SCHEMA, Trajectories
from pipelines.harness import Harness
from pipelines.stages.pairs import agentq
from pipelines.stages.selected import Selected
from schemas.trajectory import NOT_TRAINED, Message, Role, Termination, Trajectory


def row(name: str, tags: list[str], split: str = "train") -> Trajectory:
    fields = {"episode_id": name, "task_id": "t", "source": "x", "env": "e", "split": split, "prompt": "q"}
    said = [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content="a")]
    outcome = {"reward": None, "success": None, "termination": Termination.UNKNOWN}
    return Trajectory(trajectory_id=name, messages=said, tags=tags, **fields, **outcome)


def test_rows_that_are_tagged_reach_no_training_stage(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    buffer.append([row("solver", []), row("judge", [NOT_TRAINED])], stage="s", fingerprint="f")
    chosen = pa.table({"trajectory_id": ["solver", "judge"], "weight": [2.0, 1.0]}).cast(SELECTION_SCHEMA)
    pq.write_table(chosen, tmp_path / "chosen.parquet")
    selection = Trajectories(tmp_path / "chosen.parquet", "s", "trajectories", "f", buffer)
    with pytest.warns(UserWarning, match="1 of 2 rows are tagged 'not-trained' and are not trained on"):
        chosen = Selected([selection])
    assert [row.trajectory_id for row in chosen.trajectories()] == ["solver"]
    assert chosen.weights.tolist() == [2.0]


def test_a_stage_says_that_it_trains_on_rows_of_other_splits(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    splits = ["train", "heldout", "train", "dev"]
    rows = [row(f"r{number}", [], split) for number, split in enumerate(splits)]
    said = r"2 of 4 rows to train on are not of the train split \(dev 1, heldout 1\)"
    with pytest.warns(UserWarning, match=said):
        Selected([harness.trajectories(rows)])
    tokens = {"input_ids": [1], "action_mask": [False], "logprobs": [float("nan")], "n_tokens": 1, "tokenizer": "t"}
    sampled = [one.model_copy(update=tokens | {"trajectory_id": f"s{n}"}) for n, one in enumerate(rows)]
    with pytest.warns(UserWarning, match=said):
        harness.run(agentq, trajectories=[harness.trajectories(sampled)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Selected([harness.trajectories([row("only", [], "train")])])
