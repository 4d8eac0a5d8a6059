"""A policy that judges its own rollouts: tasks of judging, and scores from verdicts, by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.environments import load_environment
from agentrl.pipelines.handles import Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.methods.self_rewarding.judging import judge, scores_from_verdicts
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory


def rollout(name: str, answer: str, success: bool | None, task: str = "t", **more: Any) -> Trajectory:
    messages = [
        Message(role=Role.USER, content=f"{task}?"),
        Message(role=Role.ASSISTANT, content=answer, token_start=1, token_end=3),
    ]
    columns = {"split": "train", "tokenizer": "x", **more}
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id=task, source="model", env="words", prompt=f"{task}?",
        reward=None if success is None else float(success), success=success, termination="answered",
        messages=messages, input_ids=[1, 2, len(name)], action_mask=[False, True, True], n_tokens=3,
        n_action_tokens=2, logprobs=[math.nan, -1.0, -1.0], **columns,
    )  # fmt: skip


ROWS = [
    rollout("a", "Ann", True), rollout("bb", "Ann", True), rollout("ccc", "Bob", False), rollout("dddd", "Cy", False),
    rollout("eeeee", "Eve", False, task="u"),
]  # fmt: skip


def verdicts(harness: Harness, answers: dict[str, list[str]], tasks: list[Task]) -> Any:
    """Rows that answer the tasks about these answers."""
    made: list[Trajectory] = []
    for task in tasks:
        for text in answers[task.prompt.split("Agent: ")[1].split("\n")[0]]:
            row = rollout(f"v{len(made)}", text, None, task=task.task_id)
            made.append(row.model_copy(update={"env": "predict"}))
    return harness.trajectories(made)


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


@pytest.fixture
def rows(harness: Harness) -> Trajectories:
    return harness.trajectories(ROWS)


def test_equal_rollouts_are_one_task_whose_right_verdict_is_the_verified_success(
    harness: Harness, rows: Trajectories
) -> None:
    unknown = harness.trajectories([rollout("unknown", "Fay", None)])
    config = {"rubrics": ["It says a name."], "question": "Right?"}
    made = harness.run(judge, config, trajectories=[rows, unknown, rows])  # each row counts once
    tasks = made["tasks"].read()
    assert tasks[0].prompt == "Task: t?\nAgent: Ann\nIt says a name.\nRight?"
    assert [json.loads(task.ground_truth) for task in tasks] == ["yes", "no", "no", "no"]
    assert json.loads(tasks[0].metadata) == {"rows": ["a", "bb"], "task": "words t"}
    assert (made.metrics["tasks"], made.metrics["right"], made.metrics["unscored"]) == (4, 1, 1)
    shown = demonstrate(load_environment("predict"), tasks[1], 0.0, 0, "d")
    assert (shown.messages[-1].content, shown.success) == ("no", True)


def test_the_highest_score_of_a_task_is_preferred_to_the_lowest(harness: Harness, rows: Trajectories) -> None:
    """Shares of yes: Ann 2/3, Bob 1/3 (a word that is none is left out), Cy 0; of the task u alone there is nothing to
    compare. The verdicts rank all pairs of a right and a wrong rollout rightly."""
    tasks = harness.run(judge, trajectories=[rows])["tasks"]
    answers = {"Ann": ["yes", "Yes.", "no"], "Bob": ["no", "yes", "no"], "Cy": ["no", "no", "maybe"], "Eve": ["no"] * 3}
    given = verdicts(harness, answers, tasks.read())
    done = harness.run(scores_from_verdicts, {"scorer": "own"}, tasks=[tasks], trajectories=[given, given])
    by_row = {row["trajectory_id"]: row for row in done["scores"].table().to_pylist()}
    assert {name: row["success"] for name, row in by_row.items()} == {
        "a": True, "bb": True, "ccc": None, "dddd": False, "eeeee": None,
    }  # fmt: skip
    assert [by_row[name]["reward"] for name in ("a", "ccc", "dddd")] == pytest.approx([2 / 3, 1 / 3, 0])
    assert (done.metrics["verdicts"], done.metrics["unreadable"], done.metrics["undecided"]) == (12, 1, 2)
    assert (done.metrics["auc"], done.metrics["auc_within"]) == (1.0, 1.0)
    made = harness.run(outcome, {"scorer": "own"}, trajectories=[rows], scores=[done["scores"]])
    [pair] = made["pairs"].read()
    assert (pair.chosen_id, pair.rejected_id, pair.chosen_reward) == ("a", "dddd", pytest.approx(2 / 3))


def test_verdicts_that_nobody_can_read_and_verdicts_by_chance(harness: Harness, rows: Trajectories) -> None:
    tasks = harness.run(judge, trajectories=[rows])["tasks"]
    answers = {"Ann": ["no"] * 3, "Bob": ["yes"] * 3, "Cy": ["eh", "eh", "yes"], "Eve": ["no"] * 3}
    given = verdicts(harness, answers, tasks.read())
    with pytest.warns(UserWarning, match=r"no better than chance \(auc_within 0\.00 over 1 tasks\)"):
        done = harness.run(scores_from_verdicts, tasks=[tasks], trajectories=[given])
    [unread] = [row for row in done["scores"].table().to_pylist() if row["trajectory_id"] == "dddd"]
    assert (unread["reward"], unread["why"]) == (None, "fewer than half of its verdicts could be read")
    with pytest.raises(ValueError, match=r"judge none of inputs\.tasks"):
        harness.run(scores_from_verdicts, tasks=[tasks], trajectories=[rows])


def test_rollouts_that_cannot_be_judged(tmp_path: Path) -> None:
    both = [rollout("a", "Ann", True), rollout("b", "Ann", False)]
    harness = Harness(tmp_path)
    with pytest.raises(ValueError, match="no rollout can be judged"):
        harness.run(judge, trajectories=[harness.trajectories(both)])
