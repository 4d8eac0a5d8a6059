"""Tasks of predicting what environments answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.methods.rwml.predict import predict
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory


def walk(name: str, *answers: tuple[str, str], task: str = "", split: str = "train", **more: Any) -> Trajectory:
    """A walk with these doors and rooms."""
    messages = [Message(role=Role.USER, content=f"from hall {task}?")]
    for number, (door, room) in enumerate(answers):
        call = ToolCall(id=str(number), name="go", arguments=json.dumps({"door": door}))
        messages.append(Message(role=Role.ASSISTANT, tool_calls=[call]))
        messages.append(Message(role=Role.TOOL, content=room, tool_call_id=str(number), name="go"))
    messages.append(Message(role=Role.ASSISTANT, content="here"))
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id=task or name, source="expert", env="rooms", split=split,
        prompt="?", reward=1.0, success=True, termination="answered", messages=messages, **more,
    )  # fmt: skip


def made(folder: Path, rows: list[Trajectory], **config: Any) -> Result:
    harness = Harness(folder)
    return harness.run(predict, {"heldout": 0.0, **config}, trajectories=[harness.trajectories(rows)])


def test_a_triple_is_history_and_action_and_the_next_observation(tmp_path: Path) -> None:
    result = made(tmp_path, [walk("a", ("left", "attic"), ("right", "cave"))])
    first, two = result["train"].read()
    assert first.prompt == 'Task: from hall ?\nCall: go {"door": "left"}\nResult?'
    assert json.loads(first.ground_truth) == "attic"
    assert two.prompt == (
        'Task: from hall ?\nCall: go {"door": "left"}\nResult: attic\nCall: go {"door": "right"}\nResult?'
    )
    assert json.loads(two.ground_truth) == "cave"
    assert json.loads(two.metadata) == {"made_from": "a", "turn": 1, "task_id": "a"}
    assert (first.env, first.split) == ("predict", "train")
    [short] = [task for task in made(tmp_path / "s", [walk("a", ("left", "attic"), ("right", "cave"))], turns=0)[
        "train"].read() if "cave" in task.ground_truth]  # fmt: skip
    assert short.prompt == 'Task: from hall ?\nCall: go {"door": "right"}\nResult?'


def test_easy_triples_are_thinned_and_counted(tmp_path: Path) -> None:
    """Back to the hall, which the prompt names; and a tool that nearly always answers the same."""
    rows = [walk("a", ("left", "attic"), ("right", "hall"))]
    result = made(tmp_path, rows, easy=0.0)
    assert [json.loads(task.ground_truth) for task in result["train"].read()] == ["attic"]
    assert (result.metrics["easy"], result.metrics["easy_kept"]) == (1, 0)
    assert made(tmp_path / "all", rows, easy=1.0).metrics["train"] == 2
    usual = [walk(f"w{n}", ("left", "wall" if n else "attic"), task=str(n)) for n in range(5)]
    result = made(tmp_path / "usual", usual, easy=0.0)
    assert [json.loads(task.ground_truth) for task in result["train"].read()] == ["attic"]
    assert result.metrics["easy"] == 4
    garden = made(tmp_path / "part", [walk("a", ("left", "den"), task="garden")], easy=0.0)
    assert garden.metrics["train"] == 1, "a part of a word cannot be copied"


def test_equal_triples_come_once_and_several_observations_are_all_right(tmp_path: Path) -> None:
    rooms = {"a": "attic", "b": "attic", "c": "cave"}
    rows = [walk(name, ("left", room), task="t") for name, room in rooms.items()]
    result = made(tmp_path, rows, easy=1.0)
    [task] = result["train"].read()
    assert json.loads(task.ground_truth) == ["attic", "cave"]
    assert (result.metrics["triples"], result.metrics["doubled"], result.metrics["ambiguous"]) == (3, 1, 1)


def test_what_is_measured_is_of_other_tasks(tmp_path: Path) -> None:
    rows = [walk(f"a{n}", ("left", f"room{n}"), ("right", f"cave{n}"), task=f"t{n}") for n in range(40)]
    result = made(tmp_path, rows, heldout=0.3)
    sources = {
        name: {json.loads(task.metadata)["task_id"] for task in result[name].read()} for name in ("train", "heldout")
    }
    assert not sources["train"] & sources["heldout"]
    assert len(sources["heldout"]) == 12
    assert {task.split for task in result["heldout"].read()} == {"heldout"}


def test_rows_of_measured_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"b is of split heldout.*where: split = 'train'"):
        made(tmp_path, [walk("a", ("left", "attic")), walk("b", ("left", "cave"), split="heldout")])
    with pytest.raises(ValueError, match="no triple is left of 0"):
        made(tmp_path / "none", [walk("a")])


def test_long_observations_and_rows_that_are_not_trained_on_are_counted(tmp_path: Path) -> None:
    rows = [walk("a", ("left", "x" * 30)), walk("b", ("left", "attic")), walk("j", ("up", "y"), tags=["not-trained"])]
    result = made(tmp_path, rows, observation_chars=20)
    assert (result.metrics["too_long"], result.metrics["not_trained"], result.metrics["train"]) == (1, 1, 1)


def test_predictions_can_be_demonstrated(tmp_path: Path) -> None:
    from agentrl.environments.predict import Predict

    [task] = made(tmp_path, [walk("a", ("left", "attic"))])["train"].read()
    row = demonstrate(Predict(), task, 0.0, 0, "d")
    assert (row.messages[-1].content, row.success) == ("attic", True)
    assert not demonstrate(Predict(), task, 1.0, 0, "e").success
