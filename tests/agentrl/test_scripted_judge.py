"""The judge of known quality, with which benchmarks measure what rewards by rank are worth."""

import asyncio

import pytest
from graded_rows import Added, reward

from agentrl.environments import load_environment
from agentrl.rewards.component import with_rewards
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

KIND = "benchmarks.scripted_judge:Scripted"
ROOMS = load_environment('rooms{"spoken": true}')
TASKS = ROOMS.tasks({"train": 40}, 0)["train"]


@pytest.fixture(scope="module")
def groups() -> list[tuple[Task, list[Trajectory]]]:
    """Walks of each task, of which some fail."""
    return [(task, [demonstrate(ROOMS, task, 0.5, n, f"{task.task_id}-{n}") for n in range(4)]) for task in TASKS]


def test_a_judge_that_is_always_right_ranks_successes_first(groups: list[tuple[Task, list[Trajectory]]]) -> None:
    judge, mixed = reward(KIND, right=1.0, orders=1), 0
    for task, rows in groups:
        places = [grade.value or 0.0 for grade in asyncio.run(judge.grades(rows, task))]
        good = [position for position, row in zip(places, rows, strict=True) if row.success]
        bad = [position for position, row in zip(places, rows, strict=True) if not row.success]
        mixed += bool(good and bad)
        assert not (good and bad) or min(good) > max(bad)
    assert mixed > 10


def test_a_judge_is_right_as_often_as_is_said(groups: list[tuple[Task, list[Trajectory]]]) -> None:
    """Of two walks, of which one succeeded, the right one comes first if both verdicts are right (0.64), and by chance
    if one of them is (0.32): 0.8."""
    pairs = [
        (task, [good, bad])
        for task, rows in groups
        for good in rows
        for bad in rows
        if good.success and not bad.success
    ]
    judge = reward(KIND, right=0.8, orders=40)
    first = [asyncio.run(judge.grades(two, task))[0].value or 0.0 for task, two in pairs]
    assert sum(first) / len(first) == pytest.approx(0.8, abs=0.03)


def test_places_may_be_the_whole_reward(groups: list[tuple[Task, list[Trajectory]]]) -> None:
    task, rows = groups[0]
    beside, alone = (Added(rewards=[{"type": KIND, "right": 1.0, "alone": item}]).rewards for item in (False, True))
    places = [grade.value for grade in asyncio.run(beside[0].grades(rows, task))]
    assert [row.reward for row in asyncio.run(with_rewards(rows, task, alone))] == pytest.approx(places)
    given = [row.scored_reward() + (position or 0.0) for row, position in zip(rows, places, strict=True)]
    assert [row.reward for row in asyncio.run(with_rewards(rows, task, beside))] == pytest.approx(given)
