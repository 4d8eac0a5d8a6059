"""Solved rows without what they were shown: notes, and runs of other tasks."""

import math
from typing import Any

import pytest
from forked import LIMITS, harness, tabular

from agentrl.environments.rooms.environment import Rooms
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.handles import Model, NoteTable, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.eto.outcome import outcome
from agentrl.pipelines.methods.reflexion.notes import reflect
from agentrl.pipelines.methods.star.rationalize import rationalize
from agentrl.pipelines.stages.reopen import reopen
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.rollouts.reopen import opening_of
from agentrl.schemas.trajectory import Message, Role, Trajectory

__all__ = ["harness", "tabular"]


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "rooms", "train": 8, "dev": 0, "heldout": 0})["train"]


@pytest.fixture(scope="module")
def model(harness: Harness, tasks: Tasks) -> Model:
    """Its weights are never asked; it has room for what is shown."""
    spoken = [demonstrate(Rooms(), task, 0.3, 0, "t").messages for task in tasks.read()]
    return harness.model(tiny_policy(spoken, 0, TinySize(context=1024)).save)


@pytest.fixture(scope="module")
def slips(harness: Harness, tasks: Tasks) -> Trajectories:
    return harness.run(synthesize, {"noise": 1.0}, tasks=tasks)["trajectories"]


@pytest.fixture(scope="module")
def noted(harness: Harness, tasks: Tasks, slips: Trajectories) -> NoteTable:
    return harness.run(reflect, tasks=tasks, trajectories=[slips])["notes"]


@pytest.fixture(scope="module")
def retries(harness: Harness, tasks: Tasks, slips: Trajectories, noted: NoteTable, model: Model) -> Trajectories:
    config = {"retries": 8, "context": [{"notes": {}}], "sampling": {"max_tokens": 600}}
    made = harness.run(sample, config, tasks=tasks, trajectories=[slips], notes=noted, model=model)
    return made["trajectories"]


def again(harness: Harness, rows: list[Trajectory], **changes: Any) -> Trajectories:
    name = f"again-{harness._count}"
    ids = [{"trajectory_id": f"{name}-{n}", "episode_id": f"{name}-{n}", **changes} for n in range(len(rows))]
    return harness.trajectories([row.model_copy(update=token) for row, token in zip(rows, ids, strict=True)])


def test_solved_retries_are_reopened_without_their_notes(
    harness: Harness, model: Model, retries: Trajectories, tasks: Tasks
) -> None:
    made = harness.run(reopen, trajectories=[retries], model=model)
    rows, given = made["trajectories"].read(), {row.trajectory_id: row for row in retries.read()}
    solved = {name for name, row in given.items() if row.success}
    assert {row.parent_id for row in rows} == solved != set()
    assert made.metrics["reopened"] == len(solved)
    assert made.metrics["failed"] == len(given) - len(solved)
    prompts = {task.task_id: task.prompt for task in tasks.read()}
    for row in rows:
        old = given[row.parent_id or ""]
        assert [message.content for message in opening_of(row)] == [prompts[row.task_id]]
        assert opening_of(old)[0].content.startswith(f"{row.prompt} Notes: ")
        at, was = (entry.messages[1].token_start for entry in (row, old))
        assert row.input_ids[at:] == old.input_ids[was:]
        assert row.action_mask[at:] == old.action_mask[was:]
        assert not any(row.action_mask[:at])
        assert all(map(math.isnan, row.logprobs))
        assert (row.source, row.success, row.group_id) == ("reopened", True, old.group_id)
        assert not any(tag.startswith("note:") for tag in row.tags)
        assert "trial:2" in row.tags
    with pytest.raises(ValueError, match=r"has tokens; wire inputs\.model"):
        harness.run(reopen, trajectories=[retries])


def test_text_is_reopened_and_what_was_shown_nothing_stays_as_it_is(
    harness: Harness, tasks: Tasks, noted: NoteTable
) -> None:
    shown = harness.run(synthesize, {"context": [{"notes": {}}]}, tasks=tasks, notes=noted)["trajectories"]
    plain = harness.run(synthesize, tasks=tasks)["trajectories"]
    made = harness.run(reopen, trajectories=[shown, plain])
    with_notes = [row for row in shown.read() if row.tags]
    nothing = len(shown.ids()) - len(with_notes) + len(plain.ids())
    assert (made.metrics["reopened"], made.metrics["shown_nothing"]) == (len(with_notes), nothing)
    assert set(plain.ids()) < set(made["trajectories"].ids())
    by_parent = {row.parent_id: row for row in made["trajectories"].read()}
    for row in with_notes:
        assert by_parent[row.trajectory_id].messages[1:] == row.messages[1:]
        assert by_parent[row.trajectory_id].messages[0].content == row.prompt


