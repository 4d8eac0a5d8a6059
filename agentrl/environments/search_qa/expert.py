"""The expert of ``search_qa``: it answers a question by what it has seen, and says what it has to see next.

It takes the question as an expression, goes through the things that a part of it may stand for, one after the other,
and reads the passage of each. It does not know the right answer before it has seen it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentrl.environments.search_qa.graph import RELATIONS, Graph
from agentrl.environments.search_qa.questions import Expression, hops

SHOWN = 5
"""Results of a search on one page."""


Ranked = Callable[[str], Sequence[str]]
"""Query -> titles of all results, the best first."""


class Missing(Exception):  # noqa: N818
    """What has to be seen next: the call of a tool, with its arguments."""

    def __init__(self, tool: str, **arguments: Any) -> None:
        super().__init__(tool)
        self.tool, self.arguments = tool, arguments


class Seen:
    """What an episode has shown: ``passages``, titles of those that were read, and ``pages`` of results, as (query,
    page). What was not seen raises Missing, unless ``left`` calls more may be made for it."""

    def __init__(
        self, graph: Graph, ranked: Ranked, passages: set[str], pages: set[tuple[str, int]], left: int = 0
    ) -> None:
        self.graph, self.ranked = graph, ranked
        self.passages, self.pages, self.left = passages, pages, left

    def fact(self, subject: str, relation: str) -> str | None:
        """What the passage of a thing says of it."""
        if subject not in self.passages:
            self._call(Missing("read", title=subject))
            self.passages.add(subject)
        return self.graph.ahead[relation].get(subject)

    def results(self, query: str) -> Iterator[str]:
        """Titles, page by page."""
        titles = self.ranked(query)
        for start in range(0, len(titles), SHOWN):
            page = start // SHOWN + 1
            if (query, page) not in self.pages:
                self._call(Missing("search", query=query, **({"page": page} if page > 1 else {})))
                self.pages.add((query, page))
            yield from titles[start : start + SHOWN]

    def _call(self, missing: Missing) -> None:
        if not self.left:
            raise missing
        self.left -= 1


def answers(expression: Expression, seen: Seen) -> list[str]:
    """The answers to a question: one of each side of a union, else one. Raises Missing if more has to be seen."""
    if expression[0] == "or":
        return sorted(next(_members(part, seen)) for part in expression[1:])
    return [next(_members(expression, seen))]


def answers_within(expression: Expression, graph: Graph, ranked: Ranked, calls: int) -> bool:
    """Whether the expert needs no more than so many calls."""
    try:
        answers(expression, Seen(graph, ranked, set(), set(), calls))
    except Missing:
        return False
    return True


def query_for(graph: Graph, name: str) -> str:
    """The word of a name that no other name has: the second of a person's, the first of any other."""
    words = name.split()
    return words[1] if graph.kinds[name] == "person" else words[0]


def _members(expression: Expression, seen: Seen) -> Iterator[str]:
    """The things that an expression stands for, as far as they are asked for."""
    kind, *rest = expression
    if kind == "is":
        yield rest[0]
    elif kind == "of":
        relation, direction, inner = rest
        for known in _members(inner, seen):
            if direction == "back":
                yield from _subjects(relation, known, seen)
            elif other := seen.fact(known, relation):
                yield other
    elif kind == "or":
        for part in rest:
            yield from _members(part, seen)
    else:
        first, second = sorted(rest, key=_breadth)
        yield from (name for name in _members(first, seen) if _holds(name, second, seen))


def _holds(name: str, expression: Expression, seen: Seen) -> bool:
    """Whether a thing is among those that an expression stands for."""
    kind, *rest = expression
    if kind == "is":
        return bool(name == rest[0])
    if kind == "of":
        relation, direction, inner = rest
        if direction == "back":
            other = seen.fact(name, relation)
            return other is not None and _holds(other, inner, seen)
        return any(seen.fact(subject, relation) == name for subject in _members(inner, seen))
    held = (_holds(name, part, seen) for part in rest)
    return all(held) if kind == "and" else any(held)


def _subjects(relation: str, other: str, seen: Seen) -> Iterator[str]:
    """Things of which a relation to ``other`` is true: of the titles that a search finds, those whose form is right."""
    wanted = RELATIONS[relation].subject
    for title in seen.results(query_for(seen.graph, other)):
        if title != other and seen.graph.kinds[title] == wanted and seen.fact(title, relation) == other:
            yield title


def _breadth(expression: Expression) -> tuple[int, int]:
    """How many searches a part of a question needs to go through its things, and how many hops."""
    searches = (expression[0] == "of" and expression[2] == "back") + sum(
        _breadth(part)[0] for part in expression[1:] if isinstance(part, list)
    )
    return searches, hops(expression)
