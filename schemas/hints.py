"""Suggestions for names that are not known."""

import difflib
from collections.abc import Iterable
from itertools import takewhile

ALIKE = 0.6
LONGEST = 300
"""Names of more characters get no suggestion: comparing takes time with the square of their length."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean "x"?`` if a similar name is known, else the empty text."""
    near = nearest(name, known)
    return f"; did you mean {near[0]!r}?" if near else ""


def nearest(name: str, known: Iterable[str], count: int = 1, alike: float = ALIKE) -> list[str]:
    """At most ``count`` of the names ``known`` that are most like ``name``, the best first: those that the fewest slips
    of the keyboard make of it (:func:`slips`), then those that share at least ``alike`` of their characters."""
    if len(name) > LONGEST:
        return []
    names = list(dict.fromkeys(known))
    distances = {other: slips(name, other) for other in names if _may_be_alike(name, other, alike)}
    shares = {other: 1 - number / max(len(name), len(other), 1) for other, number in distances.items()}
    by_characters = difflib.get_close_matches(name, names, max(1, len(names)), alike)
    by_slips = [other for other in [*by_characters, *names] if shares.get(other, 0.0) >= alike]
    by_slips.sort(key=lambda other: -shares[other])  # of those that are equally near, the one that shares more
    return list(dict.fromkeys([*by_slips, *by_characters]))[:count]


def slips(a: str, b: str) -> int:
    """The fewest insertions, deletions, substitutions and swaps of neighbours that make ``b`` of ``a``, no place being
    changed twice (the optimal string alignment distance, a restricted Damerau-Levenshtein distance)."""
    start = _same(a, b)
    a, b = a[start:], b[start:]
    end = _same(reversed(a), reversed(b))
    a, b = a[: len(a) - end], b[: len(b) - end]
    before: list[int] = []
    last = list(range(len(b) + 1))
    for row, left in enumerate(a, 1):
        now = [row]
        for column, right in enumerate(b, 1):
            cost = min(last[column] + 1, now[column - 1] + 1, last[column - 1] + (left != right))
            if row > 1 and column > 1 and left == b[column - 2] and right == a[row - 2]:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]


def _same(a: Iterable[str], b: Iterable[str]) -> int:
    """How many characters at the start are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _may_be_alike(a: str, b: str, alike: float) -> bool:
    return min(len(a), len(b)) >= alike * max(len(a), len(b))
