"""The records of ``service``: customers, their orders, and products; and the rules for changing them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Literal, get_args

TODAY = 240
"""Days are counted from the first of the year."""
RETURN_DAYS = 30
DEAREST = 500

Rule = Literal["not_pending", "not_delivered", "too_late", "final_sale", "too_expensive"]
RULES: tuple[Rule, ...] = get_args(Rule)

POLICY = f"""You help the customers of a shop. Today is day {TODAY}.
1. Ask for the email address first, and find the customer by it. Touch the orders of this customer only.
2. Pending orders can be cancelled, and their address can be changed. Other orders cannot (not_pending).
3. Items of delivered orders can be returned or exchanged; others cannot (not_delivered). Not if the order came more \
than {RETURN_DAYS} days ago (too_late), if the item is on final sale (final_sale), or if it cost more than {DEAREST} \
dollars (too_expensive). The first of these that applies is the reason.
4. An exchange is for another available variant of the same product.
5. Before each change, say what you will do, with the number of the order, and ask the customer to confirm it.
6. If a rule forbids what is asked, call refuse with the reason, then tell the customer."""


@dataclass(frozen=True)
class Item:
    """``number`` is unique within its order."""

    number: str
    product: str
    variant: str
    price: int
    final_sale: bool = False


@dataclass(frozen=True)
class Order:
    """``day`` is that of the delivery; 0 if it has not come. ``returned`` are numbers of items."""

    number: str
    customer: str
    status: Literal["pending", "shipped", "delivered", "cancelled"]
    day: int
    address: str
    items: tuple[Item, ...]
    returned: tuple[str, ...] = ()
    reason: str = ""

    def item(self, number: str) -> Item | None:
        return next((item for item in self.items if item.number == number), None)

    def with_item(self, changed: Item) -> "Order":
        items = tuple(changed if item.number == changed.number else item for item in self.items)
        return replace(self, items=items)

    def shown(self) -> str:
        items = "; ".join(
            f"{item.number} {item.variant} {item.product}, {item.price} dollars"
            + (", final sale" if item.final_sale else "")
            + (", returned" if item.number in self.returned else "")
            for item in self.items
        )
        came = f" on day {self.day}" if self.day else ""
        return f"order {self.number}: {self.status}{came}; to {self.address}; items: {items}"


@dataclass(frozen=True)
class Customer:
    email: str
    name: str
    orders: tuple[str, ...]


@dataclass(frozen=True)
class Records:
    """``variants``: product -> variant -> its price, or None if it is not available."""

    customers: Mapping[str, Customer]
    orders: Mapping[str, Order]
    variants: Mapping[str, Mapping[str, int | None]]


def forbidden(order: Order, kind: str, item: Item | None) -> Rule | None:
    """The rule that forbids a change, if one does."""
    if kind in ("cancel", "address"):
        return None if order.status == "pending" else "not_pending"
    assert item is not None
    if order.status != "delivered":
        return "not_delivered"
    if TODAY - order.day > RETURN_DAYS:
        return "too_late"
    if item.final_sale:
        return "final_sale"
    return "too_expensive" if item.price > DEAREST else None


PRODUCTS = ("lamp", "chair", "kettle", "jacket", "watch", "tent", "camera", "printer")
VARIANTS = ("black", "blue", "green", "red", "silver", "white")
FIRST = ("ann", "bob", "cleo", "dan", "eve", "finn", "gwen", "hugo", "iris", "jon", "kira", "leo", "mia", "ned", "olga")
LAST = ("adler", "brook", "cole", "drake", "ellis", "frost", "grant", "hale", "irwin", "jones", "kent", "lowe", "moss")
STREETS = (
    "Oak Lane",
    "Mill Road",
    "High Street",
    "Park Row",
    "Lake View",
    "Church Hill",
    "Station Road",
    "King Street",
)


@lru_cache(maxsize=4)
def records(size: int, world: int) -> Records:
    """The records of ``size`` customers; they are made once."""
    random = Random(f"service-1-{size}-{world}")
    variants = {product: _variants(random) for product in PRODUCTS}
    customers: dict[str, Customer] = {}
    orders: dict[str, Order] = {}
    for number in range(size):
        name = f"{random.choice(FIRST)} {random.choice(LAST)}"
        email = f"{name.replace(' ', '.')}{number}@mail.test"
        numbers = [f"A{number * 3 + index + 1000}" for index in range(3)]
        customers[email] = Customer(email, name, tuple(numbers))
        orders |= {order: _order(order, email, variants, random) for order in numbers}
    return Records(customers, orders, variants)


def _variants(random: Random) -> dict[str, int | None]:
    price = random.choice((20, 45, 80, 150, 320, 480))
    offered = {variant: price + random.randint(0, 60) for variant in random.sample(VARIANTS, 5)}
    return {variant: None if index == 4 else cost for index, (variant, cost) in enumerate(sorted(offered.items()))}


def _order(number: str, email: str, variants: Mapping[str, Mapping[str, int | None]], random: Random) -> Order:
    status: Literal["pending", "shipped", "delivered"] = random.choice(("pending", "shipped", "delivered", "delivered"))
    items = []
    for index, product in enumerate(random.sample(PRODUCTS, random.randint(1, 3))):
        variant = random.choice([variant for variant, price in variants[product].items() if price is not None])
        price = variants[product][variant]
        assert price is not None
        items.append(Item(f"I{index + 1}", product, variant, price, final_sale=random.random() < 0.15))
    day = random.randint(TODAY - 60, TODAY - 1) if status == "delivered" else 0
    return Order(number, email, status, day, address(random), tuple(items))


def address(random: Random) -> str:
    return f"{random.randint(1, 99)} {random.choice(STREETS)}"
