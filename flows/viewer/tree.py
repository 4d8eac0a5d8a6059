"""Attempts as a tree of the tokens that they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from flows.viewer.compare import common
from flows.viewer.wire_compare import TreeBranch

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
    children: list[int] = field(default_factory=list)


def prefix_tree(sequences: Sequence[np.ndarray]) -> list[Branch]:
    """The tree of sequences, parents before children. Each branch is as long as its members agree; without a token that
    all begin with, there are several roots."""
    found: list[Branch] = []
    todo: list[tuple[int | None, list[int], int]] = [(None, each, 0) for each in _by_token(sequences, 0)]
    while todo:
        parent, members, start = todo.pop(0)
        first = sequences[members[0]][start:]
        end = start + min((common(first, sequences[one][start:]) for one in members), default=0)
        branch = Branch(parent, start, end, members, [one for one in members if len(sequences[one]) == end])
        if parent is not None:
            found[parent].children.append(len(found))
        place = len(found)
        found.append(branch)
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


def rows_of_drawing(branches: Sequence[Branch]) -> list[float]:
    """The row of each branch: leaves one below the other, others in the middle of their children."""
    found = [0.0] * len(branches)
    leaves = 0
    todo = [number for number, one in reversed(list(enumerate(branches))) if one.parent is None]
    order = []
    while todo:
        number = todo.pop()
        order.append(number)
        if not branches[number].children:
            found[number] = float(leaves)
            leaves += 1
        todo += reversed(branches[number].children)
    for number in reversed(order):
        if children := branches[number].children:
            found[number] = (found[children[0]] + found[children[-1]]) / 2
    return found


def drawn(
    branches: Sequence[Branch],
    names: Sequence[str],
    success: Sequence[bool | None],
    reward: Sequence[float | None],
    text: Sequence[str],
) -> list[TreeBranch]:
    """Branches with what their members came to. ``text`` is that of each branch."""
    places = rows_of_drawing(branches)
    found = []
    for number, one in enumerate(branches):
        outcomes = [value for member in one.members if (value := success[member]) is not None]
        rewards = [gained for member in one.members if (gained := reward[member]) is not None]
        found.append(
            TreeBranch(
                parent=one.parent,
                start=one.start,
                end=one.end,
                rows=len(one.members),
                n=len(outcomes),
                success=fmean(outcomes) if outcomes else None,
                reward=fmean(rewards) if rewards else None,
                text=text[number],
                ends=[names[member] for member in one.ends[:ENDS]],
                y=places[number],
            )
        )
    return found
