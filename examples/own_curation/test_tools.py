from pathlib import Path

from my_rules.tools import NoRepeats

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory


def row(name: str, *asked: str) -> Trajectory:
    calls = [ToolCall(id=f"c{n}", name="find", arguments=f'{{"who": "{who}"}}') for n, who in enumerate(asked)]
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id="t", source="expert", env="lookup", split="train", prompt="?",
        reward=1.0, success=True, termination="answered", n_tool_calls=len(calls),
        messages=[Message(role=Role.ASSISTANT, tool_calls=[call]) for call in calls],
    )  # fmt: skip


def test_rows_that_repeat_a_call_are_dropped(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([row("a-1", "Ann", "Bob"), row("a-2", "Ann", "Ann"), row("a-3")], stage="a", fingerprint="f")
    assert curate(buffer, [NoRepeats(rule="mine")]).ids.to_pylist() == ["a-1", "a-3"]
    assert curate(buffer, [NoRepeats(rule="mine", times=2)]).ids.to_pylist() == ["a-1", "a-2", "a-3"]
    assert curate(buffer, [NoRepeats(rule="mine", argument="how")]).ids.to_pylist() == ["a-3"]
