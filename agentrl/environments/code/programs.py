"""Small programs over lists of whole numbers: their steps in words and in Python, and the bugs that a step can have."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

Values = list[int]


@dataclass(frozen=True)
class StepKind:
    """A kind of step. ``{k}`` in its words and expressions is a number between ``low`` and ``high``; ``wrong`` are
    expressions that a mistaken author might write."""

    name: str
    words: str
    right: str
    wrong: tuple[str, ...]
    low: int = 0
    high: int = 0


def _mapped(expression: str) -> str:
    return f"[{expression} for v in values]"


def _kept(condition: str) -> str:
    return f"[v for v in values if {condition}]"


KINDS = (
    StepKind("shift", "add {k} to each value", _mapped("v + {k}"), (_mapped("v - {k}"),), 1, 99),
    StepKind("scale", "multiply each value by {k}", _mapped("v * {k}"), (_mapped("v + {k}"),), 2, 19),
    StepKind("floor", "keep the values from {k} on", _kept("v >= {k}"), (_kept("v > {k}"), _kept("v <= {k}")), -5, 12),
    StepKind("multiples", "keep the multiples of {k}", _kept("v % {k} == 0"), (_kept("v % {k}"),), 2, 3),
    StepKind("cap", "replace each value above {k} by {k}", _mapped("min(v, {k})"), (_mapped("max(v, {k})"),), 1, 40),
    StepKind("skip", "drop the first {k} values", "values[{k}:]", ("values[{k} + 1:]", "values[:{k}]"), 1, 3),
    StepKind("tail", "keep the last {k} values", "values[-{k}:]", ("values[:{k}]", "values[-{k} + 1:]"), 2, 4),
    StepKind("rotate", "move the first {k} values to the end", "values[{k}:] + values[:{k}]", ("values[{k}:]",), 1, 3),
    StepKind("every", "keep every {k}th value, beginning with the first", "values[::{k}]", ("values[{k}::{k}]",), 2, 4),
    StepKind("reverse", "reverse the order", "values[::-1]", ("values[:-1]",)),
    StepKind("ascending", "sort from low to high", "sorted(values)", ("sorted(values, reverse=True)",)),
    StepKind("descending", "sort from high to low", "sorted(values, reverse=True)", ("sorted(values)",)),
    StepKind("distinct", "keep the first of equal values", "list(dict.fromkeys(values))", ("sorted(set(values))",)),
    StepKind(
        "totals", "replace each value by the sum of the values up to and including it",
        "[sum(values[:i + 1]) for i in range(len(values))]", ("[sum(values[:i]) for i in range(len(values))]",),
    ),
    StepKind(
        "changes", "replace the list by the change from each value to the next",
        "[b - a for a, b in zip(values, values[1:])]", ("[a - b for a, b in zip(values, values[1:])]",),
    ),
    StepKind("squares", "square each value", _mapped("v * v"), (_mapped("v + v"), _mapped("v ^ 2"))),
    StepKind("positive", "replace each negative value by 0", _mapped("max(v, 0)"), (_mapped("min(v, 0)"),)),
)  # fmt: skip


LEAST_KNOWN = (
    *("skip", "reverse", "tail", "ascending", "rotate", "descending", "every", "distinct", "floor"),
    *("totals", "multiples", "changes", "cap", "squares", "scale", "positive", "shift"),
)
"""Kinds in the order in which an expert that does not know some lacks them: with a number and without, in turn."""


@dataclass(frozen=True)
class ProgramStep:
    """A step as it is asked for, and as it is written: ``written`` is ``right``, or has a bug."""

    name: str
    words: str
    right: str
    written: str

    def apply(self, values: Values) -> Values:
        return function(self.right)(values)


def draw_steps(number: int, random: Random, kinds: Sequence[StepKind] = KINDS) -> list[ProgramStep]:
    """Steps of different kinds, without bugs."""
    return [_operation(kind, random) for kind in random.sample(kinds, number)]


def _operation(kind: StepKind, random: Random) -> ProgramStep:
    k = random.randint(kind.low, kind.high)
    right = kind.right.replace("{k}", str(k))
    return ProgramStep(kind.name, kind.words.replace("{k}", str(k)), right, right)


def with_bug(step: ProgramStep, random: Random) -> ProgramStep:
    """The step as a mistaken author writes it."""
    kind = next(bug_kind for bug_kind in KINDS if bug_kind.name == step.name)
    k = next((k for k in range(kind.low, kind.high + 1) if kind.right.replace("{k}", str(k)) == step.right), 0)
    return ProgramStep(step.name, step.words, step.right, random.choice(kind.wrong).replace("{k}", str(k)))


def understood(expression: str, unknown: int, random: Random) -> str:
    """What someone writes who takes a step of a kind among the first ``unknown`` of :data:`LEAST_KNOWN` for one of
    these at random, with the same number. A step of another kind is known."""
    kinds = [kind for kind in KINDS if kind.name in LEAST_KNOWN[:unknown]]
    for kind in kinds:
        pattern = re.escape(kind.right).replace(re.escape("{k}"), r"(-?\d+)" if kind.low < 0 else r"(\d+)")
        if match := re.fullmatch(pattern, expression):
            alike = [other for other in kinds if ("{k}" in other.right) == ("{k}" in kind.right)]
            return random.choice(alike).right.replace("{k}", match[1] if match.groups() else "")
    return expression


@lru_cache(maxsize=4096)
def function(expression: str) -> Callable[[Values], Values]:
    """The function of ``values`` that one of our expressions is."""
    made: Callable[[Values], Values] = eval(f"lambda values: {expression}")
    return made


def run(steps: Sequence[ProgramStep], values: Values, written: bool = False) -> Values:
    """What the steps make of a list: as they were asked for, or as they are written."""
    for step in steps:
        values = function(step.written if written else step.right)(values)
    return values


def function_body(steps: Sequence[ProgramStep]) -> str:
    """The steps as the lines of a function of ``values``."""
    return "".join(f"    values = {step.written}\n" for step in steps[:-1]) + f"    return {steps[-1].written}\n"


def draw_values(random: Random) -> Values:
    """A list to try a program with. A value may come twice."""
    values = [random.randint(-9, 30) for _ in range(random.randint(5, 8))]
    values[random.randrange(len(values))] = values[0]
    return values


def sentence(steps: Sequence[ProgramStep]) -> str:
    """The steps in words: "First add 3 to each value, then reverse the order"."""
    first, *rest = (step.words for step in steps)
    if not rest:
        return first[0].upper() + first[1:]
    return f"First {first}, " + ", ".join(f"then {words}" for words in rest)


def call(name: str, *arguments: Any) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"
