"""The environment ``service``, in the shape of tau-bench (Yao et al. 2024): a conversation with a customer, a policy,
and records whose state at the end decides.

A task is solved if the records are exactly as they should be, refusals included, if questions were answered, and if no
change was made without the customer's yes.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

from pydantic import Field

from agentrl.engines.seeds import stream
from agentrl.environments.base import Score, Step
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.service.customer import (
    ChangeRequest,
    Goal,
    PlayedCustomer,
    ScriptedCustomer,
    as_json,
    cheapest_other,
    draw_request,
    goal,
    tells,
)
from agentrl.environments.service.records import POLICY, Item, Order, Rule, forbidden, records
from agentrl.environments.simulated_user import SimulatedUser, UserConfig
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import ToolError, tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role

CHANGES = ("cancel", "address", "return", "exchange")


class ServiceConfig(FamilyConfig):
    size: int = Field(2500, ge=50, le=20_000, description="customers of the shop, with three orders each")
    world: int = Field(0, ge=0, description="another number is another shop")
    rules: bool = Field(True, description="show the policy document; without it, demonstrations alone teach the rules")
    customer: Literal["scripted"] | UserConfig = Field(
        "scripted", description="who plays the customer: a script, or a model; {engine: {type: openai, ...}}"
    )


class ServiceEpisode(ToolEpisode["Service"]):
    """One conversation. ``orders`` are those that were changed, ``unconfirmed`` counts changes without a yes."""

    def __init__(self, family: "Service", task: Task) -> None:
        super().__init__(family, task)
        if family.config.rules:
            self.opening = [Message(role=Role.SYSTEM, content=POLICY), *self.opening]
        metadata = json.loads(task.metadata)
        requests = [ChangeRequest(**request) for request in metadata["requests"]]
        wishes = [request.wish(family.records.orders[request.order]) for request in requests]
        plays = PlayedCustomer if family.user else ScriptedCustomer
        self.customer = plays(metadata["email"], requests, wishes)
        self.goals = family.goals(requests)
        self.orders: dict[str, Order] = {}
        self.refused: list[tuple[str, str]] = []
        self.told: list[str] = []
        self.looked_up: set[str] = set()
        self.unconfirmed = 0
        self.settled_at: dict[int, int] = {}

    @tool
    def find_customer(self, email: str) -> str:
        """Find a customer by email address; returns the name and the numbers of the orders."""
        customer = self.family.records.customers.get(email)
        if customer is None:
            raise ToolError(f"there is no customer {email!r}")
        self.looked_up.add(email)
        return f"{customer.name}; orders {', '.join(customer.orders)}"

    @tool
    def get_order(self, order: str) -> str:
        """Show an order.

        order: its number, as in A1234
        """
        known_order = self._order(order)
        self.looked_up.add(order)
        return known_order.shown()

    @tool
    def get_product(self, product: str) -> str:
        """Show the variants of a product, with prices."""
        variants = self.family.records.variants.get(product)
        if variants is None:
            raise ToolError(f"there is no product {product!r}; there are {', '.join(self.family.records.variants)}")
        self.looked_up.add(product)
        return "; ".join(f"{name}: {'not available' if cost is None else cost}" for name, cost in variants.items())

    @tool
    def cancel_order(self, order: str, reason: str) -> str:
        """Cancel an order, for a reason that the customer gave."""
        return self._change(replace(self._order(order), status="cancelled", reason=reason.rstrip(".")))

    @tool
    def change_address(self, order: str, address: str) -> str:
        """Send an order to another address."""
        return self._change(replace(self._order(order), address=address.rstrip(".")))

    @tool
    def return_item(self, order: str, item: str) -> str:
        """Take an item back.

        item: its number in the order, as in I2
        """
        known_order = self._order(order)
        self._item(known_order, item)
        return self._change(replace(known_order, returned=(*known_order.returned, item)))

    @tool
    def exchange_item(self, order: str, item: str, variant: str) -> str:
        """Exchange an item for another variant of its product."""
        known_order = self._order(order)
        old = self._item(known_order, item)
        price = self.family.records.variants[old.product].get(variant)
        if price is None:
            raise ToolError(f"{variant} {old.product} is not available")
        return self._change(known_order.with_item(replace(old, variant=variant, price=price)))

    @tool
    def refuse(self, order: str, rule: Rule) -> str:
        """Record that what the customer asks is refused.

        rule: the reason, by its name in the policy
        """
        self._order(order)
        self.refused.append((order, rule))
        self._settle()
        return f"refused: {rule}"

    async def said(self, text: str) -> Step:
        self.told.append(text)
        self._settle()
        answer = await self._answer(text, settled=self.customer.at in self.settled_at)
        if answer is None:
            return Step([Message(role=Role.USER, content="Thank you, bye.")], done=True)
        return Step([Message(role=Role.USER, content=answer)])

    async def _answer(self, text: str, settled: bool) -> str | None:
        """What the customer says; None ends the conversation. A played one has nothing to say if all is settled."""
        user, customer = self.family.user, self.customer
        if user is None or not isinstance(customer, PlayedCustomer):
            return customer.hears(text, settled)
        if len(self.settled_at) == len(self.goals):
            return None
        conversation = [*customer.talk, Message(role=Role.ASSISTANT, content=text)]
        answer = await user.says(
            customer.about, conversation, stream(0, f"customer {self.task.task_id}", len(conversation))
        )
        return customer.said(text, answer or "...", settled)

    def outcome(self) -> Score:
        wanted = {goal.order.number: goal.order for goal in self.goals if goal.order}
        refusals = [(request.order, goal.refused) for request, goal in self._pairs() if goal.refused]
        state_right = self.orders == wanted and sorted(self.refused) == sorted(refusals)
        informed = all(number in self.settled_at for number, (_, goal) in enumerate(self._pairs()) if goal.told)
        success = state_right and informed and not self.unconfirmed
        components = (
            RewardComponent(name="solved", value=float(success)),
            RewardComponent(name="records", value=float(state_right), weight=0.0),
            RewardComponent(name="unconfirmed", value=float(self.unconfirmed), weight=0.0),
        )
        state = {
            "orders": {number: order.shown() for number, order in sorted(self.orders.items())},
            "refused": self.refused,
            "violations": self.unconfirmed,
            "subgoals": [self.settled_at.get(number) for number in range(len(self.goals))],
        }
        return Score(success, components, state)

    def advise(self) -> Message:
        """The next step by the policy: know the customer and the order, look, then confirm and change, or refuse."""
        customer, request = self.customer, self.customer.request
        if not customer.gave_email:
            return self.saying("May I have your email address?")
        if customer.email not in self.looked_up:
            return self.calling("find_customer", email=customer.email)
        if customer.at in self.settled_at:
            return self.saying("It is settled. Can I do anything else?")
        if customer.at not in customer.gave_order:
            return self.saying("Which order is it?")
        if request.order not in self.looked_up:
            return self.calling("get_order", order=request.order)
        order = self._order(request.order)
        if request.kind == "status":
            return self.saying(f"The answer is {self.goals[customer.at].told}.")
        item = order.item(request.item)
        if rule := forbidden(order, request.kind, item):
            return self.calling("refuse", order=order.number, rule=rule)
        if request.kind == "address" and not customer.gave_address:
            return self.saying("What is the new address?")
        if item and request.kind == "exchange" and item.product not in self.looked_up:
            return self.calling("get_product", product=item.product)
        if customer.at not in customer.confirmed:
            return self.saying(f"I will do this for order {order.number}: {request.kind}. Do you confirm?")
        return self._make(request, item)

    def stray(self, random: Random) -> Message:
        request = self.customer.request
        item = self._order(request.order).item(request.item)
        if request.kind != "status" and random.random() < 0.5:
            return self._make(request, item)
        return self.saying(random.choice(["It is settled.", "Do you confirm?", "Which order is it?"]))

    def _make(self, request: ChangeRequest, item: Item | None) -> Message:
        """The call that does what is asked."""
        if request.kind == "cancel":
            return self.calling("cancel_order", order=request.order, reason=request.detail)
        if request.kind == "address":
            return self.calling("change_address", order=request.order, address=request.detail)
        assert item is not None
        if request.kind == "return":
            return self.calling("return_item", order=request.order, item=item.number)
        variant, _ = cheapest_other(self.family.records, item)
        return self.calling("exchange_item", order=request.order, item=item.number, variant=variant)

    def _pairs(self) -> list[tuple[ChangeRequest, Goal]]:
        return list(zip(self.customer.requests, self.goals, strict=True))

    def _order(self, number: str) -> Order:
        known_order = self.orders.get(number) or self.family.records.orders.get(number)
        if known_order is None:
            raise ToolError(f"there is no order {number!r}")
        return known_order

    def _item(self, order: Order, number: str) -> Item:
        item = order.item(number)
        if item is None:
            raise ToolError(
                f"order {order.number} has no item {number!r}; it has {', '.join(i.number for i in order.items)}"
            )
        return item

    def _change(self, order: Order) -> str:
        self.orders[order.number] = order
        self.unconfirmed += not self.customer.agreed(order.number)
        self._settle()
        return order.shown()

    def _settle(self) -> None:
        """If the customer's present request has come to its right end, note it."""
        at = self.customer.at
        if at in self.settled_at or at >= len(self.goals):
            return
        request, wanted = self._pairs()[at]
        done = wanted.order is not None and self.orders.get(request.order) == wanted.order
        refused = wanted.refused is not None and (request.order, wanted.refused) in self.refused
        if done or refused or (wanted.told and self.told and tells(self.told[-1], wanted.told)):
            self.settled_at[at] = max(0, self.calls - 1)
            self.earn(1 / len(self.goals))


