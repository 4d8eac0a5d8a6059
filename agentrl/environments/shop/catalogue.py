"""The catalogue of ``shop``, and how well a product fits what is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from agentrl.environments.bm25 import Index

# fmt: off
CATEGORIES = (
    "backpack", "blanket", "boots", "bottle", "chair", "coat", "desk", "gloves", "hat", "jacket", "kettle", "lamp",
    "mug", "pillow", "rug", "scarf", "shoes", "tent", "towel", "vest",
)
ATTRIBUTES = (
    "breathable", "compact", "foldable", "handmade", "insulated", "lightweight", "machine-washable", "organic",
    "padded", "quick-drying", "recycled", "scratch-resistant", "stain-resistant", "vegan", "waterproof", "windproof",
)
BRANDS = ("Alto", "Brio", "Corva", "Dune", "Elm", "Fjord", "Gale", "Hollo", "Iris", "Juno", "Koru", "Lumo")
COLORS = ("black", "blue", "brown", "green", "grey", "red", "white", "yellow")
SIZES = ("S", "M", "L", "XL", "XXL")
# fmt: on


@dataclass(frozen=True)
class Product:
    """``options`` are what a buyer chooses from. The price is in whole dollars."""

    number: str
    category: str
    title: str
    brand: str
    price: int
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]

    def line(self) -> str:
        return f"{self.number} {self.title}, {self.price} dollars"

    def page(self) -> str:
        options = "; ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return f"{self.line()}. It is {', '.join(self.attributes)}. Options: {options}."


@dataclass(frozen=True)
class Wish:
    """What a customer asks for. ``price`` is the most it may cost; with ``cheapest`` it is that of the cheapest product
    that fits, and the customer does not know it."""

    category: str
    attributes: Sequence[str]
    options: Mapping[str, str]
    price: int
    cheapest: bool = False

    @property
    def prompt(self) -> str:
        parts = [f"{name} {value}" for name, value in self.options.items()]
        adjectives = ", ".join(self.attributes)
        if self.cheapest:
            return f"Buy the cheapest {adjectives} {self.category}{''.join(', ' + part for part in parts)}."
        parts.append(f"for at most {self.price} dollars")
        return f"Buy: {adjectives} {self.category}, {', '.join(parts)}."

    def fits(self, product: Product) -> bool:
        """Whether it can be bought as wished."""
        return (
            product.category == self.category
            and product.price <= self.price
            and all(attribute in product.attributes for attribute in self.attributes)
            and all(value in product.options.get(name, ()) for name, value in self.options.items())
        )

    def match(self, product: Product, chosen: Mapping[str, str]) -> float:
        """How much of the wish a purchase fulfils, 0 to 1: the share of attributes, options and price, and nothing if
        the product is of another category (WebShop: Yao et al. 2022, section 3.1)."""
        if product.category != self.category:
            return 0.0
        attributes = sum(attribute in product.attributes for attribute in self.attributes)
        options = sum(chosen.get(name) == value for name, value in self.options.items())
        wanted = len(self.attributes) + len(self.options) + 1
        return (attributes + options + (product.price <= self.price)) / wanted


@dataclass
class Catalogue:
    """All products by number, those of a category, the cheapest first, and the index of their titles."""

    products: dict[str, Product]
    index: Index
    by_category: dict[str, list[Product]] = field(default_factory=dict)

    def fitting(self, wish: Wish) -> list[Product]:
        """Products that fit a wish, the cheapest first."""
        return [product for product in self.by_category[wish.category] if wish.fits(product)]


@lru_cache(maxsize=4)
def catalogue(size: int, world: int) -> Catalogue:
    """The catalogue of that size and number; it is made once."""
    random = Random(f"shop-1-{size}-{world}")
    products = [_product(number, random) for number in range(size)]
    made = Catalogue(
        {product.number: product for product in products},
        Index({product.number: product.title for product in products}),
    )
    for product in sorted(products, key=lambda product: (product.price, product.number)):
        made.by_category.setdefault(product.category, []).append(product)
    return made


def _product(number: int, random: Random) -> Product:
    category = CATEGORIES[number % len(CATEGORIES)]
    index = CATEGORIES.index(category)
    usual = [ATTRIBUTES[(index * 3 + step * (1 + index % 3)) % len(ATTRIBUTES)] for step in range(8)]
    attributes = tuple(sorted(random.sample(sorted(set(usual)), 4)))
    brand = random.choice(BRANDS)
    options = {"color": tuple(sorted(random.sample(COLORS, 4))), "size": tuple(sorted(random.sample(SIZES, 3)))}
    title = f"{brand} {category}, {attributes[random.randrange(4)]}"
    return Product(f"P{number:04d}", category, title, brand, random.randint(8, 200), attributes, options)
