from pathlib import Path

import pytest
from my_project.stages import score
from pydantic import ValidationError

from agentrl.pipelines.harness import Harness
from agentrl.schemas.trajectory import Trajectory


def row(name: str, reward: float, calls: int) -> Trajectory:
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="expert", env="lookup", split="train", prompt="?",
        reward=reward, success=reward > 0, termination="answered", n_tool_calls=calls, messages=[],
    )  # fmt: skip


def test_the_best_come_first(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    rows = [row("a-1", 1.0, 3), row("a-2", 0.0, 0), row("a-3", 1.0, 1)]
    result = harness.run(score, {"threshold": 0.5}, trajectories=harness.trajectories(rows))
    assert result["kept"].ids() == ["a-3", "a-1"]
    assert result["scores"].table()["score"].to_pylist() == pytest.approx([0.7, 0.0, 0.9])
    assert result.metrics["kept"] == 2


def test_a_threshold_above_one_is_refused(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    with pytest.raises(ValidationError, match="threshold"):
        harness.run(score, {"threshold": 2}, trajectories=harness.trajectories([row("a-1", 1.0, 0)]))