class Service(Family):
    """The environment; see the module's docstring."""

    name = "service"
    version = "1"
    max_steps = 24
    levels = {1: 0.08, 2: 0.25, 3: 0.22, 4: 0.25, 5: 0.2}  # noqa: RUF012
    episode = ServiceEpisode
    config: ServiceConfig
    of_no_task = frozenset({"faults", "rules", "customer"})

    def __init__(self, config: ServiceConfig = ServiceConfig()) -> None:  # noqa: B008  (frozen)
        super().__init__(config)
        self.user = SimulatedUser(config.customer) if isinstance(config.customer, UserConfig) else None
        self.replayable = self.user is None
        self.records = records(config.size, config.world)
        self.customers = list(self.records.customers)

    async def close(self) -> None:
        """Close the engine of the model that plays the customer."""
        if self.user:
            await self.user.close()

    def goals(self, requests: list[ChangeRequest]) -> list[Goal]:
        return [goal(self.records, request, self.records.orders[request.order]) for request in requests]

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        """Level 1 asks a question, 2 wants a change that is allowed, 3 one that is not; 4 has two requests, 5 has
        three, some of them to be refused and some not."""
        while True:
            email = random.choice(self.customers)
            count = {4: 2, 5: 3}.get(level, 1)
            kinds = ["status"] if level == 1 else random.choices(CHANGES, k=count)
            orders = random.sample(self.records.customers[email].orders, count)
            requests = [
                draw_request(self.records, self.records.orders[number], kind, random)
                for number, kind in zip(orders, kinds, strict=True)
            ]
            refused = sum(goal.refused is not None for goal in self.goals(requests))
            if {1: True, 2: not refused, 3: refused == 1, 4: True, 5: 0 < refused < 3}[level]:
                yield self._draft(email, requests)

    def vary(self, task: Task, random: Random) -> Task | None:
        """The same customer with another request, of an order that the task does not touch. None if all are touched."""
        metadata: dict[str, Any] = json.loads(task.metadata)
        requests = [ChangeRequest(**request) for request in metadata["requests"]]
        orders = self.records.customers[metadata["email"]].orders
        free = [number for number in orders if number not in {request.order for request in requests}]
        if not free:
            return None
        more = draw_request(self.records, self.records.orders[random.choice(free)], random.choice(CHANGES), random)
        return self.derived(task, self._draft(metadata["email"], [*requests, more]), min(5, len(requests) + 3))

    def _draft(self, email: str, requests: list[ChangeRequest]) -> Draft:
        first = requests[0].wish(self.records.orders[requests[0].order])
        metadata = {"email": email, "requests": [as_json(request) for request in requests]}
        return Draft(f"Hello. {first}", None, metadata, key=json.dumps(metadata))
