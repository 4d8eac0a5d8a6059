"""A made-up world of people, cities, companies, universities, books and countries, and a passage about each of them.

A fact is (subject, relation, object). Each subject has one object for each relation of its type. A passage tells the
facts of its subject alone; so who was born in a city stands in the passages of people, not in that of the city.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from agentrl.environments.bm25 import Index

FIRST = tuple(
    "Ada Ben Cleo Dov Esme Finn Gwen Hugo Iris Jonas Kira Liam Mara Nils Olga Piet Quinn Rosa Sven Tess Ugo Vera "  # noqa: SIM905
    "Wim Xenia Yusuf Zara".split()
)
ONSETS = tuple("b br d dr f g gr h j k kl l m n p pr r s st t tr v z".split())  # noqa: SIM905
VOWELS = tuple("a e i o u ai au ea io".split())  # noqa: SIM905
CODAS = tuple("l m n r s th x nd rk".split())  # noqa: SIM905
ENDINGS = {
    "city": ("burg", "mar", "stad", "ona"),
    "company": ("ex", "ware", "tec", "works"),
    "university": (" University", " College", " Institute"),
    "country": ("ia", "land", "stan"),
    "book": (" Rising", " at Dawn", " in Winter", " and Salt"),
}


@dataclass(frozen=True)
class Relation:
    """``told`` is how passages say it. ``ahead`` describes the object by its subject, ``back`` the subject by its
    object; {x} stands for what is known."""

    name: str
    subject: str
    object: str
    told: tuple[str, str]
    ahead: str
    back: str


# fmt: off
RELATIONS = {relation.name: relation for relation in (
    Relation("birthplace", "person", "city", ("{s} was born in {o}.", "{s} is a native of {o}."),
             "where {x} was born", "who was born in {x}"),
    Relation("employer", "person", "company", ("{s} earns a living at {o}.", "At present {s} is employed by {o}."),
             "that {x} works for", "who works for {x}"),
    Relation("school", "person", "university", ("{s} holds a degree of {o}.", "As a student {s} attended {o}."),
             "where {x} studied", "who studied at {x}"),
    Relation("teacher", "person", "person", ("{s} learned the trade from {o}.", "{s} was an apprentice of {o}."),
             "who taught {x}", "whom {x} taught"),
    Relation("seat", "company", "city", ("The head office of {s} stands in {o}.", "{s} is run from {o}."),
             "where {x} is based", "that is based in {x}"),
    Relation("founder", "company", "person", ("{s} was started by {o}.", "{o} began {s} as a workshop."),
             "who founded {x}", "that {x} founded"),
    Relation("place", "university", "city", ("{s} has its campus in {o}.", "The halls of {s} lie in {o}."),
             "where {x} is", "that is in {x}"),
    Relation("head", "university", "person", ("The chancellor of {s} is {o}.", "{o} presides over {s}."),
             "who heads {x}", "that {x} heads"),
    Relation("country", "city", "country", ("{s} belongs to {o}.", "{s} is a town of {o}."),
             "to which {x} belongs", "that belongs to {x}"),
    Relation("mayor", "city", "person", ("The mayor of {s} is {o}.", "{s} elected {o} as its mayor."),
             "who governs {x}", "that {x} governs"),
    Relation("author", "book", "person", ("{s} was written by {o}.", "{o} is the author of {s}."),
             "who wrote {x}", "that {x} wrote"),
    Relation("publisher", "book", "company", ("{s} was printed by {o}.", "{o} brought {s} to the shops."),
             "that published {x}", "that {x} published"),
    Relation("scene", "book", "city", ("{s} plays in {o}.", "The story of {s} unfolds in {o}."),
             "where {x} is set", "that is set in {x}"),
    Relation("capital", "country", "city", ("The capital of {s} is {o}.", "{s} is governed from {o}."),
             "that is the capital of {x}", "whose capital is {x}"),
)}
TERMS = {
    "birthplace": "cradle", "employer": "bread", "school": "nest", "author": "pen", "publisher": "press",
    "teacher": "torch", "scene": "stage",
    "seat": "throne", "founder": "seed", "place": "ground", "head": "crown", "country": "flag", "mayor": "key",
}
# fmt: on
"""Relation -> what those who do not know the passages call its object, in the order in which an expert lacks these
terms. A thing has at least two of these relations."""


class Graph:
    """``size`` people, and other things in proportion. Graphs of one size and ``world`` have the same names, and each
    ``facts`` is another number of facts about these.

    - ``things``: type -> names; ``kinds``: name -> its type
    - ``ahead``: relation -> subject -> object
    - ``back``: relation -> object -> subjects, in order
    - ``edges``: name -> (relation, whether the name is the object, the other name), each fact that names it
    - ``passages``: name -> text
    """

    def __init__(self, size: int, world: int, facts: int = 0) -> None:
        random = Random(f"search_qa-1-{size}-{world}")
        counts = {
            "person": size, "city": size // 6, "company": size // 5, "university": size // 10, "book": size // 3,
            "country": max(3, size // 40),
        }  # fmt: skip
        taken: set[str] = set()
        names_of_kind = {kind: [_name(kind, random, taken) for _ in range(count)] for kind, count in counts.items()}
        if facts:
            random = Random(f"search_qa-1-{size}-{world}-{facts}")
        self.things = names_of_kind
        self.kinds = {name: kind for kind, names in names_of_kind.items() for name in names}
        self.ahead: dict[str, dict[str, str]] = {}
        self.back: dict[str, dict[str, list[str]]] = {}
        self.edges: dict[str, list[tuple[str, bool, str]]] = {name: [] for name in self.kinds}
        for relation in RELATIONS.values():
            self._relate(relation, names_of_kind, random)
        self.passages = {name: self._passage(name, random) for name in self.kinds}
        self.names = list(self.kinds)

    def near(self, name: str) -> set[str]:
        """Names that share a fact with this one."""
        return {other for _, _, other in self.edges[name]}

    def _relate(self, relation: Relation, names_of_kind: dict[str, list[str]], random: Random) -> None:
        ahead: dict[str, str] = {}
        back: dict[str, list[str]] = defaultdict(list)
        for subject in names_of_kind[relation.subject]:
            other = random.choice(names_of_kind[relation.object])
            while other == subject:
                other = random.choice(names_of_kind[relation.object])
            ahead[subject] = other
            back[other].append(subject)
            self.edges[subject].append((relation.name, False, other))
            self.edges[other].append((relation.name, True, subject))
        self.ahead[relation.name], self.back[relation.name] = ahead, dict(back)

    def _passage(self, name: str, random: Random) -> str:
        sentences = [
            random.choice(RELATIONS[relation].told).format(s=name, o=other)
            for relation, is_object, other in self.edges[name]
            if not is_object
        ]
        random.shuffle(sentences)
        return f"{name} ({self.kinds[name]}). " + " ".join(sentences)


def _name(kind: str, random: Random, taken: set[str]) -> str:
    """A name nobody has. Words of names are taken too, so that one word finds one thing."""
    while True:
        syllables = [random.choice(ONSETS) + random.choice(VOWELS) + random.choice(CODAS) for _ in range(2)]
        word = "".join(syllables).capitalize()
        if kind == "person":
            word = word if word not in taken else ""
            name = f"{random.choice(FIRST)} {word}"
        else:
            name = word + random.choice(ENDINGS[kind])
            word = name.split()[0]
        if word and word not in taken:
            taken.add(word)
            return name


class SearchWorld:
    """One of the worlds of a setting: its number, its graph, and the search in its passages."""

    def __init__(self, number: int, graph: Graph) -> None:
        self.number, self.graph = number, graph
        self.index = Index(graph.passages)
        self.titles: dict[str, list[str]] = {}

    def ranked(self, query: str) -> list[str]:
        """Titles for a query. Samples of one task ask the same, so results are remembered."""
        if query not in self.titles:
            if len(self.titles) >= 4096:
                self.titles.clear()
            self.titles[query] = self.index.search(query)
        return self.titles[query]


@lru_cache(maxsize=4)
def graph(size: int, world: int, facts: int = 0) -> Graph:
    """The world of that size and number; it is made once."""
    return Graph(size, world, facts)
