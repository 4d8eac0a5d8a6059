"""Attempts as a tree of the tokens that they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from agentrl.flows.viewer.pages.compare import common
from agentrl.flows.viewer.wire.compare import TreeBranch
from agentrl.statistics.intervals import wilson

ENDS = 20
TOKENS, TEXT_BYTES = 60, 240
"""How much of a branch's text is shown."""


@dataclass
class Branch:
    """Tokens [start, end) of the ``members``, which are positions of sequences; those in ``ends`` end with it."""

    parent: int | None
    start: int
    end: int
    members: list[int]
    ends: list[int] = field(default_factory=list)


def prefix_tree(sequences: Sequence[np.ndarray]) -> list[Branch]:
    """The tree of sequences, parents before children. Each branch is as long as its members agree; without a token that
    all begin with, there are several roots."""
    found: list[Branch] = []
    todo: list[tuple[int | None, list[int], int]] = [(None, each, 0) for each in _by_token(sequences, 0)]
    while todo:
        parent, members, start = todo.pop(0)
        first = sequences[members[0]][start:]
        end = start + min((common(first, sequences[one][start:]) for one in members), default=0)
        place = len(found)
        found.append(Branch(parent, start, end, members, [one for one in members if len(sequences[one]) == end]))
        rest = [one for one in members if len(sequences[one]) > end]
        todo += [(place, [rest[one] for one in each], end) for each in _by_token([sequences[one] for one in rest], end)]
    return found


def _by_token(sequences: Sequence[np.ndarray], place: int) -> list[list[int]]:
    """Positions of the sequences that go on, by their token at ``place``, in the order in which tokens come first."""
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(sequences):
        if len(one) > place:
            groups.setdefault(int(one[place]), []).append(number)
    return list(groups.values())


def columns_of_drawing(parents: Sequence[int | None]) -> list[int]:
    """How many branches are above each. Parents come before their children."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent is None else found[parent] + 1)
    return found


def rows_of_drawing(parents: Sequence[int | None]) -> list[float]:
    """The row of each branch: leaves one below the other, others in the middle of their children. Parents come before
    their children."""
    children: list[list[int]] = [[] for _ in parents]
    for number, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(number)
    found = [0.0] * len(parents)
    leaves = 0
    todo = [number for number, parent in reversed(list(enumerate(parents))) if parent is None]
    while todo:
        number = todo.pop()
        if not children[number]:
            found[number] = float(leaves)
            leaves += 1
        todo += reversed(children[number])
    for number in reversed(range(len(parents))):
        if below := children[number]:
            found[number] = (found[below[0]] + found[below[-1]]) / 2
    return found


def interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Wilson's interval of the mean of values between 0 and 1: it is that of outcomes, which vary the most, so it is
    rather too wide. None if there is no value, or one is not between."""
    return wilson(sum(values), len(values)) if values and 0 <= min(values) <= max(values) <= 1 else (None, None)


def drawn(
    branches: Sequence[Branch],
    names: Sequence[str],
    success: Sequence[bool | None],
    reward: Sequence[float | None],
    text: Sequence[str],
) -> list[TreeBranch]:
    """Branches with what their members came to. ``text`` is that of each branch."""
    parents = [one.parent for one in branches]
    columns, places = columns_of_drawing(parents), rows_of_drawing(parents)
    found = []
    for number, one in enumerate(branches):
        outcomes = [value for member in one.members if (value := success[member]) is not None]
        rewards = [gained for member in one.members if (gained := reward[member]) is not None]
        low, high = interval(rewards)
        found.append(
            TreeBranch(
                parent=one.parent,
                start=one.start,
                end=one.end,
                rows=len(one.members),
                n=len(outcomes),
                success=fmean(outcomes) if outcomes else None,
                rewarded=len(rewards),
                reward=fmean(rewards) if rewards else None,
                low=low,
                high=high,
                text=text[number],
                ends=[names[member] for member in one.ends[:ENDS]],
                x=columns[number],
                y=places[number],
            )
        )
    return found
