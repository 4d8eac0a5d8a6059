"""Programs that the environment draws: steps over a list of whole numbers, as in ``code``, and inputs that show each
step at work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.environments.code.programs import (
    KINDS,
    ProgramStep,
    StepKind,
    Values,
    draw_steps,
    draw_values,
    function_body,
    run,
)
from agentrl.environments.task_splits import digest

MOVES = tuple(
    kind
    for kind in KINDS
    if kind.name in ("skip", "tail", "rotate", "every", "reverse", "ascending", "descending", "distinct")
)
"""Steps that choose and order values, and change none."""


def _digits(random: Random) -> Values:
    return [random.randint(0, 9) for _ in range(random.randint(5, 6))]


def _record(random: Random) -> dict[str, int]:
    return {key: random.randint(0, 9) for key in KEYS}


@dataclass(frozen=True)
class ProgramLevel:
    """``steps`` of a program, of some ``kinds``; without any it takes two or three values of a record."""

    steps: int
    kinds: Sequence[StepKind]
    draw: Callable[[Random], Any]
    """An input."""


KEYS = "abcde"
LEVELS = {
    1: ProgramLevel(1, (), _record),
    2: ProgramLevel(2, MOVES, _digits),
    3: ProgramLevel(3, MOVES, _digits),
    4: ProgramLevel(2, KINDS, draw_values),
    5: ProgramLevel(3, KINDS, draw_values),
}
EXAMPLES = 8
"""Inputs of a program that is to be inferred. Half of them are shown."""
LARGEST = 10**6
"""Of the numbers in a result."""


PROBES = [draw(Random(number)) for number in range(8) for draw in (_record, _digits, draw_values)]
"""Inputs by whose results programs are known: two with the same ones are the same program, whatever their texts."""


def known_by(results: Sequence[str]) -> str:
    """What a program is known by: a digest of its results for the probes, as Python writes them, or ``raised``."""
    return digest(list(results))


def known(steps: Sequence[ProgramStep]) -> str:
    """What a drawn program is known by."""

    def result(probe: Any) -> str:
        try:
            return ascii(run(steps, probe))
        except Exception:  # of a program for lists at a record, or the other way round
            return "raised"

    return known_by(list(map(result, PROBES)))


def _lookup(random: Random) -> list[ProgramStep]:
    values = ", ".join(f"values[{random.choice(KEYS)!r}]" for _ in range(random.randint(2, 3)))
    return [ProgramStep("lookup", "look values up", f"[{values}]", f"[{values}]")]


def draw_program(level: int, inputs: int, random: Random) -> tuple[list[ProgramStep], list[Any]] | None:
    """A program and so many inputs; None if what was drawn tells too little. Without any of its steps one of the shown
    inputs has another result; no result is empty, the input itself, or that of another input."""
    recipe = LEVELS[level]
    steps = draw_steps(recipe.steps, random, recipe.kinds) if recipe.kinds else _lookup(random)
    drawn = [recipe.draw(random) for _ in range(inputs)]
    results = [run(steps, values) for values in drawn]
    pairs = list(zip(drawn, results, strict=True))
    if any(not result or result == values or max(map(abs, result)) > LARGEST for values, result in pairs):
        return None
    if len({str(result) for result in results}) < inputs:
        return None
    shown = pairs[: max(1, inputs // 2)]
    others = [steps[:number] + steps[number + 1 :] for number in range(len(steps))]
    idle = any(all(run(other, values) == result for values, result in shown) for other in others)
    return None if idle else (steps, drawn)


def source(steps: Sequence[ProgramStep]) -> str:
    """The program as the function ``f``."""
    return f"def f(values):\n{function_body(steps)}".rstrip("\n")