def test_a_success_that_only_repeats_what_it_was_shown_is_left_out(harness: Harness, tasks: Tasks) -> None:
    row = harness.run(synthesize, tasks=tasks)["trajectories"].read()[0]
    goal = row.prompt.split(" to ")[1].rstrip("?")

    def told(text: str, *rest: Message) -> Trajectory:
        opening = Message(role=Role.USER, content=f"{row.prompt} Notes: {text}")
        return row.model_copy(update={"messages": [opening, *rest]})

    here = Message(role=Role.ASSISTANT, content="here")
    rows = [told(f"you are at {goal}", here), told("look around", here), told(f"to {goal}", *row.messages[1:])]
    made = harness.run(reopen, trajectories=[again(harness, rows)])
    assert (made.metrics["ungrounded"], made.metrics["reopened"]) == (1, 2)
    other = row.model_copy(update={"messages": [Message(role=Role.USER, content="Go!"), *row.messages[1:]]})
    assert harness.run(reopen, trajectories=[again(harness, [other])]).metrics["other_opening"] == 1


def test_measured_rows_and_unknown_tasks_are_refused(
    harness: Harness, tasks: Tasks, slips: Trajectories, model: Model
) -> None:
    right = harness.run(synthesize, tasks=tasks)["trajectories"].read()
    with pytest.raises(
        ValueError, match=r"[0-9]+ of [0-9]+ rows are not of the train split.*is of 'dev': nothing is made"
    ):
        harness.run(reopen, trajectories=[again(harness, right, split="dev")])
    held = harness.tasks([task.model_copy(update={"split": "heldout"}) for task in tasks.read()])
    with pytest.raises(ValueError, match=r"retries choose tasks by their outcomes, and 8 of 8.* of split heldout"):
        harness.run(rationalize, model=model, tasks=held, trajectories=[slips])
    with pytest.raises(ValueError, match=r"is of task .*, which inputs\.tasks lack"):
        harness.run(reopen, trajectories=[again(harness, right)], tasks=[harness.tasks(tasks.read()[:1])])


def test_guidance_by_experience_is_taken_out_again(
    harness: Harness, tasks: Tasks, model: Model, slips: Trajectories
) -> None:
    """The unsolved tasks are tried with runs of other tasks in sight; a success is kept without them."""
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    config = {"samples": 8, "context": [{"experience": {"k": 1}}], "sampling": {"max_tokens": 900}}
    inputs = {"model": model, "tasks": tasks, "trajectories": [slips]}
    made = harness.run(rationalize, config, experience=[expert], **inputs)
    rows = made["trajectories"].read()
    assert rows
    for row in rows:
        guided = harness.buffer.get(row.parent_id or "")
        [shown] = [tag.removeprefix("experience:") for tag in guided.tags]
        assert harness.buffer.get(shown).task_id != row.task_id, "never a run of the task itself"
        assert guided.messages[0].content.startswith(f"{row.prompt} Solved before:")
        assert (row.messages[0].content, row.tags) == (row.prompt, [])
    assert made.metrics["experience_shown"] == made.metrics["retries"]
    with pytest.raises(ValueError, match=r"context shows experience, and none is wired"):
        harness.run(rationalize, config, **inputs)


def test_a_guided_success_is_preferred_to_the_failure_without_guidance(
    harness: Harness, tasks: Tasks, model: Model, noted: NoteTable
) -> None:
    failures = harness.run(sample, {"samples": 2, **LIMITS}, model=model, tasks=tasks)["trajectories"]
    config = {"samples": 8, "context": [{"notes": {}}], "sampling": {"max_tokens": 600}}
    guided = harness.run(rationalize, config, model=model, tasks=tasks, trajectories=[failures], notes=noted)
    pairs = harness.run(outcome, trajectories=[guided["trajectories"], failures], model=model)["pairs"]
    of_guided = {row.trajectory_id: row for row in guided["trajectories"].read()}
    unguided = {row.trajectory_id: row for row in failures.read()}
    mixed = [pair for pair in pairs.read() if pair.chosen_id in of_guided]
    assert mixed
    for pair in mixed:
        assert not unguided[pair.rejected_id].success
        assert pair.shared_prefix >= opening_of(of_guided[pair.chosen_id])[0].token_end, "one opening, without notes"
