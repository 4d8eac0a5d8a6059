"""Failed rows that go on as a success at the same task did."""

import math
from typing import Any

import pytest
from forked import LIMITS, TRAIN, by_id, harness, model, rollouts, tabular, task_of, tasks
from tabular import said

from agentrl.advantages.turns import acting, turn_spans
from agentrl.engines.blocking import blocking
from agentrl.environments.rooms.environment import Rooms
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.splice.splice import REVISIONS, splice
from agentrl.pipelines.methods.splice.splicing import Joint, joints
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import offline, sft
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.continuations import check_continuation, node
from agentrl.rollouts.verification import replayed
from agentrl.schemas.note import Note
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Trajectory

__all__ = ["harness", "model", "rollouts", "tabular", "tasks"]


@pytest.fixture(scope="module")
def walks(harness: Harness, model: Model, tasks: Tasks) -> Trajectories:
    return harness.run(sample, {"samples": 12, **LIMITS}, model=model, tasks=tasks)["trajectories"]


def test_a_failed_row_goes_on_as_a_success_did(
    harness: Harness, model: Model, tasks: Tasks, walks: Trajectories
) -> None:
    made = harness.run(splice, {"per_task": 50}, trajectories=[walks], model=model)
    rows, given = made["trajectories"].read(), by_id(walks)
    assert len(rows) >= 4
    known = {task.task_id: task for task in tasks.read()}
    for row in rows:
        failed = given[row.parent_id or ""]
        success = given[row.tags[0].removeprefix("success:")]
        assert (failed.success, success.success) == (False, True)
        assert failed.task_id == success.task_id == row.task_id
        kept = len(acting(row.messages)) - row.n_steps
        check_continuation(row, node(failed, kept, task_of(failed)).prefix)
        assert not any(row.action_mask[: row.fork_at]), "no loss on the failed prefix"
        revised, *after = (message for message in row.messages if (message.token_start or 0) >= row.fork_at)
        assert revised.content in REVISIONS
        assert all(row.action_mask[revised.token_start : revised.token_end])
        tail = row.n_tokens - (revised.token_end or 0)
        assert row.input_ids[-tail:] == success.input_ids[-tail:], "the tail is the success's"
        assert row.action_mask[-tail:] == success.action_mask[-tail:]
        assert [row.content for row in after] == [message.content for message in success.messages[-len(after) :]]
        assert all(map(math.isnan, row.logprobs))
        assert (row.source, row.success, row.reward, row.spans) == ("spliced", True, 1.0, [])
        assert row.n_action_tokens == sum(row.action_mask)
        assert row.n_steps == len(turn_spans(after, [])) + 1
        again = blocking(replayed(Rooms(), row, known[row.task_id]))
        assert again is not None
        assert again.score.success, "made again, it is a success"
    metrics = made.metrics
    reasons = ("no_common_state", "unproved", "too_many_turns", "doubled", "never_solved", "over_per_task")
    assert metrics["spliced"] == len(rows)
    assert metrics["failed"] == len(rows) + sum(int(metrics.get(reason) or 0) for reason in reasons)
    assert metrics["failed"] == sum(not row.success for row in given.values())
    assert metrics["environment_calls"] >= sum(sum(len(m.tool_calls) for m in row.messages) for row in rows)
    assert len({tuple(row.input_ids) for row in rows}) == len(rows)


def walk(task: Task, *actions: str) -> Trajectory:
    """A row of these actions, as `rooms` answers them."""
    from agentrl.schemas.trajectory import Termination

    async def made() -> Trajectory:
        episode = await Rooms().reset(task)
        messages = list(episode.opening)
        for number, action in enumerate(actions):
            message = said(action, number)
            messages += [message, *(await episode.step(message)).messages]
        score = await episode.score()
        name = f"{task.task_id}-{'-'.join(actions)}"
        return Trajectory(
            trajectory_id=name, episode_id=name, task_id=task.task_id, source="model", env=task.env, split="train",
            prompt=task.prompt, reward=score.reward, success=score.success, termination=Termination.ANSWERED,
            messages=messages, tools=episode.tools, n_steps=len(actions),
        )  # fmt: skip

    return blocking(made())


@pytest.fixture(scope="module")
def task(harness: Harness) -> Task:
    """A walk of one step."""
    return harness.run(generate, {"env": {"type": "rooms", "levels": [1]}, "train": 1, "dev": 0, "heldout": 0})[
        "train"
    ].read()[0]


def right_and_wrong(task: Task) -> tuple[str, str, str]:
    """The door to the goal, one that leads elsewhere, and the door back from there."""
    for door in ("left", "right", "tunnel"):
        if walk(task, door, "answer").success:
            right = door
    wrong = "left" if right != "left" else "right"
    return right, wrong, {"left": "right", "right": "left"}[wrong]


def test_joints_are_where_both_rows_may_have_been_in_one_state(task: Task) -> None:
    right, wrong, back = right_and_wrong(task)
    success = walk(task, right, "answer")
    assert success.success
    there = walk(task, wrong, back, wrong, "answer")
    assert joints(there, success) == [Joint(kept, 0, False) for kept in (1, 2, 3)], "the two parted at once"
    around = walk(task, right, wrong, back, "answer")
    detour = walk(task, wrong, back, right, "answer")
    assert detour.success
    assert Joint(2, 1, True) not in joints(around, detour), "it came there as fast as the success: no mistake"
    assert joints(success, success) == []
    assert joints(walk(task, "answer"), success) == [], "after an answer nothing can be taken back"
    longer = walk(task, wrong, back, wrong, back, "answer")
    assert joints(longer, detour) == [Joint(3, 1, True), Joint(3, 2, False), Joint(4, 2, True)]


