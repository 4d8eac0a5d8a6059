"""Notes of failed attempts: who writes them, who reads them, and what is never noted."""

import json
from pathlib import Path
from typing import Any

import pytest
from judge_server import judging
from pydantic import ValidationError
from scripted_engine import Scripted

from agentrl.engines.base import Engine
from agentrl.engines.configs import EngineConfig
from agentrl.environments import load_environment
from agentrl.pipelines.handles import Model, NoteTable, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.reflexion.notes import reflect
from agentrl.pipelines.methods.reflexion.reflection import CHARS, asked
from agentrl.pipelines.methods.star.rationalize import rationalize
from agentrl.pipelines.parts.in_context import Showing
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import reject, sample, synthesize
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.note import Note
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import NOT_TRAINED, Message, Role, ToolCall, Trajectory

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("notes"))


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "lookup", "train": 8, "dev": 1, "heldout": 4})["train"]


@pytest.fixture(scope="module")
def slips(harness: Harness, tasks: Tasks) -> Trajectories:
    return harness.run(synthesize, {"noise": 1.0}, tasks=tasks)["trajectories"]


@pytest.fixture(scope="module")
def noted(harness: Harness, tasks: Tasks, slips: Trajectories) -> NoteTable:
    return harness.run(reflect, tasks=tasks, trajectories=[slips])["notes"]


@pytest.fixture(scope="module")
def warm(harness: Harness, tasks: Tasks, noted: NoteTable) -> Model:
    """It has learnt to act right and wrong, with notes and without."""
    shown = [
        harness.run(synthesize, {"context": [{"notes": {}}]}, tasks=tasks, notes=noted)["trajectories"],
        *(harness.run(synthesize, {"noise": noise}, tasks=tasks)["trajectories"] for noise in (0.0, 1.0)),
    ]
    config = {"model": {"init": "tiny"}, "steps": 40, "batch": 8, "optimizer": {"lr": 5e-3, "warmup": 10}}
    return harness.run(sft, config, trajectories=shown)["model"]


def note(number: int, task_id: str | None, text: str = "not left", **more: Any) -> Note:
    given = {"scope": "task", "env": "lookup", "split": "train", "made_from": "row", "by": "env", **more}
    return Note(note_id=f"n{number}", task_id=task_id, text=text, **given)


def words(text: str) -> int:
    return len(text.split())


# -- what is noted


def walked(env: str, *turns: Any) -> str:
    """What the environment says of an attempt at its first task with these turns."""
    environment = load_environment(env)
    [task] = environment.tasks({"train": 1}, 0)["train"]
    messages = [Message(role=Role.USER, content=task.prompt)]
    for number, (turn, answer) in enumerate(turn(environment, task) for turn in turns):
        call = ToolCall(id=str(number), name=turn["name"], arguments=json.dumps(turn["arguments"]))
        messages += [Message(role=Role.ASSISTANT, tool_calls=[call])]
        messages += [Message(role=Role.TOOL, content=answer, tool_call_id=str(number))]
    row = Trajectory(
        trajectory_id="r", episode_id="r", task_id=task.task_id, source="model", env=env, split="train", prompt="?",
        reward=0.0, success=False, termination="answered", messages=messages,
    )  # fmt: skip
    return environment.reflect(row, task)  # type: ignore[attr-defined, no-any-return]


def through(door_of: Any) -> Any:
    """A step of a walk, through the door that ``door_of(house, room, goal)`` names."""

    def turn(environment: Any, task: Task) -> tuple[dict[str, Any], str]:
        house, where = environment.house, json.loads(task.metadata)
        room, goal = house.numbers[where["start"]], house.numbers[where["goal"]]
        door = door_of(house, room, goal)
        behind = house.leads[room][("left", "right", "tunnel").index(door)]
        return {"name": "go", "arguments": {"door": door}}, house.names[behind]

    return turn


def test_a_walk_is_told_its_first_wrong_door() -> None:
    def wrong(house: Any, room: int, goal: int) -> str:
        ahead = house.distances(goal)
        behind = zip(("left", "right", "tunnel"), house.leads[room], strict=True)
        return next(door for door, other in behind if ahead[other] >= ahead[room])

    environment = load_environment("rooms")
    [task] = environment.tasks({"train": 1}, 0)["train"]
    where = json.loads(task.metadata)
    house = environment.house  # type: ignore[attr-defined]
    door = wrong(house, house.numbers[where["start"]], house.numbers[where["goal"]])
    assert walked("rooms", through(wrong)) == f"not {door} at {where['start']}"
    assert walked("rooms") == f"go on at {where['start']}"


