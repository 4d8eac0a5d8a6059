import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.datastore import TrajectoryBuffer
from agentrl.pipelines.handles import SELECTION_SCHEMA, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.agentq.pairs import agentq
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.parts.selected import Selected
from agentrl.pipelines.stages.trajectories import negatives, reject
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, Termination, ToolCall, Trajectory


def row(name: str, tags: list[str], split: str = "train") -> Trajectory:
    fields = {"episode_id": name, "task_id": "t", "source": "x", "env": "e", "split": split, "prompt": "q"}
    messages = [Message(role=Role.USER, content="q"), Message(role=Role.ASSISTANT, content="a")]
    outcome = {"reward": None, "success": None, "termination": Termination.UNKNOWN}
    return Trajectory(trajectory_id=name, messages=messages, tags=tags, **fields, **outcome)


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
    text = r"2 of 4 rows to train on are not of the train split \(dev 1, heldout 1\)"
    with pytest.warns(UserWarning, match=text):
        Selected([harness.trajectories(rows)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Selected([harness.trajectories([row("only", [], "train")])])


@pytest.mark.parametrize("stage", [agentq, outcome, negatives], ids=lambda stage: stage.name)
def test_nothing_is_made_of_rows_of_other_splits(tmp_path: Path, stage: Any) -> None:
    harness = Harness(tmp_path)
    given = harness.trajectories([row("seen", []), row("unseen", [], "heldout")])
    text = "1 of 2 rows are not of the train split, unseen is of 'heldout': nothing is made from what is measured on"
    with pytest.raises(ValueError, match=text):
        harness.run(stage, trajectories=[given])


def acted(name: str, reward: float, tags: list[str]) -> Trajectory:
    """A run of the one task that calls the one tool, with tokens."""
    call = ToolCall(id="c", name="find", arguments=json.dumps({"n": name}))
    messages = [
        Message(role=Role.USER, content="q"),
        Message(role=Role.ASSISTANT, tool_calls=[call], token_start=2, token_end=4),
        Message(role=Role.TOOL, content="found", tool_call_id="c"),
        Message(role=Role.ASSISTANT, content=name, token_start=5, token_end=7),
    ]
    mask = [False, False, True, True, False, True, True]
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="x", env="e", split="train", prompt="q",
        reward=reward, success=reward > 0.5, termination=Termination.ANSWERED, messages=messages, tags=tags,
        tools='[{"type": "function", "function": {"name": "find"}}]', tokenizer="t", n_steps=2, n_tokens=7,
        n_action_tokens=4, n_tool_calls=1, input_ids=[1, 2, *map(ord, (name * 5)[:5])], action_mask=mask,
        logprobs=[-1.0 if acts else float("nan") for acts in mask],
    )  # fmt: skip


JUDGE = [NOT_TRAINED]


def test_pairs_are_made_of_no_tagged_row(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = [acted("good", 1.0, []), acted("poor", 0.0, JUDGE)]
    for kind in ("trajectory", "step"):
        done = harness.run(agentq, {"kind": kind}, trajectories=[harness.trajectories(rows)])
        assert (done["pairs"].read(), done.metrics["not_trained"]) == ([], 1)
        rows = [row.model_copy(update={"trajectory_id": row.trajectory_id + "x"}) for row in rows]
    free = [row.model_copy(update={"trajectory_id": row.trajectory_id + "y", "tags": []}) for row in rows]
    made = harness.run(agentq, {"kind": "trajectory"}, trajectories=[harness.trajectories(free)])
    assert len(made["pairs"].read()) == 1, "without the tag there is a pair"


def test_rejection_sampling_takes_no_tagged_row(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = [acted("best", 1.0, JUDGE), acted("good", 0.9, []), acted("poor", 0.0, [])]
    done = harness.run(reject, {"keep": 2}, trajectories=[harness.trajectories(rows)])
    assert done["trajectories"].ids() == ["good"]
    assert (done.metrics["before"], done.metrics["not_trained"], done.metrics["unscored"]) == (3, 1, 0)


def test_negatives_are_made_of_no_tagged_row(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    with pytest.raises(ValueError, match="no trajectory calls a tool"):
        harness.run(negatives, {"share": 1.0}, trajectories=[harness.trajectories([acted("judge", 1.0, JUDGE)])])
