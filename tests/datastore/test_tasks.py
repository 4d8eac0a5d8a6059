"""Tasks beside the buffer: each set once, found by id."""

from pathlib import Path

import pyarrow as pa

from agentrl.datastore import TrajectoryBuffer
from agentrl.schemas.arrow import from_table, to_table
from agentrl.schemas.task import TASK_SCHEMA, Task


def tasks(*names: str, truth: str = '"a"') -> list[Task]:
    return [Task(task_id=name, env="e", split="train", prompt=f"{name}?", ground_truth=truth) for name in names]


def table(rows: list[Task]) -> pa.Table:
    return to_table(rows, TASK_SCHEMA)


def test_a_set_is_stored_once_and_its_tasks_are_found(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path / "store")
    assert buffer.tasks(["a"]).num_rows == 0
    for rows in (tasks("a", "b"), tasks("a", "b"), tasks("b", "c"), []):
        buffer.keep_tasks(table(rows))
    assert len(list((tmp_path / "store" / "tasks").iterdir())) == 2
    result = from_table(Task, TrajectoryBuffer(tmp_path / "store").tasks(["b", "c", "none"]))
    assert sorted(result, key=lambda task: task.task_id) == tasks("b", "c"), "b is in two sets and comes once"
    buffer.keep_tasks(table(tasks("a", truth='"other"')))
    assert {task.ground_truth for task in from_table(Task, buffer.tasks(["a"]))} == {'"a"', '"other"'}
