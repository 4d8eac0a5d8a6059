"""Layer-wise expansion of questions of ``search_qa``: which proposals become tasks, and that tools are called first."""

import json
from random import Random
from typing import Any

import pytest

from agentrl.engines.blocking import blocking
from agentrl.environments import load_environment
from agentrl.environments.propose import Propose
from agentrl.environments.search_qa import questions
from agentrl.environments.search_qa.environment import SearchConfig, SearchQA
from agentrl.environments.search_qa.expand import demonstrated
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall

WORLD = SearchQA()
GRAPH = WORLD.world(0).graph


def question(expression: Any, world: SearchQA = WORLD) -> Task:
    [answer] = questions.denotation(GRAPH, expression)
    [like] = world.tasks({"train": 1}, 0)["train"]
    task = world.about(like, expression, [answer])
    assert task
    return task


def chain() -> tuple[str, str, str]:
    """A book, its author and the city where the author was born: the author wrote no other book."""
    for author, books in GRAPH.back["author"].items():
        if len(books) == 1:
            return books[0], author, GRAPH.ahead["birthplace"][author]
    raise AssertionError


BOOK, AUTHOR, CITY = chain()
TASK = question(["of", "birthplace", "ahead", ["is", AUTHOR]])
BY_BOOK = ["of", "author", "ahead", ["is", BOOK]]


def proposed(proposal: Any, like: Task = TASK, world: SearchQA = WORLD) -> Task | None:
    text = proposal if isinstance(proposal, str) else json.dumps(proposal)
    return blocking(world.proposed(text, like, None))  # type: ignore[arg-type]


def test_a_name_gives_way_to_a_sub_question_that_stands_for_it_alone() -> None:
    made = proposed({"replace": AUTHOR, "by": BY_BOOK})
    assert made
    assert made.prompt == f"Name the city where the person who wrote {BOOK} was born."
    assert (made.level, json.loads(made.ground_truth), made.split) == (2, CITY, "train")
    assert json.loads(made.metadata)["question"] == ["of", "birthplace", "ahead", BY_BOOK]
    assert blocking(_solved(made)), "the expert answers it by the tools"


def test_a_sub_question_is_checked_by_someone_who_knows_all_terms() -> None:
    world = SearchQA(SearchConfig(unknown=13))
    like = question(["of", "birthplace", "ahead", ["is", AUTHOR]], world)
    assert like.prompt == f"Name the cradle of {AUTHOR}."
    for seed in range(8):  # the id decides what the expert takes a term for
        made = proposed({"replace": AUTHOR, "by": BY_BOOK}, like.model_copy(update={"task_id": f"t{seed}"}), world)
        assert made
        assert made.prompt == f"Name the cradle of the person who wrote {BOOK}."


async def _solved(task: Task) -> bool:
    return bool(demonstrate(WORLD, task, 0.0, 0, "d").success)


@pytest.mark.parametrize(
    "proposal",
    [
        "the person who wrote it",
        {"replace": AUTHOR},
        {"replace": BOOK, "by": BY_BOOK},
        {"replace": AUTHOR, "by": ["is", AUTHOR]},
        {"replace": AUTHOR, "by": ["of", "wrote", "ahead", ["is", BOOK]]},
        {"replace": AUTHOR, "by": ["of", "author", "ahead", ["is", "Nobody"]]},
        {"replace": AUTHOR, "by": ["of", "author", "back", ["is", BOOK]]},
        {"replace": AUTHOR, "by": ["of", "birthplace", "back", ["is", CITY]]},
    ],
)
def test_another_form_another_answer_and_a_shortcut_are_no_task(proposal: Any) -> None:
    assert proposed(proposal) is None


def test_a_part_that_goes_in_a_circle_is_refused() -> None:
    two = proposed({"replace": AUTHOR, "by": BY_BOOK})
    assert two
    assert proposed({"replace": BOOK, "by": ["of", "author", "back", ["is", AUTHOR]]}, two) is None


def test_the_expander_calls_the_tools_of_the_other_environment_before_it_proposes() -> None:
    ask = Propose("search_qa", tools=True)
    task = ask.asking([TASK], "p")
    assert task.tools == TASK.tools
    assert load_environment(task.env).max_steps == WORLD.max_steps

    async def go(*turns: Message) -> Any:
        episode = await ask.reset(task)
        answers = [await episode.step(turn) for turn in turns]
        score = await episode.score()
        await episode.close()
        return answers, score

    read = ToolCall(id="c", name="read", arguments=json.dumps({"title": AUTHOR}))
    proposal = Message(role=Role.ASSISTANT, content=json.dumps({"replace": AUTHOR, "by": BY_BOOK}))
    (seen, last), score = blocking(go(Message(role=Role.ASSISTANT, tool_calls=[read]), proposal))
    assert seen.messages[0].content == GRAPH.passages[AUTHOR]
    assert (seen.done, seen.reward, last.done, score.success) == (False, None, True, True)
    assert score.state["made"]["prompt"].endswith(f"the person who wrote {BOOK} was born.")
    without = Propose("search_qa")
    assert (without.max_steps, without.asking([TASK], "p").tools) == (1, "[]")


def test_demonstrated_expansions_are_tasks_one_hop_longer() -> None:
    ask = Propose("search_qa", tools=True)
    rows = [
        demonstrate(ask, ask.asking([task], f"p{number}"), 0.0, 0, f"r{number}")
        for number, task in enumerate(WORLD.tasks({"train": 12}, 1)["train"])
    ]
    made = [(row.level, json.loads(row.final_state)["made"]) for row in rows if row.success]
    assert len(made) > 6
    for row in rows:
        assert row.n_tool_calls in (1, 2)
    assert all(questions.hops(json.loads(new["metadata"])["question"]) == new["level"] for _, new in made)
    wrong = list(demonstrated(WORLD, TASK, 1.0, Random(0)))
    assert proposed(wrong[-1].content) is None
