"""``shop``: wishes that can be fulfilled, graded purchases, and what a purchase solves."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.environments.shop.catalogue import Wish, catalogue
from agentrl.environments.shop.environment import LONGEST_WAY, SHAPES, Shop, ShopConfig, wish_of
from agentrl.rollouts.demonstrations import demonstrate
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

SHOP = Shop()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_every_wish_can_be_fulfilled_and_has_its_shape(seed: int) -> None:
    for task in SHOP.tasks({"train": 20}, seed)["train"]:
        wish = wish_of(task)
        fitting = SHOP.catalogue.fitting(wish)
        assert fitting
        assert (len(wish.attributes), len(wish.options), wish.cheapest) == SHAPES[task.level]
        assert all(word in task.prompt for word in [wish.category, *wish.attributes, *wish.options.values()])
        if wish.cheapest:
            assert fitting[0].price == wish.price
            assert str(wish.price) not in task.prompt


def visit(task: Task, *calls: Any) -> tuple[list[str], Any]:
    async def go() -> tuple[list[str], Any]:
        episode = await SHOP.reset(task)
        steps = [await episode.step(episode.calling(name, **arguments)) for name, arguments in calls]
        return [step.messages[0].content for step in steps], await episode.score()

    return asyncio.run(go())


TASK = next(task for task in SHOP.tasks({"train": 40}, 0)["train"] if task.level == 4)
WISH = wish_of(TASK)
BEST = SHOP.catalogue.fitting(WISH)[0]


def test_a_purchase_is_graded() -> None:
    options = [("choose", {"option": name, "value": value}) for name, value in WISH.options.items()]
    opened = ("open", {"product": BEST.number})
    assert visit(TASK, opened, *options, ("buy", {}))[1].reward == 1
    _, partly = visit(TASK, opened, options[0], ("buy", {}))
    assert (partly.reward, partly.success) == (pytest.approx(4 / 5), False)
    assert visit(TASK, opened, *options)[1].reward == 0, "nothing was bought"
    other = next(product for product in SHOP.catalogue.products.values() if product.category != WISH.category)
    assert visit(TASK, ("open", {"product": other.number}), ("buy", {}))[1].reward == 0


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 5]))
def test_the_expert_opens_what_was_shown_first_and_was_not_open_yet(seed: int, shown: int) -> None:
    """So what it does follows from what a policy sees."""
    shop = Shop(ShopConfig(shown=shown))
    for task in shop.tasks({"train": 40}, seed)["train"]:
        row, opened = demonstrate(shop, task, 0.0, 0, "t"), set()
        assert row.success
        assert row.n_tool_calls <= LONGEST_WAY
        page = ""
        for message in row.messages:
            if message.role is Role.TOOL and " of " in message.content:
                page = message.content
            for call in message.tool_calls:
                if call.name != "open":
                    continue
                number = call.parsed()["product"]
                [first, *_] = [line.split()[0] for line in page.splitlines()[1:] if line.split()[0] not in opened]
                assert number == first
                opened.add(number)


def test_the_expert_narrows_results_that_a_mistake_made_too_narrow() -> None:
    dear = {"attribute": WISH.attributes[0], "max_price": WISH.price + 50}
    for filters in ({"attribute": "compact", "max_price": 9}, {"max_price": 9}, dear):

        async def go(filters: dict[str, Any] = filters) -> bool:
            episode = await SHOP.reset(TASK)
            await episode.step(episode.calling("search", query=WISH.category))
            await episode.step(episode.calling("filter", **filters))
            while not episode.done and episode.calls < LONGEST_WAY + 3:
                await episode.step(episode.advise())
            return (await episode.score()).success

        assert asyncio.run(go())


def test_results_are_filtered_and_paged() -> None:
    text, _ = visit(
        TASK,
        ("search", {"query": WISH.category}),
        ("page", {"number": 2}),
        ("filter", {"attribute": WISH.attributes[0], "max_price": 60}),
        ("page", {"number": 99}),
        ("search", {"query": "submarine"}),
        ("filter", {}),
    )
    assert text[0].startswith("1-5 of 50\n")
    assert text[1].startswith("6-10 of 50\n")
    fitting = [
        item
        for item in SHOP.catalogue.by_category[WISH.category]
        if WISH.attributes[0] in item.attributes and item.price <= 60
    ]
    assert f" of {len(fitting)}\n" in text[2]
    prices = [int(line.split()[-2]) for line in text[2].splitlines()[1:]]
    assert prices == sorted(product.price for product in fitting)[:5], "the cheapest first"
    assert text[3] == f"no results on page 99 of {len(fitting)} results"
    assert text[4] == text[5] == "no results"


def test_mistakes_are_told() -> None:
    text, _ = visit(
        TASK,
        ("buy", {}),
        ("choose", {"option": "color", "value": "red"}),
        ("open", {"product": "P99999"}),
        ("open", {"product": BEST.number}),
        ("choose", {"option": "color", "value": "plaid"}),
    )
    assert text[:3] == ["no product is open", "no product is open", "there is no product 'P99999'"]
    assert text[4] == f"color is one of {', '.join(BEST.options['color'])}"


def test_a_purchase_solves_the_task_that_describes_it() -> None:
    other = next(product for product in SHOP.catalogue.products.values() if product.category != WISH.category)
    color = other.options["color"][0]
    bought = [("open", {"product": other.number}), ("choose", {"option": "color", "value": color}), ("buy", {})]
    _, score = visit(TASK, *bought)
    row = Trajectory.model_construct(final_state=json.dumps(score.state), messages=[Message(role=Role.ASSISTANT)])
    [made] = SHOP.achieved(row, TASK)
    assert visit(made, *bought)[1].success
    assert other.category in made.prompt
    assert SHOP.achieved(row.model_copy(update={"final_state": json.dumps({"bought": None})}), TASK) == []


def test_the_match_by_hand() -> None:
    product = catalogue(1000, 0).products["P0003"]
    wish = Wish(product.category, product.attributes[:2], {"color": product.options["color"][0]}, product.price - 1)
    assert wish.match(product, {"color": product.options["color"][0]}) == pytest.approx(3 / 4)
    assert wish.match(product, {}) == pytest.approx(2 / 4)
    assert not wish.fits(product)