def test_the_earliest_joint_is_proved_and_what_cannot_be_is_counted(harness: Harness, model: Model, task: Task) -> None:
    right, wrong, back = right_and_wrong(task)
    success, lost = walk(task, right, "answer"), walk(task, wrong, "answer")
    there, early = walk(task, wrong, back, "answer"), walk(task, "answer")
    given = {"tasks": [harness.tasks([task])], "model": model}

    def run(*rows: Trajectory, **config: Any) -> Any:
        named = [
            row.model_copy(update={"trajectory_id": f"{harness._count}-{n}", "episode_id": f"{harness._count}-{n}"})
            for n, row in enumerate(rows)
        ]
        return harness.run(splice, config, trajectories=[harness.trajectories(named)], **given)

    made = run(there, success)
    [row] = made["trajectories"].read()
    turns = acting(row.messages)
    assert [len(turn.tool_calls) for turn in turns] == [1, 1, 1, 0]
    assert turns[2].content in REVISIONS
    assert made.metrics["replays_diverged"] == 1, "after the first door the two were elsewhere"
    with pytest.warns(UserWarning, match="made no trajectories: .*unproved 1"):
        made = run(lost, success)
    assert (made.metrics["replays_diverged"], made.metrics["environment_calls"]) == (1, 2)
    with pytest.warns(UserWarning, match="made no trajectories"):
        assert run(there, success, tries=1).metrics["unproved"] == 1
    with pytest.warns(UserWarning, match="made no trajectories"):
        assert run(early, success).metrics["no_common_state"] == 1
    with pytest.warns(UserWarning, match="made no trajectories"):
        assert run(there, lost).metrics["never_solved"] == 2
    made = run(there, there, success, there.model_copy(update={"success": None, "reward": None}))
    assert (made.metrics["spliced"], made.metrics["doubled"], made.metrics["unscored"]) == (1, 1, 1)
    more = walk(task, wrong, back, wrong, back, "answer")
    made = run(there, more, success, per_task=1)
    assert (made.metrics["spliced"], made.metrics["over_per_task"]) == (1, 1)


def test_a_mistake_that_changed_nothing_is_taken_back_in_place(harness: Harness, model: Model) -> None:
    """In `lookup` calls only read, so a success goes on after any wrong question. The rows are an expert's text."""
    drawn = harness.run(generate, {"env": "lookup", "train": 8, "dev": 0, "heldout": 0})["train"]
    slips = [harness.run(synthesize, {"noise": noise}, tasks=drawn)["trajectories"] for noise in (1.0, 0.0)]
    notes = [
        Note(note_id=row.trajectory_id, scope="task", task_id=row.task_id, env="lookup", split="train", made_from=
             row.trajectory_id, by="env", text=f"not {row.task_id}") for row in slips[0].read() if not row.success
    ]  # fmt: skip
    made = harness.run(splice, trajectories=slips, model=model, notes=harness.notes(notes))
    rows, given = made["trajectories"].read(), by_id(*slips)
    assert len(rows) >= 3
    for row in rows:
        revised = next(message for message in row.messages if message.token_start == row.fork_at)
        assert revised.content == f"not {row.task_id}", "a note of the row says what was wrong"
        success = given[row.tags[0].removeprefix("success:")]
        assert sum(message.role is Role.TOOL for message in row.messages) > sum(
            message.role is Role.TOOL for message in success.messages
        )
    assert made.metrics["foreign_tokens"] > 2 * len(rows)


@pytest.mark.slow
def test_spliced_rows_are_for_supervised_training_alone(harness: Harness, model: Model, walks: Trajectories) -> None:
    made = harness.run(splice, trajectories=[walks], model=model)["trajectories"]
    assert harness.run(sft, TRAIN, trajectories=[made], model=model).metrics["rows"] == len(made.ids())
    with pytest.raises(Exception, match="logprobs not finite"):
        harness.run(offline, {**TRAIN, "algorithm": {"type": "reinforce++"}}, trajectories=[made, walks], model=model)


def test_what_cannot_be_spliced_is_refused_by_name(harness: Harness, model: Model, task: Task) -> None:
    right, wrong, _ = right_and_wrong(task)
    rows = [walk(task, wrong, "answer"), walk(task, right, "answer")]

    def given(**changes: Any) -> Trajectories:
        count = harness._count
        return harness.trajectories(
            [row.model_copy(update={"trajectory_id": f"x{count}-{n}", "episode_id": f"x{count}-{n}", **changes})
             for n, row in enumerate(rows)]
        )  # fmt: skip

    known = [harness.tasks([task])]
    with pytest.raises(
        ValueError, match=r"2 of 2 rows are not of the train split.*nothing is made from what is measur"
    ):
        harness.run(splice, trajectories=[given(split="heldout")], model=model, tasks=known)
    slippery = 'rooms{"slip": 0.2}'
    slips = [harness.tasks([task.model_copy(update={"env": slippery})])]
    with pytest.raises(ValueError, match=r"cannot be continued: it may answer .* as slip of rooms"):
        harness.run(splice, trajectories=[given(env=slippery)], model=model, tasks=slips)
    with pytest.raises(ValueError, match=r"which inputs\.tasks lack; wire all tasks"):
        harness.run(splice, trajectories=[given()], model=model, tasks=[harness.tasks([])])
    leaked = harness.notes([
        Note(note_id="n", scope="task", task_id="t", env="rooms", split="dev", text="so", made_from="d", by="env")
    ])  # fmt: skip
    with pytest.raises(ValueError, match="of split dev"):
        harness.run(splice, trajectories=[given()], model=model, tasks=known, notes=leaked)
