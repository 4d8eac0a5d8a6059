"""``search_qa``: questions mean what their expressions say, and no passage gives an answer away."""

import asyncio
import json
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from acting import act
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.environments import load_environment
from agentrl.environments.bm25 import Index
from agentrl.environments.search_qa import questions
from agentrl.environments.search_qa.environment import SearchConfig, SearchQA
from agentrl.environments.search_qa.graph import RELATIONS, TERMS, Graph, graph
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role

WORLD = graph(200, 0)
FACTS = {(s, relation, o) for relation, pairs in WORLD.ahead.items() for s, o in pairs.items()}


def meaning(expression: Any) -> set[str]:
    """The denotation, by going through all facts."""
    kind, *rest = expression
    if kind == "is":
        return {rest[0]}
    if kind == "of":
        known = meaning(rest[2])
        if rest[1] == "ahead":
            return {o for s, relation, o in FACTS if relation == rest[0] and s in known}
        return {s for s, relation, o in FACTS if relation == rest[0] and o in known}
    return meaning(rest[0]) & meaning(rest[1]) if kind == "and" else meaning(rest[0]) | meaning(rest[1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_a_question_has_its_hops_its_answer_and_no_shortcut(seed: int, count: int) -> None:
    random = Random(seed)
    result = None
    while result is None:
        result = questions.compose(WORLD, count, random)
    expression, answers = result
    assert meaning(expression) == set(answers)
    assert questions.hops(expression) == count
    prompt, named = questions.text(WORLD, expression), questions.constants(expression)
    assert all(name in prompt for name in named)
    assert not any(answer in prompt for answer in answers)
    if count > 1:
        assert not any(answer in WORLD.passages[name] for name in named for answer in answers)
        assert not any(name in WORLD.passages[answer] for name in named for answer in answers)
    for part in questions.parts(expression):
        if part[0] == "and":
            assert meaning(part) != meaning(part[1])
            assert meaning(part) != meaning(part[2])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_longer_question_has_the_same_answer(seed: int) -> None:
    random = Random(seed)
    result = longer = None
    while longer is None:
        result = questions.compose(WORLD, random.randint(1, 3), random)
        longer = result and questions.expanded(WORLD, result[0], random)
    assert result
    assert meaning(longer) == set(result[1])
    assert questions.hops(longer) == questions.hops(result[0]) + 1


def test_the_text_of_a_question() -> None:
    person = next(iter(WORLD.ahead["birthplace"]))
    inner = ["of", "birthplace", "back", ["of", "birthplace", "ahead", ["is", person]]]
    both = ["and", inner, ["of", "employer", "back", ["is", "Acme"]]]
    assert questions.text(WORLD, ["of", "teacher", "ahead", both]) == (
        "Name the person who taught the person (who was born in the city where "
        f"{person} was born) and (who works for Acme)."
    )


def test_passages_tell_the_facts_of_their_subject_and_are_found() -> None:
    index = Index(WORLD.passages)
    for subject, relation, other in Random(0).sample(sorted(FACTS), 200):
        assert other in WORLD.passages[subject]
        assert subject in index.search(other)[: len(WORLD.edges[other]) + 1], relation
    assert index.search(subject)[0] == subject
    assert index.search("qqq") == []


def test_each_thing_has_a_name_of_its_own() -> None:
    world = Graph(400, 3)
    words = [name.split()[1 if kind == "person" else 0] for name, kind in world.kinds.items()]
    assert len(set(words)) == len(words)
    assert {relation.subject for relation in RELATIONS.values()} <= set(world.kinds.values())
    assert Graph(400, 3).passages == world.passages != Graph(400, 4).passages


def test_search_gives_pages_and_read_refuses_unknown_titles() -> None:
    environment = SearchQA()
    task = environment.tasks({"train": 1}, 0)["train"][0]
    steps, _ = act(
        environment,
        task,
        {"name": "search", "query": "person"},
        {"name": "search", "query": "person", "page": 2},
        {"name": "search", "query": "person", "page": 900},
        {"name": "search", "query": "zzz"},
        {"name": "read", "title": "Nobody"},
    )
    first, second, beyond, nothing, unknown = [step.messages[0].content for step in steps]
    assert first.endswith("(1-5 of 400)")
    assert second.endswith("(6-10 of 400)")
    assert beyond == "no results on page 900 of 400 results"
    assert nothing == "no results"
    assert unknown == "there is no passage 'Nobody'; search for it"
    assert [step.info["tool_errors"] for step in steps] == [0, 0, 0, 0, 1]


def test_answers_are_compared_exactly_or_by_words() -> None:
    exact, soft = SearchQA(), SearchQA(SearchConfig(reward="f1"))
    tasks = exact.tasks({"train": 200}, 0)["train"]
    entry = next(task for task in tasks if json.loads(task.ground_truth).count(" ") == 1)
    two = next(task for task in tasks if ";" in task.ground_truth)
    half = json.loads(entry.ground_truth).split()[0]
    assert act(exact, entry, half)[1].reward == 0
    assert act(soft, entry, half)[1].reward == pytest.approx(2 / 3)
    assert not act(soft, entry, half)[1].success
    first, second = json.loads(two.ground_truth).split("; ")
    assert act(exact, two, f"{second}; {first} ")[1].success
    assert not act(exact, two, first)[1].success


def test_an_answer_too_early_solves_the_question_inside() -> None:
    environment = load_environment("search_qa")
    rows = [
        (demonstrate(environment, task, 0.0, 0, "t"), task)
        for task in environment.tasks({"train": 60}, 1)["train"]
        if task.level == 3 and '"and"' not in task.metadata
    ]
    for row, task in rows:
        inner = json.loads(task.metadata)["question"][3]
        [answer, *others] = sorted(questions.denotation(environment.world_of(task).graph, inner))
        if others:
            continue
        early = row.model_copy(update={"messages": [*row.messages[:-1], Message(role=Role.ASSISTANT, content=answer)]})
        made = environment.achieved(early, task)
        assert [(new.level, json.loads(new.ground_truth)) for new in made] == [(2, answer)]
        assert made[0].prompt != task.prompt


def test_the_expert_knows_only_what_it_has_seen() -> None:
    """Its turns stay the same in a world in which all that was not seen is otherwise."""
    environment = SearchQA()
    tasks = environment.tasks({"train": 60}, 4)["train"]
    assert {task.level for task in tasks} == {1, 2, 3, 4, 5}

    async def go(task: Task) -> None:
        episode = await environment.reset(task)
        text, world = task.prompt, environment.world_of(task)
        real, ranked = world.graph, world.ranked
        for _ in range(environment.max_steps):
            turn = episode.advise()
            facts = {
                relation: {subject: other for subject, other in pairs.items() if subject in episode.passages}
                for relation, pairs in real.ahead.items()
            }
            pages = set(episode.pages)
            episode.answers = ["nobody"]
            world.graph = SimpleNamespace(ahead=facts, kinds=real.kinds)  # type: ignore[assignment]
            world.ranked = lambda query, pages=pages: [  # type: ignore[method-assign, misc]
                title if (query, number // 5 + 1) in pages else "Nobody Atall"
                for number, title in enumerate(ranked(query))
            ]
            try:
                assert episode.advise() == turn
            finally:
                world.graph = real
                del world.ranked
            if not turn.tool_calls:
                break
            for value in turn.tool_calls[0].parsed().values():
                assert str(value).isdigit() or value in text, (task.prompt, value)
            text += (await episode.step(turn)).messages[0].content
        assert turn.content == json.loads(task.ground_truth)

    for task in tasks:
        asyncio.run(go(task))


def test_the_expert_asks_again_for_what_was_cut() -> None:
    environment = load_environment('search_qa{"faults": {"truncated": 0.4}}')
    rows = [demonstrate(environment, task, 0.0, 0, "t") for task in environment.tasks({"train": 40}, 4)["train"]]
    repeated = 0
    for row in rows:
        calls = [call.arguments for message in row.messages for call in message.tool_calls]
        heard = [message.content for message in row.messages if message.role is Role.TOOL]
        again = [
            number
            for number in range(len(heard) - 1)
            if heard[number] != heard[number + 1] and calls[number] == calls[number + 1]
        ]
        repeated += len(again)
    assert repeated > 20
    assert sum(row.success for row in rows) > 30


def test_a_term_that_the_expert_lacks_is_taken_for_what_such_a_thing_has() -> None:
    def drawn(question: Any, unknown: int) -> set[str]:
        made = [questions.understood(question, list(TERMS)[:unknown], Random(seed)) for seed in range(200)]
        assert all(other[2:] == question[2:] for other in made)
        return {other[1] for other in made}

    [ann, *_], [book, *_], [town, *_] = (WORLD.things[kind] for kind in ("person", "book", "city"))
    school = ["of", "school", "ahead", ["is", ann]]
    assert drawn(school, 2) == {"school"}, "the third is known"
    assert drawn(school, 3) == {"birthplace", "employer", "school"}
    assert drawn(school, 13) == {"birthplace", "employer", "school", "teacher"}
    assert drawn(["of", "author", "ahead", ["is", book]], 13) == {"author", "publisher", "scene"}
    assert drawn(["of", "author", "ahead", ["is", book]], 5) == {"author", "publisher"}
    assert drawn(["of", "author", "ahead", ["is", book]], 4) == {"author"}, "it is the only one"
    assert drawn(["of", "mayor", "ahead", ["is", town]], 13) == {"mayor", "country"}
    assert drawn(["of", "school", "back", ["is", town]], 13) == {"school"}, "the form of the question says it"
    within = ["of", "teacher", "back", school]
    assert questions.understood(within, list(TERMS), Random(0)) == within, "what is asked of it says what it is"
    for relation in TERMS:
        subject = RELATIONS[relation].subject
        assert sum(RELATIONS[other].subject == subject for other in TERMS) > 1

    assert questions.text(WORLD, school, list(TERMS)) == f"Name the nest of {ann}."
    assert questions.text(WORLD, ["of", "head", "ahead", school], list(TERMS)) == (
        f"Name the crown of the university where {ann} studied."
    )
    assert questions.text(WORLD, within, list(TERMS)) == questions.text(WORLD, within)


def test_demonstrations_of_terms_are_right_if_the_guess_is() -> None:
    environment = SearchQA(SearchConfig(levels=[1], size=60, unknown=len(TERMS)))
    tasks = environment.tasks({"train": 200}, 0)["train"]
    asked = {task.task_id: task for task in tasks if " of " in task.prompt}
    rows = [demonstrate(environment, task, 0.0, 0, "t") for task in tasks]
    known = [row for row in rows if row.task_id not in asked]
    assert all(row.success for row in known)
    assert len(known) > 20
    guessed = [row for row in rows if row.task_id in asked]
    for row in guessed:
        question = json.loads(asked[row.task_id].metadata)["question"]
        taken = questions.understood(question, list(TERMS), Random(row.task_id))
        assert row.messages[-1].content == graph(60, 0).ahead[taken[1]][question[3][1]]
        assert row.success == (taken == question)
    assert 0.15 < sum(bool(row.success) for row in guessed) / len(guessed) < 0.5


def test_tasks_without_terms_are_as_they_were() -> None:
    drawn = SearchQA(SearchConfig(levels=[1, 2], size=60)).tasks({"train": 3}, 0)["train"]
    assert [task.prompt for task in drawn] == [
        "Name the country to which the city where Wim Faithprir was born belongs.",
        "Name the company that Xenia Traskir works for.",
        "Name the book that the person who works for Rundpriorworks wrote.",
    ]
    assert drawn[0].task_id == "search_qa-372be429-train-00000", "the id has a digest of the settings"


def test_a_question_says_its_world_which_has_facts_of_its_own() -> None:
    environment = load_environment('search_qa{"levels": [1], "size": 60, "worlds": 5, "unknown": 5}')
    tasks = environment.tasks({"train": 200, "heldout": 50}, 0)
    every = [*tasks["train"], *tasks["heldout"]]
    numbers = [json.loads(task.metadata)["world"] for task in every]
    assert {*numbers} == {0, 1, 2, 3, 4}
    assert all(task.prompt.startswith(f"World {number}. Name ") for task, number in zip(every, numbers, strict=True))
    assert len({task.prompt for task in every}) == len(every)
    graphs = [environment.world(number).graph for number in range(5)]
    assert len({tuple(graph.names) for graph in graphs}) == 1, "the same names"
    first = next(iter(graphs[0].passages))
    assert len({graph.passages[first] for graph in graphs}) == 5, "other facts"
    assert graphs[0].passages == graph(60, 0).passages, "the first is the only one of a single world"
    for task in every:
        answer = json.loads(task.ground_truth)
        assert {answer} == questions.denotation(environment.world_of(task).graph, json.loads(task.metadata)["question"])
        row = demonstrate(environment, task, 0.0, 0, "t")
        if " of " not in task.prompt:
            assert row.success, task.prompt
        if longer := environment.vary(task, Random(0)):
            assert longer.prompt.startswith(task.prompt.partition(".")[0] + ". ")
            assert environment.world_of(longer) is environment.world_of(task)


def test_a_snapshot_copies_no_world() -> None:
    environment = load_environment('search_qa{"levels": [1], "size": 60, "worlds": 2}')
    [task] = environment.tasks({"train": 1}, 0)["train"]
    episode = asyncio.run(environment.reset(task))
    state = asyncio.run(episode.snapshot())
    asyncio.run(episode.restore(state))
    assert episode.world is environment.world_of(task)
