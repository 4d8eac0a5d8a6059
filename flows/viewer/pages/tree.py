"""Attempts as a tree of the tokens that they share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from agentrl.flows.viewer.pages.compare import common, newest_attempts
from agentrl.flows.viewer.query.artifacts import numbers
from agentrl.flows.viewer.wire import Answer, TaskQuery
from agentrl.statistics.intervals import wilson

if TYPE_CHECKING:
    from agentrl.flows.viewer.reader import StoreReader

ENDS = 20
TOKENS = 60
"""How much of a branch's text is shown."""


class TreeBranch(Answer):
    """Tokens that ``rows`` attempts share: [start, end) of each of them, after those of ``parent`` (the position of a
    branch in the list; None for a root). ``x`` is its column in the drawing and ``y`` its row, from 0, between those of
    its children. ``success`` is over the ``n`` rows with an outcome, ``reward`` the mean over the ``rewarded``, with
    its interval (None if a reward is not between 0 and 1). ``text`` begins the branch's text. ``ends`` are the rows
    that end with it, at most 20."""

    parent: int | None
    start: int
    end: int
    rows: int
    n: int
    success: float | None
    rewarded: int
    reward: float | None
    low: float | None
    high: float | None
    text: str
    ends: list[str]
    x: int
    y: float


class TaskTree(Answer):
    """The attempts at a task as a tree of shared tokens, parents before children. ``left_out`` attempts have no tokens,
    or those of another tokenizer than most, or are beyond the newest 1,024."""

    version: int
    rows: int
    left_out: int
    branches: list[TreeBranch]


def task_tree(reader: "StoreReader", question: TaskQuery) -> TaskTree:
    """The attempts at a task as a tree. Raises RefusedError if there is none."""
    snapshot = reader.tables.at(question.at)
    names, rows = newest_attempts(snapshot, question.env, question.task_id)
    table = reader.read(names, ("tokenizer", "policy", "input_ids", "success", "reward"), snapshot)
    kinds = Counter(kind for kind in table["tokenizer"].to_pylist() if kind)
    tokenizer = kinds.most_common(1)[0][0] if kinds else ""
    chosen = [
        number
        for number, kind in enumerate(table["tokenizer"].to_pylist())
        if kind == tokenizer and tokenizer and len(table["input_ids"][number])
    ]
    sequences = [numbers(table["input_ids"][number], np.int32) for number in chosen]
    branches = prefix_tree(sequences)
    texts = []
    for branch in branches:
        part = sequences[branch.members[0]][branch.start : min(branch.end, branch.start + TOKENS)]
        texts.append(reader.beginning(part, tokenizer, table["policy"][chosen[branch.members[0]]].as_py()))
    success, reward = (table[column].take(np.array(chosen, np.int64)).to_pylist() for column in ("success", "reward"))
    boxes = drawn(branches, [names[number] for number in chosen], success, reward, texts)
    return TaskTree(version=snapshot.version, rows=len(chosen), left_out=rows - len(chosen), branches=boxes)


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
    branches: list[Branch] = []
    todo: list[tuple[int | None, list[int], int]] = [(None, each, 0) for each in _by_token(sequences, 0)]
    while todo:
        parent, members, start = todo.pop(0)
        first = sequences[members[0]][start:]
        end = start + min((common(first, sequences[member][start:]) for member in members), default=0)
        index = len(branches)
        branches.append(
            Branch(parent, start, end, members, [member for member in members if len(sequences[member]) == end])
        )
        rest = [member for member in members if len(sequences[member]) > end]
        todo += [
            (index, [rest[member] for member in each], end)
            for each in _by_token([sequences[position] for position in rest], end)
        ]
    return branches


def _by_token(sequences: Sequence[np.ndarray], offset: int) -> list[list[int]]:
    """Positions of the sequences that go on, by their token at ``place``, in the order in which tokens come first."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        if len(sequence) > offset:
            groups.setdefault(int(sequence[offset]), []).append(number)
    return list(groups.values())


def columns_of_drawing(parents: Sequence[int | None]) -> list[int]:
    """How many branches are above each. Parents come before their children."""
    columns: list[int] = []
    for parent in parents:
        columns.append(0 if parent is None else columns[parent] + 1)
    return columns


def rows_of_drawing(parents: Sequence[int | None]) -> list[float]:
    """The row of each branch: leaves one below the other, others in the middle of their children. Parents come before
    their children."""
    children: list[list[int]] = [[] for _ in parents]
    for number, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(number)
    heights = [0.0] * len(parents)
    leaves = 0
    todo = [number for number, parent in reversed(list(enumerate(parents))) if parent is None]
    while todo:
        number = todo.pop()
        if not children[number]:
            heights[number] = float(leaves)
            leaves += 1
        todo += reversed(children[number])
    for number in reversed(range(len(parents))):
        if below := children[number]:
            heights[number] = (heights[below[0]] + heights[below[-1]]) / 2
    return heights


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
    parents = [branch.parent for branch in branches]
    columns, places = columns_of_drawing(parents), rows_of_drawing(parents)
    boxes = []
    for number, branch in enumerate(branches):
        outcomes = [value for member in branch.members if (value := success[member]) is not None]
        rewards = [gained for member in branch.members if (gained := reward[member]) is not None]
        low, high = interval(rewards)
        boxes.append(
            TreeBranch(
                parent=branch.parent,
                start=branch.start,
                end=branch.end,
                rows=len(branch.members),
                n=len(outcomes),
                success=fmean(outcomes) if outcomes else None,
                rewarded=len(rewards),
                reward=fmean(rewards) if rewards else None,
                low=low,
                high=high,
                text=text[number],
                ends=[names[member] for member in branch.ends[:ENDS]],
                x=columns[number],
                y=places[number],
            )
        )
    return boxes
