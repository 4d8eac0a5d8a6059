"""What customers want, what that should lead to, and the scripted customer, who reveals what is asked."""

import re
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from agentrl.environments.service.records import Item, Order, Records, Rule, address, forbidden
from agentrl.schemas.trajectory import Message, Role

REASONS = ("ordered by mistake", "found it cheaper", "no longer needed")


@dataclass(frozen=True)
class ChangeRequest:
    """``kind`` is status, cancel, address, return or exchange; ``item`` is that of the last two, and ``detail`` the
    reason, the new address, or what a question is about."""

    kind: str
    order: str
    item: str = ""
    detail: str = ""

    def wish(self, order: Order) -> str:
        """What the customer says that he wants, without the number of the order."""
        item = order.item(self.item)
        return {
            "status": f"I have a question about an order: {self.detail}",
            "cancel": f"I want to cancel an order. Reason: {self.detail}.",
            "address": "I want to change the address of an order.",
            "return": f"I want to return the {item.product if item else ''} of an order.",
            "exchange": f"I want another {item.product if item else ''} for the one that I ordered: the cheapest "
            "variant that is available and not the one I have.",
        }[self.kind]


@dataclass(frozen=True)
class Goal:
    """What a request should lead to: the order afterwards, the rule by which it is refused, or what is to be said."""

    order: Order | None = None
    refused: Rule | None = None
    told: str = ""


QUESTIONS = {
    "what is its status?": lambda order: order.status,
    "how many items does it have?": lambda order: str(len(order.items)),
    "what did it cost altogether, in dollars?": lambda order: str(sum(item.price for item in order.items)),
}


STATUSES = {"pending", "shipped", "delivered", "cancelled"}


def tells(text: str, answer: str) -> bool:
    """Whether a text gives an answer, and no other of the same kind beside it."""
    words = set(text.lower().replace(".", " ").replace(",", " ").split())
    others = STATUSES if answer in STATUSES else {word for word in words if word.isdigit()}
    return words & others == {answer}


def goal(records: Records, request: ChangeRequest, order: Order) -> Goal:
    """The right end of a request about an order as it is now."""
    if request.kind == "status":
        return Goal(told=QUESTIONS[request.detail](order))
    item = order.item(request.item)
    if rule := forbidden(order, request.kind, item):
        return Goal(refused=rule)
    return Goal(order=changed(records, request, order))


def changed(records: Records, request: ChangeRequest, order: Order) -> Order:
    """The order after the change."""
    if request.kind == "cancel":
        return replace(order, status="cancelled", reason=request.detail)
    if request.kind == "address":
        return replace(order, address=request.detail)
    if request.kind == "return":
        return replace(order, returned=(*order.returned, request.item))
    item = order.item(request.item)
    assert item is not None
    variant, price = cheapest_other(records, item)
    return order.with_item(replace(item, variant=variant, price=price))


def cheapest_other(records: Records, item: Item) -> tuple[str, int]:
    """The cheapest variant that is available and not the item's own, and its price."""
    prices = {
        v: price for v, price in records.variants[item.product].items() if price is not None and v != item.variant
    }
    variant = min(prices, key=lambda name: (prices[name], name))
    return variant, prices[variant]


def draw_request(records: Records, order: Order, kind: str, random: Random) -> ChangeRequest:
    """A request of that kind about an order."""
    item = random.choice(order.items).number if kind in ("return", "exchange") else ""
    details = {"status": random.choice(list(QUESTIONS)), "cancel": random.choice(REASONS), "address": address(random)}
    return ChangeRequest(kind, order.number, item, details.get(kind, ""))


def as_json(request: ChangeRequest) -> dict[str, Any]:
    return asdict(request)


class ScriptedCustomer:
    """Answers what the policy says, by words in it. He knows his email address, and the orders and details of his
    requests, which he makes one after the other; he says them if he is asked.

    ``confirmed`` are the requests that he said yes to, ``at`` is the one that he is at.
    """

    def __init__(self, email: str, requests: list[ChangeRequest], wishes: list[str]) -> None:
        self.email, self.requests, self.wishes = email, requests, wishes
        self.at = 0
        self.confirmed: set[int] = set()
        self.gave_email = self.gave_address = False
        self.gave_order: set[int] = set()

    @property
    def request(self) -> ChangeRequest:
        return self.requests[self.at]

    def agreed(self, order: str) -> bool:
        """Whether he said yes to a change of an order."""
        return any(self.requests[number].order == order for number in self.confirmed)

    def hears(self, text: str, settled: bool) -> str | None:
        """What he says to ``text``; None ends the conversation. ``settled`` says that what he asked for is done, told
        or refused."""
        lowered = text.lower()
        if settled:
            self.at += 1
            self.gave_address = False
            return f"Thank you. {self.wishes[self.at]}" if self.at < len(self.requests) else None
        if "confirm" in lowered:
            if self.request.order.lower() not in lowered:
                return "No, I do not mean that order."
            self.confirmed.add(self.at)
            return "Yes, please."
        known = []
        if "email" in lowered:
            self.gave_email = True
            known.append(f"My email is {self.email}.")
        if "order number" in lowered or "which order" in lowered:
            self.gave_order.add(self.at)
            known.append(f"It is order {self.request.order}.")
        if "address" in lowered and "email" not in lowered and self.request.kind == "address":
            self.gave_address = True
            known.append(f"The new address is {self.request.detail}.")
        return " ".join(known) or f"As I said: {self.wishes[self.at]}"


STOP = "###STOP###"
"""What a played customer writes when he has no further request, as in tau-bench."""


class PlayedCustomer(ScriptedCustomer):
    """The customer as a model plays him, who is told ``about``. What he gave and confirmed is read off his words."""

    def __init__(self, email: str, requests: list[ChangeRequest], wishes: list[str]) -> None:
        super().__init__(email, requests, wishes)
        self.talk = [Message(role=Role.USER, content=f"Hello. {wishes[0]}")]

    @property
    def about(self) -> str:
        """What his model is told."""
        wanted = []
        for number, (request, wish) in enumerate(zip(self.requests, self.wishes, strict=True), 1):
            new = f" The new address is {request.detail}." if request.kind == "address" else ""
            wanted.append(f"{number}. {wish} It is order {request.order}.{new}")
        return (
            "You play a customer who writes to the support of a shop. Write what the customer says next and nothing "
            f"else, in one or two short sentences.\nYour email address is {self.email}.\nYou want, one after the "
            f"other:\n{chr(10).join(wanted)}\nSay your email address, the number of an order and a new address only "
            'if you are asked for them. If you are asked to confirm a change, begin with "Yes" if it is the change and '
            'the order that you mean, else with "No". Make nothing up. Begin with the next thing that you want when '
            f"the last one is done, answered or refused. After the last one write {STOP}."
        )

    def said(self, text: str, answer: str, settled: bool) -> str | None:
        """Note what he answered to ``text``. Returns what the policy reads; None if he ended the conversation.
        ``settled`` is as in :meth:`hears`."""
        self.talk += [Message(role=Role.ASSISTANT, content=text), Message(role=Role.USER, content=answer)]
        if settled and self.at + 1 < len(self.requests):
            self.at += 1
        question, lowered = text.lower(), answer.lower()
        self.gave_email |= self.email.lower() in lowered
        self.gave_address |= bool(self.request.detail) and self.request.detail.lower() in lowered
        for number, request in enumerate(self.requests):
            if request.order.lower() in lowered:
                self.gave_order.add(number)
            if "confirm" in question and request.order.lower() in question and re.match(r"\W*yes\b", lowered):
                self.confirmed.add(number)
        return None if STOP in answer else answer
