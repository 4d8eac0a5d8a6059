"""Online training with a curriculum: what a killed run draws when it goes on."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.tasks import generate

pytestmark = pytest.mark.slow
DRAW = {"start": [0.9, 0.1], "gate": 0.02, "window": 32, "easier": 0.3}
"""A gate that a few successes reach, so that levels open during four iterations."""
SMALL = {
    "iterations": 5, "tasks": 4, "samples": 4, "optimizer": {"lr": 1e-3}, "checkpoint_every": 2, "draw": DRAW,
    "max_turn_tokens": 24, "max_tokens": 120,
}  # fmt: skip


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(Path(tmp_path_factory.mktemp("curriculum")))


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "lookup", "train": 24, "dev": 1, "heldout": 1})["train"]


class Killed(BaseException):
    pass


def killing(at: int) -> Any:
    def progress(done: int, total: int | None = None, **metrics: Any) -> None:
        if done == at:
            raise Killed

    return progress


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"draw": {**DRAW, "band": [0.1, 0.9], "rest": 1, "warmup": [2, 1]}},
        {"ahead": 1, "max_staleness": 2, "engine": {"type": "transformers", "schedule": "free"}},
    ],
    ids=["in step", "band and warm-up", "asynchronous"],
)
def test_a_killed_run_goes_on_with_the_tasks_that_it_drew(
    harness: Harness, warm: Model, tasks: Tasks, more: dict[str, Any]
) -> None:
    config = online.config.model_validate({**SMALL, **more})
    level = {task.task_id: task.level for task in tasks.read()}
    context = harness._context("killed")
    with pytest.raises(Killed):
        online(replace(context, progress=killing(3)), config, model=warm, tasks=tasks)
    before = {row.trajectory_id: row.task_id for row in harness.buffer.get_many(context.row_ids())}
    result = online(context, config, model=warm, tasks=tasks)
    rows = result["trajectories"].read()
    assert {row.trajectory_id: row.task_id for row in rows}.items() >= before.items(), "made once, and used"
    for number, group in Counter(row.group_id for row in rows).items():
        assert group == 4
        assert len({row.task_id for row in rows if row.group_id == number}) == 1
    metrics = result["metrics"].table().to_pylist()
    assert metrics[0]["level"] == 1
    assert metrics[-1]["level"] > 1
    drawn = [level[row["task_id"]] for row in result["coverage"].table().sort_by("ticket").to_pylist()]
    assert set(drawn[:4]) <= {1, 2}
    if "draw" in more:
        assert set(drawn[:8]) == {1}, "two iterations of four tasks are the warm-up"
    if "ahead" in more:
        return
    undisturbed = harness.run(online, config.model_dump(), model=warm, tasks=tasks)
    for name in ("coverage", "metrics"):
        expected, again = (made[name].table() for made in (undisturbed.outputs, result))
        assert repr(again.to_pylist()) == repr(expected.to_pylist())


def test_shares_that_do_not_fit_the_tasks_are_refused(harness: Harness, warm: Model, tasks: Tasks) -> None:
    with pytest.raises(ValueError, match=r"draw\.final has 5 shares, and the tasks have 3 levels"):
        harness.run(online, {**SMALL, "draw": {"final": [0.2] * 5}}, model=warm, tasks=tasks)
