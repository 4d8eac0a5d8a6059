"""``service``: the records at the end decide, a yes comes before each change, and nothing can be said at a guess."""

import asyncio
import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from acting import act

from agentrl.environments.scripted import advised, play
from agentrl.environments.service.customer import ChangeRequest, Goal, tells
from agentrl.environments.service.environment import Service, ServiceConfig
from agentrl.environments.service.records import RULES, TODAY, Item, Order, forbidden
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role

SERVICE = Service()
TASKS = SERVICE.tasks({"train": 300}, 0)["train"]


def requests_of(task: Task) -> list[ChangeRequest]:
    return [ChangeRequest(**request) for request in json.loads(task.metadata)["requests"]]


def goals_of(task: Task) -> list[Goal]:
    return SERVICE.goals(requests_of(task))


def talk(task: Task, *turns: Any) -> tuple[list[Any], Any]:
    return act(SERVICE, task, *turns)


def one(kind: str, refused: bool = False) -> Task:
    """A task of one request of that kind."""
    return next(
        task
        for task in TASKS
        if len(requests_of(task)) == 1
        and requests_of(task)[0].kind == kind
        and (goals_of(task)[0].refused is not None) == refused
    )


@pytest.mark.parametrize(
    ("status", "day", "price", "final", "kind", "rule"),
    [
        ("pending", 0, 10, False, "cancel", None),
        ("shipped", 0, 10, False, "cancel", "not_pending"),
        ("delivered", 239, 10, False, "address", "not_pending"),
        ("pending", 0, 10, False, "return", "not_delivered"),
        ("delivered", TODAY - 30, 500, False, "return", None),
        ("delivered", TODAY - 31, 501, True, "return", "too_late"),
        ("delivered", TODAY - 1, 501, True, "exchange", "final_sale"),
        ("delivered", TODAY - 1, 501, False, "exchange", "too_expensive"),
    ],
)
def test_the_rules(status: Any, day: int, price: int, final: bool, kind: str, rule: str | None) -> None:
    item = Item("I1", "lamp", "red", price, final)
    assert forbidden(Order("A1", "x", status, day, "1 Oak Lane", (item,)), kind, item) == rule


def test_levels_are_questions_changes_refusals_and_several() -> None:
    for task in TASKS:
        refused = [wanted.refused is not None for wanted in goals_of(task)]
        shapes = {1: len(refused) == 1, 2: refused == [False], 3: refused == [True], 4: len(refused) == 2,
                  5: len(refused) == 3 and any(refused) and not all(refused)}  # fmt: skip
        assert shapes[task.level]
    assert {wanted.refused for task in TASKS for wanted in goals_of(task)} == {None, *RULES}


def test_the_customer_says_what_is_asked() -> None:
    task = one("address")
    [request] = requests_of(task)
    steps, _ = talk(
        task,
        "Hello!",
        "What is your email address?",
        "Which order is it, and what is the new address?",
        "Do you confirm the change of A999999?",
        f"Do you confirm the change of {request.order}?",
    )
    texts = [step.messages[0].content for step in steps]
    assert texts[0] == "As I said: I want to change the address of an order."
    assert texts[1] == f"My email is {json.loads(task.metadata)['email']}."
    assert texts[2] == f"It is order {request.order}. The new address is {request.detail}."
    assert texts[3:] == ["No, I do not mean that order.", "Yes, please."]
    assert task.prompt == "Hello. I want to change the address of an order."


def change(task: Task, confirmed: bool) -> Any:
    [request] = requests_of(task)
    call = {"name": "cancel_order", "order": request.order, "reason": request.detail}
    asked = [f"Please confirm: cancel {request.order}"] if confirmed else []
    steps, score = talk(task, *asked, call, "Done.")
    assert steps[-1].done
    return score


def test_a_change_without_a_yes_does_not_count() -> None:
    task = one("cancel")
    assert change(task, confirmed=True).success
    score = change(task, confirmed=False)
    assert (score.success, score.reward, score.state["violations"]) == (False, 0.0, 1)
    assert score.components[1].value == 1.0, "the records are right"


def test_a_forbidden_change_and_a_wrong_reason_fail() -> None:
    task = one("cancel", refused=True)
    [request] = requests_of(task)
    right = {"name": "refuse", "order": request.order, "rule": "not_pending"}
    assert talk(task, right, "I cannot do that.")[1].success
    assert not talk(task, right, right, "I cannot do that.")[1].success
    assert not talk(task, right | {"rule": "too_late"}, right)[1].success, "naming every rule is no way"
    assert not talk(task, "I cannot do that.")[1].success
    forced = {"name": "cancel_order", "order": request.order, "reason": request.detail}
    assert not talk(task, f"Confirm {request.order}?", forced)[1].success


def test_touching_another_order_fails() -> None:
    task = one("cancel")
    other = next(order for order in SERVICE.records.orders.values() if order.status == "pending")
    more = {"name": "change_address", "order": other.number, "address": "1 Oak Lane"}

    async def go() -> Any:
        episode = await SERVICE.reset(task)
        await episode.step(episode.calling(**more))
        await play(episode, advised(episode, 0.0, Random(0)), SERVICE.max_steps)
        return await episode.score()

    assert not asyncio.run(go()).success


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("It is shipped.", "shipped", True),
        ("It is pending, shipped or delivered.", "shipped", False),
        ("Order A1003 has 2 items.", "2", True),
        ("1 2 3", "2", False),
        ("None.", "2", False),
    ],
)
def test_an_answer_names_nothing_else_of_its_kind(text: str, answer: str, right: bool) -> None:
    assert tells(text, answer) == right


def test_records_are_not_changed_by_an_episode() -> None:
    task = one("cancel")
    before = SERVICE.records.orders[requests_of(task)[0].order]
    change(task, confirmed=True)
    assert SERVICE.records.orders[before.number] is before
    assert replace(before, status="cancelled") != before


def test_the_rules_may_be_left_to_demonstrations() -> None:
    """The tasks are the same ones, and the policy document is not shown."""
    bare = Service(ServiceConfig(rules=False))
    assert bare.tasks({"train": 20}, 0)["train"] == SERVICE.tasks({"train": 20}, 0)["train"]
    openings = [asyncio.run(family.reset(TASKS[0])).opening for family in (SERVICE, bare)]
    assert [[message.role for message in opening] for opening in openings] == [[Role.SYSTEM, Role.USER], [Role.USER]]
