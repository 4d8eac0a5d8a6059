"""Tree search over turns (LATS: Zhou et al. 2023; Agent Q: Putta et al. 2024; ReST-MCTS*: Zhang et al. 2024).

A node is a state of one task, before a turn of the policy; the root is the task's beginning. Expanding a node samples
whole continuations from it: the first turn of each makes a child (equal turns the same one), and how it ended is backed
up along the path. So the leaves of a tree are rows of the buffer, and what is kept besides is small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from typing import Literal

Select = Literal["uct", "agentq"]


@dataclass(eq=False)
class TreeNode:
    """A state before turn number ``turn`` of the trajectory ``row``, or if it is ``terminal``, after its last turn. The
    root has the row that was sampled first. ``born`` is the round in which it was found. ``total`` is the sum of what
    was backed up in ``visits``; ``own`` of these are continuations whose path in the tree ends here. ``judge`` is what
    a model says that the state is worth, if one was asked."""

    name: str
    row: str = ""
    turn: int = 0
    parent: "TreeNode | None" = None
    terminal: bool = False
    born: int = 0
    visits: int = 0
    own: int = 0
    total: float = 0.0
    judge: float | None = None
    children: "dict[str, TreeNode]" = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    @property
    def value(self) -> float:
        """The mean of what was backed up."""
        return self.total / self.visits if self.visits else 0.0

    def walk(self) -> "Iterator[TreeNode]":
        """The node and all below it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def mixed(own: float, judge: float | None, alpha: float) -> float:
    """``alpha`` of a value that the search found itself and 1 - alpha of what a judge says: Agent Q's Q, and LATS's
    value, in which alpha is the share of self-consistency. Without a word of the judge, the value itself."""
    return own if judge is None else alpha * own + (1 - alpha) * judge


def score(node: TreeNode, how: Select, c: float, alpha: float = 1.0) -> float:
    """What the search follows, of a child: its value and a bonus for what is seldom visited. ``uct`` (LATS) is
    W/N + c sqrt(ln N_parent / N); ``agentq`` is Q + c sqrt(ln N_parent / (1 + N)), in which Q is W/N, :func:`mixed`
    with what the judge says of the child."""
    assert node.parent is not None
    value = mixed(node.value, node.judge, alpha) if how == "agentq" else node.value
    return value + c * sqrt(log(node.parent.visits) / (node.visits + (how == "agentq")))


def select(root: TreeNode, how: Select, c: float, depth: int, alpha: float = 1.0) -> TreeNode | None:
    """The node to expand next: from the root on, the child with the best score, up to one that was not expanded. None
    if all that may be expanded was: ends, and nodes at ``depth``, are not. Ties go to the child that came first."""
    if not _open(root, depth):
        return None
    node = root
    while node.children:
        node = max(
            (child for child in node.children.values() if _open(child, depth)),
            key=lambda child: score(child, how, c, alpha),
        )
    return node


def _open(node: TreeNode, depth: int) -> bool:
    """Whether something below a node, or it, may be expanded."""
    if node.terminal or node.depth >= depth:
        return False
    return not node.children or any(_open(child, depth) for child in node.children.values())


def back_up(root: TreeNode, ends: Sequence[tuple[TreeNode, float]]) -> None:
    """Count what continuations were worth in the nodes along their paths. ``ends`` has for each continuation of a tree
    the last node of its path, and its value; what was counted before is forgotten."""
    for node in root.walk():
        node.visits, node.own, node.total = 0, 0, 0.0
    for last, value in ends:
        last.own += 1
        at: TreeNode | None = last
        while at is not None:
            at.visits += 1
            at.total += value
            at = at.parent


def agreement(answers: Sequence[str]) -> list[float]:
    """Self-consistency: of each of several ends of one task, the share of the others that say the same. It needs no
    verifier. One alone agrees with nobody."""
    others = max(1, len(answers) - 1)
    return [(answers.count(answer) - 1) / others for answer in answers]


def rest_value(before: float, right: bool, steps: int) -> float:
    """ReST-MCTS*'s value of a step: ``max(0, v + (1 - v) r / m)``, where ``v`` is that of the state before it, r is 1
    if the step leads to a right end and else -1, and m the fewest ``steps`` from that state to a right end."""
    return max(0.0, before + (1 - before) * (1 if right else -1) / steps)
