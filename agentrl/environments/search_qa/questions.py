"""Questions as formal expressions (knowledge projections: Tao et al. 2025, WebShaper), and their text.

An expression is nested lists, so that it is JSON:

- ``["is", name]``: the set of one thing
- ``["of", relation, "ahead", V]``: objects of a relation whose subject is in V
- ``["of", relation, "back", V]``: subjects of a relation whose object is in V
- ``["and", U, V]`` and ``["or", U, V]``

A question of n hops has n projections. It is composed from its answer outwards: a thing is described by a fact that
names it, the other thing in the fact is described in turn, and so on. A question is kept if it has exactly the answer
meant, has no redundant part and, from two hops on, names nothing that shares a fact with the answer, so that no single
passage gives it away.
"""

from collections.abc import Collection
from random import Random
from typing import Any

from agentrl.environments.search_qa.graph import RELATIONS, TERMS, Graph

Expression = list[Any]


def denotation(graph: Graph, expression: Expression) -> set[str]:
    """The things that an expression stands for."""
    kind, *rest = expression
    if kind == "is":
        return {rest[0]}
    if kind == "of":
        relation, direction, inner = rest
        known = denotation(graph, inner)
        if direction == "ahead":
            ahead = graph.ahead[relation]
            return {ahead[name] for name in known if name in ahead}
        back = graph.back[relation]
        return {subject for name in known for subject in back.get(name, ())}
    left, right = (denotation(graph, part) for part in rest)
    return left & right if kind == "and" else left | right


def hops(expression: Expression) -> int:
    """The number of projections."""
    return (expression[0] == "of") + sum(hops(part) for part in expression[1:] if isinstance(part, list))


def constants(expression: Expression) -> list[str]:
    """The names in an expression."""
    if expression[0] == "is":
        return [expression[1]]
    return [name for part in expression[1:] if isinstance(part, list) for name in constants(part)]


def parts(expression: Expression) -> list[Expression]:
    """An expression and all that are in it, names aside; the whole comes first."""
    inside = [part for part in expression[1:] if isinstance(part, list)]
    return ([] if expression[0] == "is" else [expression]) + [subpart for part in inside for subpart in parts(part)]


def describe(graph: Graph, name: str, count: int, random: Random, avoid: str = "") -> Expression | None:
    """An expression of ``count`` hops for a set that ``name`` is in, or None if the way taken ends early."""
    if count == 0:
        return ["is", name]
    if random.random() < (0.5 if count >= 4 else 0.4 if count == 2 and avoid else 0):
        first = random.randint(1, count - 1) if avoid else random.randint(2, count - 2)
        left = describe(graph, name, first, random, avoid)
        right = describe(graph, name, count - first, random, avoid)
        return ["and", left, right] if left and right and left[1:3] != right[1:3] else None
    edges = [edge for edge in graph.edges[name] if edge[2] != avoid]
    if not edges:
        return None
    relation, is_object, other = random.choice(edges)
    inner = describe(graph, other, count - 1, random, avoid=name)
    return None if inner is None else ["of", relation, "ahead" if is_object else "back", inner]


def compose(graph: Graph, count: int, random: Random) -> tuple[Expression, list[str]] | None:
    """A question of ``count`` hops and its answers, or None: most attempts fail, so try again."""
    name = random.choice(graph.names)
    expression = describe(graph, name, count, random)
    if count >= 4 and random.random() < 0.15:
        other = random.choice(graph.things[graph.kinds[name]])
        halves = describe(graph, name, 2, random), describe(graph, other, count - 2, random)
        expression = ["or", *halves] if None not in halves else None
    if expression is None or not sound(graph, expression):
        return None
    return expression, sorted(denotation(graph, expression))


def sound(graph: Graph, expression: Expression) -> bool:
    """Whether there is one answer (two of a union), no shortcut to it, and no redundant part."""
    answers = denotation(graph, expression)
    if len(answers) != (2 if expression[0] == "or" else 1):
        return False
    named = constants(expression)
    if len(set(named)) < len(named) or answers & set(named):
        return False
    if hops(expression) > 1 and any(graph.near(answer) & set(named) for answer in answers):
        return False
    return all(_needed(graph, part) for part in parts(expression) if part[0] in ("and", "or"))