def test_a_question_is_told_its_first_wrong_call() -> None:
    environment = load_environment("lookup")
    for task in environment.tasks({"train": 12}, 0)["train"]:
        right = demonstrate(environment, task, 0.0, 0, "right")
        assert environment.reflect(right, task) == "answer what the last call returned"  # type: ignore[attr-defined]
        start = json.loads(task.metadata)["start"]
        early = right.model_copy(update={"messages": right.messages[:1]})
        assert environment.reflect(early, task) == f"go on at {start}"  # type: ignore[attr-defined]
    asked = {"name": "find", "arguments": {"who": "Nobody", "rel": "boss"}}
    assert walked("lookup", lambda *_: (asked, "unknown")) == "not boss of Nobody"


def test_each_unsolved_task_has_notes_of_its_own_failures(
    harness: Harness, tasks: Tasks, slips: Trajectories, noted: NoteTable
) -> None:
    rows = {row.trajectory_id: row for row in slips.read()}
    failed = {row.task_id for row in rows.values() if not row.success}
    notes = noted.read()
    assert {note.task_id for note in notes} == failed
    for note in notes:
        assert rows[note.made_from].task_id == note.task_id
        assert (note.by, note.split, note.env, note.scope) == ("env", "train", "lookup", "task")
    right = harness.run(synthesize, tasks=tasks)["trajectories"]
    made = harness.run(reflect, tasks=tasks, trajectories=[slips, right])
    assert made["notes"].read() == [], "solved tasks need no note"


def test_the_newest_notes_stay_and_what_they_were_good_for_is_counted(
    harness: Harness, tasks: Tasks, slips: Trajectories
) -> None:
    rows = [row for row in slips.read() if not row.success]
    name = rows[0].task_id
    earlier = harness.notes([note(1, name, "one"), note(2, name, "two"), note(3, "other", "kept")])
    shown = [
        row.model_copy(update={"trajectory_id": f"shown-{n}", "tags": ["note:n2"], "success": n == 0, "task_id": task})
        for n, (row, task) in enumerate([(rows[0], "else"), (rows[0], name)])
    ]
    made = harness.run(reflect, {"memory": 2}, tasks=tasks, trajectories=[harness.trajectories(shown)], notes=earlier)
    mine = [note for note in made["notes"].read() if note.task_id == name]
    assert [entry.text for entry in mine][:1] == ["two"]
    assert len(mine) == 2
    assert (mine[0].trials, mine[0].wins) == (2, 1)
    assert [note.text for note in made["notes"].read() if note.task_id == "other"] == ["kept"]
    again = harness.run(reflect, tasks=tasks, trajectories=[harness.trajectories(
        [rows[0].model_copy(update={"trajectory_id": "again"})])], notes=made["notes"])  # fmt: skip
    assert again.metrics["repeated"] == 1, "the same advice comes once"


def test_attempts_that_get_no_note_are_counted(harness: Harness, tasks: Tasks, slips: Trajectories) -> None:
    failed = next(row for row in slips.read() if not row.success)
    updates: list[dict[str, Any]] = [{}, {}, {}, {"success": None, "reward": None}, {"tags": [NOT_TRAINED]}]
    rows = [failed.model_copy(update={"trajectory_id": f"counted-{n}", **update}) for n, update in enumerate(updates)]
    made = harness.run(reflect, {"memory": 2}, tasks=tasks, trajectories=[harness.trajectories(rows)])
    left = {name: made.metrics[name] for name in ("failed", "older", "unscored", "not_trained")}
    assert left == {"failed": 2, "older": 1, "unscored": 1, "not_trained": 1}


class Advising(EngineConfig):
    """An engine that gives this advice."""

    exact = False
    type: str
    advice: str = "look again"

    def build(self, policy: Any) -> Engine:
        return Scripting(self.advice)  # type: ignore[return-value]


class Scripting(Scripted):
    async def load(self, weights: Any) -> None: ...
    async def close(self) -> None: ...


def test_an_engine_may_write_the_notes(harness: Harness, tasks: Tasks, slips: Trajectories) -> None:
    by = {"type": f"{__name__}:Advising", "advice": "ask for the boss first"}
    made = harness.run(reflect, {"by": by}, tasks=tasks, trajectories=[slips])
    assert {note.text for note in made["notes"].read()} == {"ask for the boss first"}
    assert made.metrics["made"] == made.metrics["failed"]
    silent = {"type": f"{__name__}:Advising", "advice": " "}
    with pytest.warns(UserWarning, match="no note was made of"):
        made = harness.run(reflect, {"by": silent}, tasks=tasks, trajectories=[slips])
    assert made.metrics["unsaid"] == made.metrics["failed"]


