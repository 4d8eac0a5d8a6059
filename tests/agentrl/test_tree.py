"""Tree search by hand: which child is followed, and what is backed up."""

from math import log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.pipelines.methods.lats.tree import TreeNode, agreement, back_up, mixed, rest_value, score, select


def tree(*children: tuple[int, float]) -> tuple[TreeNode, list[TreeNode]]:
    """A root, and children with these visits and wins."""
    root = TreeNode("root")
    made = []
    for number, _ in enumerate(children):
        made.append(TreeNode(f"c{number}", "r", 1, root))
        root.children[f"c{number}"] = made[-1]
    ends = []
    for child, (visits, wins) in zip(made, children, strict=True):
        ends += [(child, wins / visits)] * visits
    back_up(root, ends)
    return root, made


def test_the_bounds_by_hand() -> None:
    """Four visits: a has 3 of them and 2 wins, b has one and none. LATS follows a at c = 1, and b at c = sqrt(2)."""
    root, (a, b) = tree((3, 2.0), (1, 0.0))
    assert (score(a, "uct", 1.0), score(b, "uct", 1.0)) == pytest.approx((1.346, 1.177), abs=1e-3)
    assert (score(a, "uct", sqrt(2)), score(b, "uct", sqrt(2))) == pytest.approx((1.628, 1.665), abs=1e-3)
    assert select(root, "uct", 1.0, 9) is a
    assert select(root, "uct", sqrt(2), 9) is b
    assert score(b, "agentq", 1.0) == pytest.approx(sqrt(log(4) / 2))


def test_a_judge_has_its_share_of_a_value_by_hand() -> None:
    """Agent Q: 2/3 from the search and 0 from the critic are 1/3, and 0 and 1 are 1/2. LATS: half of what the model
    says and half of self-consistency."""
    root, (a, b) = tree((3, 2.0), (1, 0.0))
    a.judge, b.judge = 0.0, 1.0
    bonus = sqrt(log(4) / 4), sqrt(log(4) / 2)
    assert score(a, "agentq", 1.0, 0.5) == pytest.approx(1 / 3 + bonus[0])
    assert score(b, "agentq", 1.0, 0.5) == pytest.approx(1 / 2 + bonus[1])
    assert select(root, "agentq", 0.0, 9, 0.5) is b
    assert select(root, "agentq", 0.0, 9, 1.0) is a, "the critic has no share"
    assert score(a, "uct", 1.0, 0.5) == score(a, "uct", 1.0), "LATS mixes what is backed up"
    assert (mixed(0.5, 1.0, 0.5), mixed(0.5, None, 0.5)) == (0.75, 0.5)


def test_ends_and_depth_are_not_expanded() -> None:
    root, (a, b) = tree((3, 3.0), (1, 0.0))
    a.terminal = True
    assert select(root, "uct", 1.0, 9) is b
    b.terminal = True
    assert select(root, "uct", 1.0, 9) is None
    other, _ = tree((1, 1.0))
    assert select(other, "uct", 1.0, 1) is None
    assert select(TreeNode("alone"), "uct", 1.0, 1) is not None


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40))
def test_visits_are_own_and_those_of_the_children(ends: list[tuple[int, bool]]) -> None:
    """A tree of seven nodes: each but the root hangs below the one of half its number."""
    nodes = [TreeNode("0")]
    for number in range(1, 7):
        parent = nodes[(number - 1) // 2]
        nodes.append(TreeNode(str(number), "r", parent.turn + 1, parent))
        parent.children[str(number)] = nodes[-1]
    for _ in range(2):  # what was counted before is forgotten
        back_up(nodes[0], [(nodes[position], float(won)) for position, won in ends])
    for node in nodes:
        assert node.visits == node.own + sum(child.visits for child in node.children.values())
    assert (nodes[0].visits, nodes[0].total) == (len(ends), sum(won for _, won in ends))


def test_agreement_and_rest_values_by_hand() -> None:
    assert agreement(["a", "a", "b"]) == [0.5, 0.5, 0.0]
    assert agreement(["a"]) == [0.0]
    first = rest_value(0.0, True, 2)
    assert (first, rest_value(first, True, 1)) == (0.5, 1.0), "a right chain of two steps"
    assert rest_value(0.25, False, 1) == 0.0
