"""New tasks that models propose: each is one, new, and not held out, or is refused and counted."""

import json
from random import Random
from typing import Any

import pytest
from judge_server import judging
from pydantic import ValidationError

from agentrl.environments import load_environment
from agentrl.environments.rooms.environment import Rooms
from agentrl.pipelines.handles import Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.webrl.propose import propose
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task


@pytest.fixture
def harness(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setenv("JUDGE_KEY", "key")
    return Harness(tmp_path)


def drawn(env: str = "rooms") -> dict[str, list[Task]]:
    return load_environment(env).tasks({"train": 12, "heldout": 6}, 0)


def wired(harness: Harness, splits: dict[str, list[Task]]) -> dict[str, list[Tasks]]:
    return {"tasks": [harness.tasks(splits["train"])], "heldout": [harness.tasks(splits["heldout"])]}


def test_each_proposal_becomes_a_task_or_is_refused_for_one_reason(harness: Harness) -> None:
    splits = drawn()
    old, held = splits["train"][0].prompt, splits["heldout"][0].prompt
    known = {task.prompt for tasks in splits.values() for task in tasks}
    new = next(text for text in ("attic to bath?", "attic to cave?", "attic to deck?") if text not in known)
    texts = [new, old, held, new, "attic to nowhere?", "Buy a car.", ""]
    with judging(lambda asked: f"Here they are: {json.dumps({'tasks': texts})}") as server:
        config = {"by": {"engines": [server.engine]}, "requests": 1, "shown": 5}
        made = harness.run(propose, config, **wired(harness, splits))
    [task] = made["tasks"].read()
    assert (task.prompt, task.env, task.split) == (new, "rooms", "train")
    rows = made["proposals"].table().to_pylist()
    assert [row["text"] for row in rows] == texts
    assert [row["refused"] for row in rows] == [
        None, "doubled", "heldout_prompt", "doubled", "not_a_task", "not_a_task", "not_a_task"
    ]  # fmt: skip
    assert [row["task_id"] is not None for row in rows] == [True] * 4 + [False] * 3
    counts = {"failed": 12, "proposed": 7, "tasks": 1, "doubled": 2, "heldout_prompt": 1, "not_a_task": 3}
    assert counts.items() <= made.metrics.items()
    [prompt] = server.prompts()
    shown = [task.prompt for task in splits["train"] if json.dumps(task.prompt) in prompt]
    assert len(shown) == 5
    assert '"go"' in prompt, "the tools are shown"


def test_an_environment_may_say_why_a_proposal_is_no_task(harness: Harness) -> None:
    texts = ["def f(n):\n    return n + 1\nf(1)", "def f(n):\n    return open(n)\nf(1)", "f(1)"]
    with judging(lambda asked: json.dumps({"tasks": texts})) as server:
        config = {"by": {"engines": [server.engine]}, "requests": 1, "shown": 5}
        made = harness.run(propose, config, **wired(harness, drawn('program_io{"kinds": ["deduction"]}')))
    refused = [row["refused"] for row in made["proposals"].table().to_pylist()]
    assert refused == [None, "not_a_task_forbidden", "not_a_task_form"]
    assert {"tasks": 1, "not_a_task_forbidden": 1, "not_a_task_form": 1}.items() <= made.metrics.items()


def test_models_are_asked_in_turn_until_there_are_tasks_enough(harness: Harness) -> None:
    names = load_environment("rooms").house.names  # type: ignore[attr-defined]
    pairs = iter([f"{a} to {b}?" for a in names for b in names if a != b])

    def reply(asked: dict[str, Any]) -> str:
        return json.dumps({"tasks": [next(pairs) for _ in range(4)]})

    splits = drawn()
    with judging(reply) as first, judging(reply) as second:
        config = {"by": {"engines": [first.engine, second.engine]}, "n": 6, "requests": 8, "shown": 3}
        made = harness.run(propose, config, **wired(harness, splits))
    assert len(made["tasks"].read()) == 6
    assert len(first.requests) == len(second.requests) == 4
    assert len({task.task_id for task in made["tasks"].read()}) == 6


def test_a_reply_without_tasks_is_counted_and_no_task_at_all_is_warned_of(harness: Harness) -> None:
    with judging(lambda asked: "I had rather not.") as server:
        config = {"by": {"engines": [server.engine], "retries": 1}, "requests": 2}
        with pytest.warns(UserWarning, match="no task was proposed that is one"):
            made = harness.run(propose, config, **wired(harness, drawn()))
    assert made["tasks"].read() == []
    assert made.metrics["no_reply"] == 2
    assert len(server.requests) == 4


def test_a_question_gets_facts_of_its_own_and_is_solved_by_one_who_knows(harness: Harness) -> None:
    environment = load_environment("words")
    splits = drawn("words")
    texts = ["beast of the foe of Ann?", "beast of the beast of Ann?", "foe of Ann?", "beast of the foe of Zorro?"]
    with judging(lambda asked: json.dumps({"tasks": texts})) as server:
        config = {"by": {"engines": [server.engine]}, "requests": 1}
        made = harness.run(propose, config, **wired(harness, splits))
    [task] = made["tasks"].read()
    about = json.loads(task.metadata)
    assert (task.prompt, task.level, about["relations"]) == (texts[0], 2, ["rival", "pet"])
    foe = about["facts"]["Ann"]["rival"]
    assert json.loads(task.ground_truth) == about["facts"][foe]["pet"]
    assert about["subgoals"] == ["foe", "beast"]
    assert environment.goal(task)  # type: ignore[attr-defined]
    assert made.metrics["not_a_task"] == 3


def function(**changes: Any) -> dict[str, Any]:
    return {
        "question": "Return the sum of the squares of the values.",
        "function": "squares",
        "parameters": ["values"],
        "solution": "def squares(values):\n    return sum(value * value for value in values)\n",
        "tests": [[[[1, 2]], 5], [[[3]], 9], [[[]], 0], [[[-1, 1]], 2], [[[2, 2, 2]], 12]],
    } | changes


def test_a_function_becomes_a_task_if_its_solution_gives_the_results_of_its_tests(harness: Harness) -> None:
    splits = drawn("code")
    wrong = [
        function(tests=[[[[1, 2]], 5], [[[3]], 9], [[[]], 0], [[[-1, 1]], 7]]),
        function(solution="def squares(values) return 1"),
        function(tests=[[[[1]], 1]] * 5),
        function(tests=[[[1, 2], 5], [[[3]], 9], [[[]], 0], [[[-1, 1]], 2]]),
        function(function="import os; x"),
        function(parameters=["lambda"]),
        {"question": "What?"},
        "write a function",
    ]
    with judging(lambda asked: json.dumps({"tasks": [function(), *wrong, function()]})) as server:
        made = harness.run(propose, {"by": {"engines": [server.engine]}, "requests": 1}, **wired(harness, splits))
    [task] = made["tasks"].read()
    assert task.prompt == "In main.py, write squares(values): Return the sum of the squares of the values."
    assert (made.metrics["not_a_task"], made.metrics["doubled"]) == (len(wrong), 1)
    assert '"solution": "its whole code' in server.prompts()[0].replace("\\", "")
    about = json.loads(task.metadata)
    assert set(about["shown"]) == {"test_1", "test_2"}
    assert len(about["calls"]) == 3
    environment = load_environment("code")
    row = demonstrate(environment, task, 0.0, 0, "d")
    assert row.success, "its expert writes the solution, and the hidden tests pass"
    assert "2 passed, 0 failed" in [message.content.strip() for message in row.messages]


def test_tasks_that_are_measured_on_and_environments_without_proposals_are_refused(harness: Harness) -> None:
    with judging(lambda asked: "") as server:
        config = {"by": {"engines": [server.engine]}}
        splits = drawn()
        measured = {"tasks": [harness.tasks(splits["heldout"])], "heldout": []}
        with pytest.raises(ValueError, match="is of split 'heldout': nothing is made from what is measured on"):
            harness.run(propose, config, **measured)
        with pytest.raises(ValueError, match=r"env 'office' takes no proposals; give it proposed\(text, like"):
            harness.run(propose, config, **wired(harness, drawn("office")))
    with pytest.raises(ValidationError, match="a judge is an endpoint"):
        propose.config.model_validate({"by": {"engines": [{"type": "transformers"}]}})


def test_a_text_at_which_an_environment_fails_is_refused_and_shown(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proposed(self: Rooms, text: str, like: Task, random: Random) -> Task | None:
        raise IndexError(text)

    monkeypatch.setattr(Rooms, "proposed", proposed)
    with judging(lambda asked: json.dumps({"tasks": ["attic to bath?"]})) as server:
        config = {"by": {"engines": [server.engine]}, "requests": 1}
        with pytest.warns(UserWarning, match="(?s)environments failed while.*IndexError: attic to bath"):
            made = harness.run(propose, config, **wired(harness, drawn()))
    assert made.metrics["env_error"] == 1
    assert [row["refused"] for row in made["proposals"].table().to_pylist()] == ["env_error"]
