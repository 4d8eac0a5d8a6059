"""Online training that begins in states of stored successes: what is drawn when, what rows are, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.advantages.turns import acting
from agentrl.online.curriculum import Curriculum, CurriculumConfig
from agentrl.online.starts import levels_of, starts_of
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

LIMITS = {"max_turn_tokens": 24, "max_tokens": 180}
SMALL = {"iterations": 2, "tasks": 3, "samples": 4, "optimizer": {"lr": 1e-3}, "checkpoint_every": 1, **LIMITS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("starts"))


@pytest.fixture(scope="module")
def shown(harness: Harness, tasks: Tasks) -> Trajectories:
    made: Trajectories = harness.run(synthesize, tasks=tasks)["trajectories"]
    return made


def success(name: str, turns: int, ids: list[int], **more: Any) -> Trajectory:
    """A row of as many turns, each of one token after one of the environment's."""
    messages = [Message(role=Role.USER, content="?")]
    for turn in range(turns):
        spans = {"token_start": 2 * turn + 1, "token_end": 2 * turn + 2}
        messages += [Message(role=Role.ASSISTANT, content="a", **spans), Message(role=Role.TOOL, content="b")]
    mask = [number % 2 == 1 for number in range(2 * turns)]
    about = {"success": True, "fork_at": 0, "input_ids": ids, "action_mask": mask, **more}
    return Trajectory.model_construct(trajectory_id=name, messages=messages, **about)


def test_states_are_counted_from_the_end_of_successes() -> None:
    task = Task(task_id="t", env="e", split="train", level=4, prompt="?")
    rows = [
        success("long", 4, [1, 2, 3, 4, 5, 6, 7, 8]),
        success("short", 3, [1, 2, 3, 4, 9, 9]),
        success("failed", 4, [7] * 8, success=False),
        success("at once", 1, [5, 6]),
    ]
    starts = starts_of([(row, task) for row in rows], 2)
    # the state after 1, 2, 3 is two turns before the end of the one row and before the last turn of none
    assert [(start.prefix.parent, start.left, len(start.prefix.ids)) for start in starts] == [
        ("long", 1, 7), ("long", 2, 5), ("short", 1, 5), ("short", 2, 3),
    ]  # fmt: skip
    shared = starts_of([(success("a", 3, [1, 2, 3, 4, 5, 6]), task), (success("b", 2, [1, 2, 3, 4]), task)], 2)
    assert {len(start.prefix.ids): start.left for start in shared} == {5: 1, 3: 1}, "the fewest turns that are left"
    others = [task, task.model_copy(update={"level": 5})]
    assert levels_of(starts, others, 2) == [1, 2, 1, 2, 3, 4], "whole tasks come after, by their levels"


def test_starts_open_backwards_and_whole_tasks_last() -> None:
    levels = [1, 1, 2, 2, 3]
    curriculum = Curriculum(CurriculumConfig(start=(1.0,), gate=0.5, window=16, easier=0.0), levels, 0)
    drawn = []
    for ticket in range(3):
        drawn.append(levels[curriculum.of(ticket)])
        curriculum.learn(ticket, [True] * 16)
    assert drawn == [1, 2, 3]


class Killed(BaseException):
    pass


def test_rollouts_begin_where_successes_were(harness: Harness, warm: Model, tasks: Tasks, shown: Trajectories) -> None:
    """At first all tickets are of the last turn; a killed run draws the same starts."""
    config = online.config.model_validate({**SMALL, "starts": {"turns": 2}, "draw": {"start": [1.0], "gate": 0.9}})
    context = harness._context("begun")

    def progress(done: int, total: int | None = None, **metrics: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        online(replace(context, progress=progress), config, model=warm, tasks=tasks, starts=[shown])
    before = set(context.row_ids())
    made = online(context, config, model=warm, tasks=tasks, starts=[shown])
    parents = {row.trajectory_id: row for row in shown.read()}
    rows = made["trajectories"].read()
    assert len(rows) == 2 * 3 * 4
    assert before < {row.trajectory_id for row in rows}
    for row in rows:
        parent = parents[row.parent_id or ""]
        assert row.task_id == parent.task_id
        assert len(acting(row.messages)) - row.n_steps == len(acting(parent.messages)) - 1, "one turn was left"
        assert not any(row.action_mask[: row.fork_at])
    assert len({(row.group_id, row.parent_id, row.fork_at) for row in rows}) == 6, "a group has one start"
    for metrics in made["metrics"].table().to_pylist():
        assert metrics["level"] == 1
        assert metrics["replayed_calls"] > 0
    assert context.metrics["starts"] > 6
    assert not any(any(row["mask"][: parents_fork(rows, row["row_id"])]) for row in made["batches"].table().to_pylist())


def parents_fork(rows: list[Trajectory], name: str) -> int:
    return next(row.fork_at for row in rows if row.trajectory_id == name)


def test_what_cannot_be_begun_is_named(harness: Harness, warm: Model, tasks: Tasks, shown: Trajectories) -> None:
    def refused(message: str, config: dict[str, Any], **inputs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            harness.run(online, {**SMALL, **config}, model=warm, tasks=tasks, **inputs)

    refused("inputs.starts is wired, and starts is not set; set starts:", {}, starts=[shown])
    refused("inputs.starts is not wired; wire it, or leave both out", {"starts": {}})
    failed = harness.run(synthesize, {"noise": 1.0}, tasks=tasks)["trajectories"]
    refused("none of the 6 rows of inputs.starts is a success of two turns or more", {"starts": {}}, starts=[failed])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fork": {}}, "starts: fork makes trees of whole rollouts"),
        ({"compress": {"limit": 64}}, "starts: compress makes several rows of an episode"),
        ({"algorithm": {"type": "ppo"}}, "starts: algorithm.type: ppo values the turns before a start too"),
    ],
)
def test_what_starts_do_not_go_with_is_refused_at_load(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OnlineConfig.model_validate({"starts": {}, **config})
