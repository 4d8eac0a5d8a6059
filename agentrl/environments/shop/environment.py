"""The environment ``shop``, in the shape of WebShop (Yao et al. 2022): search, narrow down, open, choose options, buy.

The reward is how much of the wish the purchase fulfils; a task is solved if that is all of it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.shop.catalogue import Product, Wish, catalogue
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import ToolError, tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Trajectory

SHAPES = {1: (1, 0, False), 2: (1, 1, False), 3: (2, 1, False), 4: (2, 2, False), 5: (2, 2, True)}
"""Level -> attributes and options of the wish, and whether it asks for the cheapest."""
LONGEST_WAY = 12
"""Calls of the expert, at most. An episode has room for mistakes beside."""


class ShopConfig(FamilyConfig):
    size: int = Field(1000, ge=200, le=9999, description="products of the catalogue")
    world: int = Field(0, ge=0, description="another number is another catalogue")
    shown: int = Field(5, ge=1, le=50, description="products on one page of results")


class ShopEpisode(ToolEpisode["Shop"]):
    """One visit. ``found`` are the results of ``query`` after filters, ``product`` is the one that is open."""

    def __init__(self, family: "Shop", task: Task) -> None:
        super().__init__(family, task)
        self.wish = wish_of(task)
        self.target = family.catalogue.fitting(self.wish)[0].number
        self.query = ""
        self.found: list[str] = []
        self.filters: set[str] = set()
        self.limit: int | None = None
        self.at_page = 1
        self.opened: set[str] = set()
        self.product: str | None = None
        self.chosen: dict[str, str] = {}
        self.bought: str | None = None
        self.reached: dict[str, int] = {}

    @tool
    def search(self, query: str) -> str:
        """Search the titles of products. Filters are cleared.

        query: words of the title
        """
        self.query, self.found, self.filters, self.limit = query, self.family.ranked(query), set(), None
        return self._page(1)

    @tool
    def filter(self, attribute: str | None = None, max_price: int | None = None) -> str:
        """Keep only some of the results, and show the cheapest first.

        attribute: what products must be
        max_price: in dollars
        """
        products = self.family.catalogue.products
        if attribute is not None:
            self.found = [number for number in self.found if attribute in products[number].attributes]
            self.filters.add(attribute)
        if max_price is not None:
            self.found = [number for number in self.found if products[number].price <= max_price]
            self.limit = max_price if self.limit is None else min(max_price, self.limit)
        self.found.sort(key=lambda number: (products[number].price, number))
        return self._page(1)

    @tool
    def page(self, number: Annotated[int, Field(ge=1)]) -> str:
        """Show another page of the results."""
        return self._page(number)

    @tool
    def open(self, product: str) -> str:
        """Open the page of a product.

        product: its number, as in P0123
        """
        if product not in self.family.catalogue.products:
            raise ToolError(f"there is no product {product!r}")
        self.product, self.chosen = product, {}
        self.opened.add(product)
        if set(self.wish.attributes) <= set(self._opened.attributes) and self._opened.category == self.wish.category:
            self._reach("found")
        return self._opened.page()

    @tool
    def choose(self, option: Literal["color", "size"], value: str) -> str:
        """Choose an option of the product that is open."""
        if self.product is None:
            raise ToolError("no product is open")
        values = self._opened.options[option]
        if value not in values:
            raise ToolError(f"{option} is one of {', '.join(values)}")
        self.chosen[option] = value
        if self.wish.options.get(option) == value:
            self._reach(option)
        return f"{option}: {value}"

    @tool
    def buy(self) -> str:
        """Buy the product that is open, with the options chosen. This ends the visit."""
        if self.product is None:
            raise ToolError("no product is open")
        self.bought, self.done = self.product, True
        if self.match == 1:
            self._reach("bought")
        return f"bought {self._opened.title}"

    @property
    def match(self) -> float:
        """How much of the wish was bought."""
        return self.wish.match(self.family.catalogue.products[self.bought], self.chosen) if self.bought else 0.0

    def outcome(self) -> Score:
        state = {
            "bought": self.bought,
            "options": self.chosen if self.bought else {},
            "subgoals": [self.reached.get(name) for name in self._subgoals],
        }
        return Score(self.match == 1, (RewardComponent(name="match", value=self.match),), state)

    def advise(self) -> Message:
        """The next step to a product that fits: search, filter, and open one after the other. So it follows from what
        was shown, and not from what the expert knows."""
        if self.product is not None and self._is_right(self.product):
            for option, value in self.wish.options.items():
                if self.chosen.get(option) != value:
                    return self.calling("choose", option=option, value=value)
            return self.calling("buy")
        if (narrowing := self._narrowing()) is not None:
            return narrowing
        index = next(index for index, number in enumerate(self.found) if not self._is_wrong(number))
        page = index // self.family.config.shown + 1
        return (
            self.calling("open", product=self.found[index])
            if page == self.at_page
            else self.calling("page", number=page)
        )

    def _narrowing(self) -> Message | None:
        """The next search or filter; None if the results are those that fit the wish, its options aside."""
        wish = self.wish
        limit = None if wish.cheapest else wish.price
        too_narrow = self.filters - set(wish.attributes) or (self.limit is not None and self.limit < wish.price)
        if self.query != wish.category or too_narrow:
            return self.calling("search", query=wish.category)
        missing = [attribute for attribute in wish.attributes if attribute not in self.filters]
        wanted: dict[str, Any] = {"attribute": missing[0]} if missing else {}
        if limit is not None and self.limit != limit:
            wanted["max_price"] = limit
        return self.calling("filter", **wanted) if wanted else None

    def _is_right(self, number: str) -> bool:
        return number == self.target if self.wish.cheapest else self.wish.fits(self.family.catalogue.products[number])

    def _is_wrong(self, number: str) -> bool:
        """Whether a product has been opened and does not fit."""
        return number in self.opened and not self._is_right(number)

    def stray(self, random: Random) -> Message:
        if self.product and random.random() < 0.4:
            return self.calling("buy")
        if self.found and random.random() < 0.8:
            return self.calling("open", product=random.choice(self.found))
        return self.calling("search", query=random.choice([*self.wish.attributes, self.wish.category]))

    @property
    def _opened(self) -> Product:
        assert self.product is not None
        return self.family.catalogue.products[self.product]

    @property
    def _subgoals(self) -> list[str]:
        return ["found", *self.wish.options, "bought"]

    def _reach(self, subgoal: str) -> None:
        if subgoal not in self.reached:
            self.reached[subgoal] = self.calls - 1
            self.earn(1 / len(self._subgoals))

    def _page(self, number: int) -> str:
        self.at_page = number
        size = self.family.config.shown
        shown = self.found[(number - 1) * size : number * size]
        if not shown:
            return f"no results on page {number} of {len(self.found)} results" if self.found else "no results"
        lines = [self.family.catalogue.products[product].line() for product in shown]
        first = (number - 1) * size + 1
        return "\n".join([f"{first}-{first + len(shown) - 1} of {len(self.found)}", *lines])


class Shop(Family):
    """The environment; see the module's docstring."""

    name = "shop"
    version = "2"
    max_steps = 16
    levels = {1: 0.25, 2: 0.25, 3: 0.2, 4: 0.2, 5: 0.1}  # noqa: RUF012
    episode = ShopEpisode
    config: ShopConfig

    def __init__(self, config: ShopConfig = ShopConfig()) -> None:  # noqa: B008  (frozen)
        super().__init__(config)
        self.catalogue = catalogue(config.size, config.world)
        self.numbers = list(self.catalogue.products)
        self.searched: dict[str, list[str]] = {}

    def ranked(self, query: str) -> list[str]:
        """Numbers of products for a query. Samples of one task ask the same, so results are remembered."""
        if query not in self.searched:
            if len(self.searched) >= 4096:
                self.searched.clear()
            self.searched[query] = self.catalogue.index.search(query)
        return list(self.searched[query])

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        attributes, options, cheapest = SHAPES[level]
        while True:
            product = self.catalogue.products[random.choice(self.numbers)]
            chosen = {name: random.choice(product.options[name]) for name in random.sample(("color", "size"), options)}
            wanted = tuple(sorted(random.sample(product.attributes, attributes)))
            wish = Wish(product.category, wanted, dict(sorted(chosen.items())), product.price + random.randint(0, 30))
            if cheapest:
                fitting = self.catalogue.fitting(Wish(wish.category, wanted, wish.options, 10_000))
                if len(fitting) < 2:
                    continue
                wish = Wish(wish.category, wanted, wish.options, fitting[0].price, cheapest=True)
            if self.way(wish) <= LONGEST_WAY:
                yield _draft(wish)

    def way(self, wish: Wish) -> int:
        """Calls that the expert makes."""
        without, opened = replace(wish, options={}), 0
        for product in self.catalogue.by_category[wish.category]:
            if wish.fits(product):
                break
            opened += without.fits(product)
        filters = max(1, len(wish.attributes))
        return 1 + filters + opened // self.config.shown + opened + 1 + len(wish.options) + 1

    def achieved(self, row: Trajectory, task: Task) -> list[Task]:
        """The task that a purchase solves: its category, as many of its attributes as before, the options that were
        chosen, and its price. Nothing was bought: no task."""
        state = json.loads(row.final_state)
        if not state or not state["bought"]:
            return []
        product, old = self.catalogue.products[state["bought"]], wish_of(task)
        attributes = sorted(product.attributes, key=lambda attribute: (attribute not in old.attributes, attribute))
        wanted = tuple(sorted(attributes[: len(old.attributes)]))
        wish = Wish(product.category, wanted, state["options"], product.price)
        return [self.derived(task, _draft(wish), level_of(wish))]

    def vary(self, task: Task, random: Random) -> Task:
        """The wish with another attribute or option, of a product that fits the old one."""
        old = wish_of(task)
        product = random.choice(self.catalogue.fitting(old))
        attributes, options = list(old.attributes), dict(old.options)
        free = [name for name in product.options if name not in options]
        if free and random.random() < 0.5:
            options[free[0]] = random.choice(product.options[free[0]])
        else:
            attributes[0] = random.choice(
                [attribute for attribute in product.attributes if attribute not in attributes]
            )
        wish = Wish(old.category, tuple(sorted(attributes)), dict(sorted(options.items())), product.price)
        return self.derived(task, _draft(wish), level_of(wish))


def wish_of(task: Task) -> Wish:
    return Wish(**json.loads(task.metadata))


def level_of(wish: Wish) -> int:
    """The first level with so many attributes and options."""
    sizes = len(wish.attributes), len(wish.options)
    return next(
        level for level, (attributes, options, _) in SHAPES.items() if attributes >= sizes[0] and options >= sizes[1]
    )


def _draft(wish: Wish) -> Draft:
    metadata = {
        "category": wish.category, "attributes": list(wish.attributes), "options": dict(wish.options),
        "price": wish.price, "cheapest": wish.cheapest,
    }  # fmt: skip
    return Draft(wish.prompt, metadata["category"], metadata)
