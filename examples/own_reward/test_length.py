import pytest
from my_rewards.length import Brevity

from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

TASK = Task(task_id="t", env="lookup", split="train", prompt="?")


@pytest.mark.parametrize(
    ("tokens", "success", "value"), [(0, True, 1.0), (32, True, 0.5), (99, True, 0.0), (8, False, 0.0)]
)
def test_short_successes_are_worth_more(tokens: int, success: bool, value: float) -> None:
    row = Trajectory(
        trajectory_id="r", episode_id="r", task_id="t", source="model", env="lookup", split="train", prompt="?",
        reward=float(success), success=success, termination="answered", messages=[], n_action_tokens=tokens,
    )  # fmt: skip
    assert Brevity(type="mine").value(row, TASK) == value
