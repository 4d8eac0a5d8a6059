"""Word problems: a stock of things that grows, shrinks and is shared out, told step by step.

All numbers are whole. A problem is its start and its steps, which are JSON; the text and the arithmetic follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

THINGS = ("apples", "bolts", "books", "bricks", "candles", "coins", "eggs", "jars", "lamps", "nails", "pens", "plates")
PLACES = (
    "A farm",
    "A school",
    "A shop",
    "A depot",
    "A museum",
    "A workshop",
    "A port",
    "A hotel",
    "A library",
    "A mill",
)

Step = tuple[str, int, int]
"""An operation and its numbers; the second is 0 if the operation has one."""


@dataclass(frozen=True)
class Operation:
    """``told`` is its sentence. ``sums`` are its calculations: {v} is the value before, {n} and {m} are the numbers,
    {w} is what the calculation before gave."""

    told: str
    sums: tuple[str, ...]


OPERATIONS = {
    "add": Operation("Then {n} more arrive.", ("{v}+{n}",)),
    "take": Operation("Then {n} are sold.", ("{v}-{n}",)),
    "times": Operation("Then the number grows to {n} times what it was.", ("{v}*{n}",)),
    "share": Operation("They are shared equally among {n} rooms, and one room is looked at.", ("{v}/{n}",)),
    "crates": Operation("Then {n} crates with {m} {things} each arrive.", ("{n}*{m}", "{v}+{w}")),
    "loads": Operation("Then {n} carts with {m} {things} each leave.", ("{n}*{m}", "{v}-{w}")),
    "break": Operation("Of these, {n} % break and are thrown away.", ("{v}*{n}/100", "{v}-{w}")),
}


@dataclass(frozen=True)
class WordProblem:
    place: str
    things: str
    start: int
    steps: Sequence[Step]

    @property
    def prompt(self) -> str:
        sentences = [OPERATIONS[name].told.format(n=n, m=m, things=self.things) for name, n, m in self.steps]
        return (
            f"{self.place} has {self.start} {self.things}. {' '.join(sentences)} How many {self.things} are there now?"
        )

    def sums(self) -> list[tuple[str, int]]:
        """Each calculation and its result, in order; the last result is the answer."""
        sums: list[tuple[str, int]] = []
        value = self.start
        for name, n, m in self.steps:
            between = 0
            for form in OPERATIONS[name].sums:
                calculation = form.format(v=value, n=n, m=m, w=between)
                between = _result(form, value, n, m, between)
                sums.append((calculation, between))
            value = between
        return sums

    @property
    def answer(self) -> int:
        return self.sums()[-1][1]

    def until(self, result: int) -> "WordProblem | None":
        """The shorter problem whose answer is ``result``, if this one comes by it at the end of a step."""
        for count in range(1, len(self.steps)):
            shorter = WordProblem(self.place, self.things, self.start, self.steps[:count])
            if shorter.answer == result:
                return shorter
        return None


def _result(form: str, v: int, n: int, m: int, w: int) -> int:
    results = {
        "{v}+{n}": v + n, "{v}-{n}": v - n, "{v}*{n}": v * n, "{v}/{n}": v // n, "{n}*{m}": n * m, "{v}+{w}": v + w,
        "{v}-{w}": v - w, "{v}*{n}/100": v * n // 100,
    }  # fmt: skip
    return results[form]


def compose(calculations: int, random: Random, largest: int) -> WordProblem:
    """A problem of so many calculations, whose numbers are up to ``largest``."""
    while True:
        start = random.randint(largest // 20 + 3, largest)
        problem: WordProblem | None = WordProblem(random.choice(PLACES), random.choice(THINGS), start, ())
        while problem is not None and (left := calculations - len(problem.sums() if problem.steps else ())):
            problem = longer(problem, left, random, largest)
        if problem is not None and str(problem.answer) not in _numbers(problem):
            return problem


def longer(problem: WordProblem, left: int, random: Random, largest: int) -> WordProblem | None:
    """The problem with one more step, of at most ``left`` calculations; None if its numbers would not fit."""
    value = problem.answer if problem.steps else problem.start
    names = [name for name, operation in OPERATIONS.items() if len(operation.sums) <= left]
    name, n, m = random.choice(names), 0, 0
    if name in ("add", "take"):
        n = random.randint(2, max(2, largest if name == "add" else value - 1))
    elif name == "times":
        n = random.randint(2, 12)
    elif name == "share":
        n = random.choice([d for d in range(2, 13) if value % d == 0] or [0])
    elif name == "break":
        n = random.choice([p for p in (5, 10, 15, 20, 25, 30, 40, 45, 60, 75) if value * p % 100 == 0] or [0])
    else:
        n, m = random.randint(2, 30), random.randint(2, 60)
    after = WordProblem(problem.place, problem.things, problem.start, (*problem.steps, (name, n, m)))
    return after if n and 2 <= after.answer <= 10**7 else None


def _numbers(problem: WordProblem) -> set[str]:
    return {str(number) for _, n, m in problem.steps for number in (n, m)} | {str(problem.start)}