def _needed(graph: Graph, expression: Expression) -> bool:
    """Whether both halves of an intersection narrow it, and both of a union widen it."""
    left, right = (denotation(graph, part) for part in expression[1:])
    both = left & right if expression[0] == "and" else left | right
    return both not in (left, right) and (expression[0] == "and" or len(left) == len(right) == 1)


def expanded(graph: Graph, expression: Expression, random: Random) -> Expression | None:
    """A question one hop longer with the same answers: a name gives way to a description that fits it alone (layer-wise
    expansion). None if the attempt fails."""
    name = random.choice(constants(expression))
    description = describe(graph, name, 1, random)
    if description is None or denotation(graph, description) != {name}:
        return None
    longer = replaced(expression, name, description)
    return longer if sound(graph, longer) else None


def is_expression(graph: Graph, value: Any) -> bool:
    """Whether a value that somebody wrote is an expression about things of the graph."""
    match value:
        case ["is", str(name)]:
            return name in graph.kinds
        case ["of", str(relation), "ahead" | "back", inner]:
            return relation in RELATIONS and is_expression(graph, inner)
        case ["and" | "or", left, right]:
            return is_expression(graph, left) and is_expression(graph, right)
    return False


def replaced(expression: Expression, name: str, description: Expression) -> Expression:
    if expression == ["is", name]:
        return description
    return [replaced(part, name, description) if isinstance(part, list) else part for part in expression]


def kind_of(graph: Graph, expression: Expression) -> str:
    """The type of what an expression stands for."""
    if expression[0] == "is":
        return graph.kinds[expression[1]]
    if expression[0] == "of":
        relation = RELATIONS[expression[1]]
        return relation.object if expression[2] == "ahead" else relation.subject
    return kind_of(graph, expression[1])


def understood(expression: Expression, unknown: Collection[str], random: Random) -> Expression:
    """What someone takes a question for who does not know the terms of some relations: what is asked of a thing is one
    of these at random, of those that such a thing has."""
    if not _in_terms(expression, unknown):
        return expression
    subject = RELATIONS[expression[1]].subject
    alike = [relation for relation in unknown if RELATIONS[relation].subject == subject]
    return ["of", random.choice(alike), *expression[2:]]


def _in_terms(expression: Expression, unknown: Collection[str]) -> bool:
    """Whether a question asks by a term. Inside a question the types of things would give away what a term means."""
    return expression[0] == "of" and expression[1] in unknown and expression[2] == "ahead"


def text(graph: Graph, expression: Expression, unknown: Collection[str] = ()) -> str:
    """The question, with terms in place of the relations ``unknown``."""
    if _in_terms(expression, unknown):
        return f"Name the {TERMS[expression[1]]} of {_phrase(graph, expression[3])}."
    kind = kind_of(graph, expression)
    which = f"Name the {kind}" if expression[0] != "or" else f"Name each {kind}"
    return f"{which} {_clause(graph, expression)}."


def _clause(graph: Graph, expression: Expression) -> str:
    if expression[0] == "of":
        _, relation, direction, inner = expression
        form = RELATIONS[relation].ahead if direction == "ahead" else RELATIONS[relation].back
        return form.format(x=_phrase(graph, inner))
    return f" {expression[0]} ".join(f"({_clause(graph, part)})" for part in expression[1:])


def _phrase(graph: Graph, expression: Expression) -> str:
    if expression[0] == "is":
        return str(expression[1])
    return f"the {kind_of(graph, expression)} {_clause(graph, expression)}"


def support(graph: Graph, expression: Expression, answer: str) -> list[str]:
    """Titles of passages that show ``answer`` to be right, leaves first."""
    kind, *rest = expression
    if kind == "is":
        return []
    if kind == "and":
        return [title for part in rest for title in support(graph, part, answer)]
    if kind == "or":
        return [title for part in rest if answer in denotation(graph, part) for title in support(graph, part, answer)]
    relation, direction, inner = rest
    if direction == "back":
        return [*support(graph, inner, graph.ahead[relation][answer]), answer]
    subject = min(name for name in denotation(graph, inner) if graph.ahead[relation].get(name) == answer)
    return [*support(graph, inner, subject), subject]


def needed(graph: Graph, question: Expression, answers: list[str]) -> list[str]:
    """Titles of passages that show the answers to be right, each once."""
    return list(dict.fromkeys(title for answer in answers for title in support(graph, question, answer)))