def test_the_policy_may_write_its_notes(harness: Harness, tasks: Tasks, slips: Trajectories, warm: Model) -> None:
    config = {"by": {"type": "transformers"}, "sampling": {"max_turn_tokens": 4, "max_tokens": 192}}
    failed = next(row for row in slips.read() if not row.success)
    few = harness.trajectories([failed.model_copy(update={"trajectory_id": "few", "messages": failed.messages[:2]})])
    made = harness.run(reflect, config, tasks=tasks, trajectories=[few], model=warm)
    assert made.metrics["made"] + made.metrics["unsaid"] == 1
    with pytest.raises(ValueError, match=r"samples from a model; wire inputs\.model"):
        harness.run(reflect, config, tasks=tasks, trajectories=[few])


def test_a_model_behind_an_endpoint_may_write_the_notes(
    harness: Harness, tasks: Tasks, slips: Trajectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked about each failed attempt, over HTTP, and its words are that task's note."""
    monkeypatch.setenv("JUDGE_KEY", "secret")

    def critic(request: dict[str, Any]) -> str:
        attempt = json.loads(request["messages"][-1]["content"].split("as JSON:\n")[1].removesuffix("\n\nThe note:"))
        return f"begin again with {attempt['turns'][0]['content']}"

    config = {"memory": 1, "sampling": {"max_turn_tokens": 64}}
    with judging(critic) as server:
        made = harness.run(reflect, {"by": server.engine, **config}, tasks=tasks, trajectories=[slips])
    failed = {row.task_id: row for row in slips.read() if not row.success}
    notes = {note.task_id: note for note in made["notes"].read()}
    assert {name: note.text for name, note in notes.items()} == {
        name: f"begin again with {row.prompt}" for name, row in failed.items()
    }
    assert {note.by for note in notes.values()} == {"openai"}
    assert len(server.requests) == len(failed)


def test_what_a_model_is_asked_is_json_of_bounded_length(slips: Trajectories) -> None:
    row = slips.read()[0]
    text = asked(row)
    assert json.loads(text.split("as JSON:\n")[1].removesuffix("\n\nThe note:"))["turns"][0]["content"] == row.prompt
    long = row.model_copy(update={"messages": [Message(role=Role.USER, content="x" * 3 * CHARS)]})
    assert len(asked(long)) < 2 * CHARS
    assert "characters are left out" in asked(long)


# -- what is never noted, or shown


def test_notes_of_measured_tasks_are_refused(harness: Harness, tasks: Tasks, slips: Trajectories, warm: Model) -> None:
    row = slips.read()[0].model_copy(update={"trajectory_id": "held", "split": "heldout"})
    with pytest.raises(ValueError, match=r"held is of split heldout.*trajectories\.select"):
        harness.run(reflect, tasks=tasks, trajectories=[harness.trajectories([row])])
    leaked = harness.notes([note(1, "t"), note(2, "t", split="dev", made_from="dev-row")])
    with pytest.raises(ValueError, match=r"n2 was made from dev-row, of split dev"):
        harness.run(sample, {"context": [{"notes": {}}]}, tasks=tasks, notes=leaked, model=warm)
    with pytest.raises(ValueError, match="of split dev"):
        harness.run(reflect, tasks=tasks, trajectories=[slips], notes=leaked)


def test_what_cannot_work_is_refused(
    harness: Harness, tasks: Tasks, slips: Trajectories, noted: NoteTable, warm: Model
) -> None:
    for config, inputs, message in (
        ({"context": [{"notes": {}}]}, {}, r"wire inputs\.notes"),
        ({}, {"notes": noted}, r"set context: \[\{notes: \{\}\}\]"),
        ({"retries": 2}, {}, r"wire inputs\.trajectories"),
        ({}, {"trajectories": [slips]}, "set retries"),
    ):
        with pytest.raises(ValueError, match=message):
            harness.run(sample, config, tasks=tasks, model=warm, **inputs)
    for stage, config in (
        (sample, {"retries": 2, "samples": 2}),
        (sample, {"context": [{}]}),
        (sample, {"context": [{"hints": {}}]}),
        (rationalize, {"context": [{"notes": {}}], "hint": "({answer})"}),
    ):
        with pytest.raises(ValidationError):
            stage.config.model_validate(config)


# -- who reads them


def showing(harness: Harness, notes: list[Note], **item: Any) -> Showing:
    config = sample.config.model_validate({"context": [{"notes": item}]})
    return Showing(config.context, harness.notes(notes), words)  # type: ignore[attr-defined]


def test_a_note_reaches_its_own_task_only_and_the_newest_come_first(harness: Harness, tasks: Tasks) -> None:
    first, two, *_ = tasks.read()
    notes = [note(n, first.task_id, f"advice {n}") for n in range(5)]
    both = showing(harness, [*notes, note(9, two.task_id, "else"), note(8, None, "all", scope="env")], k=3)
    assert both.of(first).text == "Notes: advice 3; advice 4; all"
    assert both.of(first).tags == ("note:n3", "note:n4", "note:n8")
    assert both.of(two).text == "Notes: else; all"
    assert both(first) == both(first)
    assert both.counts["notes_shown"] == 6
    small = showing(harness, notes, k=3, max_tokens=5)
    assert small.of(first).text == "Notes: advice 3; advice 4"
    assert small.counts["notes_without_room"] == 1


def test_unsolved_tasks_are_tried_again_with_their_notes(
    harness: Harness, tasks: Tasks, warm: Model, noted: NoteTable
) -> None:
    first = harness.run(sample, {"samples": 2, "sampling": LIMITS}, model=warm, tasks=tasks)["trajectories"]
    rows = first.read()
    unsolved = {row.task_id for row in rows} - {row.task_id for row in rows if row.success}
    assert 0 < len(unsolved) < 8
    reflected = harness.run(reflect, tasks=tasks, trajectories=[first], notes=noted)["notes"]
    config = {"retries": 3, "context": [{"notes": {"k": 2}}], "sampling": LIMITS}
    again = harness.run(sample, config, model=warm, tasks=tasks, trajectories=[first], notes=reflected)
    made = again["trajectories"].read()
    assert {row.task_id for row in made} == unsolved
    assert len(made) == 3 * len(unsolved) == 3 * again.metrics["unsolved"]
    own = {note.note_id: note for note in reflected.read()}
    last = {row.task_id: row.trajectory_id for row in rows}
    for row in made:
        named = [tag.removeprefix("note:") for tag in row.tags if tag.startswith("note:")]
        assert 0 < len(named) <= 2
        assert {own[name].task_id for name in named} == {row.task_id}
        assert row.messages[0].content.endswith("; ".join(own[name].text for name in named))
        assert (row.source, row.parent_id, "trial:2" in row.tags) == ("reflected", last[row.task_id], True)
    third = harness.run(
        sample, {"retries": 1, "sampling": LIMITS}, model=warm, tasks=tasks, trajectories=[again["trajectories"]]
    )["trajectories"].read()
    assert all("trial:3" in row.tags for row in third)


def test_measured_tasks_are_not_retried_and_solved_ones_neither(
    harness: Harness, tasks: Tasks, slips: Trajectories
) -> None:
    held = harness.tasks([task.model_copy(update={"split": "heldout"}) for task in tasks.read()])
    engine = {"type": f"{__name__}:Advising"}
    config = {"retries": 1, "engine": engine, "sampling": LIMITS}
    with pytest.raises(ValueError, match=r"retries choose tasks by their outcomes.*of split heldout"):
        harness.run(sample, config, tasks=held, trajectories=[slips])
    right = harness.run(synthesize, tasks=tasks)["trajectories"]
    with pytest.warns(UserWarning, match="nothing is tried again"):
        assert harness.run(sample, config, tasks=tasks, trajectories=[slips, right])["trajectories"].ids() == []


def test_guided_successes_are_kept_without_their_notes(
    harness: Harness, tasks: Tasks, warm: Model, slips: Trajectories, noted: NoteTable, tmp_path: Path
) -> None:
    config = {"samples": 8, "context": [{"notes": {}}], "sampling": LIMITS}
    made = harness.run(rationalize, config, model=warm, tasks=tasks, trajectories=[slips], notes=noted)
    rows = made["trajectories"].read()
    assert rows, made.metrics
    prompts = {task.task_id: task.prompt for task in tasks.read()}
    for row in rows:
        guided = harness.buffer.get(str(row.parent_id))
        assert guided.messages[0].content.startswith(f"{row.prompt} Notes: ")
        assert any(tag.startswith("note:") for tag in guided.tags)
        assert row.messages[0].content == prompts[row.task_id]
        tail = sum(row.action_mask)
        assert row.input_ids[-tail:] == guided.input_ids[-tail:]
    assert made.metrics["without_notes"] == 0
    assert harness.run(reject, trajectories=[made["trajectories"]])["trajectories"].ids()
