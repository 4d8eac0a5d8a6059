"""Search trees, laid out: their nodes by value and visits, and the path that was worth most."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_store import Browser, make_store, publish, row

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.flows.viewer.pages import nodes
from agentrl.pipelines.handles import SELECTION_SCHEMA
from agentrl.schemas.arrow import to_table
from agentrl.schemas.manifest import Kind
from agentrl.schemas.node import NODE_SCHEMA, SearchNode

SEARCH, OLDER = "6" * 32, "7" * 32
TASK = "sums-0"


def node(name: str, parent: str | None, depth: int, visits: int, total: float, **fields: Any) -> SearchNode:
    """A node of task ``sums-0``, whose turn is the second message of row ``fields["row"]``."""
    number = fields.pop("row", 0)
    message = row(number).messages[1]
    values: dict[str, Any] = {"trajectory_id": f"grpo-aaaaaaaa-{number:06d}", "own": 0, "terminal": False, "born": 0}
    values |= {"token_start": message.token_start, "token_end": message.token_end, "reward": None, "task_id": TASK}
    return SearchNode(node_id=name, parent_node=parent, depth=depth, visits=visits, total=total, **{**values, **fields})


TREE = [
    node("root", None, 0, 6, 3.0),
    node("often", "root", 1, 4, 1.0, row=1, own=2),
    node("good", "root", 1, 2, 2.0, row=2),
    node("end", "good", 2, 1, 1.0, row=3, own=1, terminal=True, reward=1.0, born=1),
    node("beyond", "often", 2, 2, 5.0, row=1),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("viewer") / "store"
    make_store(folder)
    other = [node.model_copy(update={"task_id": "sums-1"}) for node in TREE[:1]]
    table = to_table([*TREE, *other], NODE_SCHEMA)
    publish(Catalog(folder), "search", SEARCH, "search.tree", {"nodes": (Kind.TABLE, table)}, minutes=8)
    wrong = pa.table({"node": [1]})
    publish(Catalog(folder), "own", OLDER, "own.nodes", {"nodes": (Kind.TABLE, wrong)}, minutes=7)
    return folder


def test_trees_are_listed_by_task(browser: Browser) -> None:
    answer = browser.json("/api/search-trees")
    assert (answer["artifact"], answer["artifacts"], answer["total"]) == (
        "search/66666666",
        ["search/66666666", "own/77777777"],
        2,
    )
    first, second = answer["tasks"]
    assert (first["task_id"], first["nodes"], first["depth"], first["visits"]) == (TASK, 5, 2, 6)
    assert (first["value"], first["ends"], first["best"]) == (0.5, 1, 1.0)
    assert 0.15 < first["low"] < 0.5 < first["high"] < 0.85
    assert (second["task_id"], second["nodes"], second["best"]) == ("sums-1", 1, None)
    assert [task["task_id"] for task in browser.json("/api/search-trees", offset=1, limit=5)["tasks"]] == ["sums-1"]


def test_a_tree_is_laid_out_with_its_best_path(browser: Browser) -> None:
    answer = browser.json("/api/search-tree", artifact="search/66666666", task_id=TASK)
    assert (answer["left_out"], answer["problem"], answer["env"]) == (0, "", "sums")
    assert answer["prompt"] == "What is 0 + 1? 🙂"
    by_text = {(node["x"], node["visits"]): node for node in answer["nodes"]}
    root, often, good, end = by_text[0, 6], by_text[1, 4], by_text[1, 2], by_text[2, 1]
    assert root["parent"] is None
    assert [answer["nodes"][node["parent"]] for node in (often, good)] == [root, root]
    assert [item["y"] for item in (root, often, good)] == [0.5, 0.0, 1.0]
    assert [item["best"] for item in (root, good, end, often)] == [True, True, True, False]
    assert (often["value"], often["own"], often["text"]) == (0.25, 2, "<call>1</call><|im_end|>")
    assert (end["terminal"], end["reward"], end["born"]) == (True, 1.0, 1)
    assert by_text[2, 2]["value"] == 2.5
    assert (by_text[2, 2]["low"], by_text[2, 2]["high"]) == (None, None), "these rewards are no shares"


def test_nodes_whose_rows_are_not_in_this_version_have_no_text(browser: Browser) -> None:
    answer = browser.json("/api/search-tree", artifact="search/66666666", task_id=TASK, at=0)
    assert "are not in version 0" in answer["problem"]
    assert {node["text"] for node in answer["nodes"]} == {""}


def test_of_a_large_tree_the_nodes_that_were_visited_most_are_drawn(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "DRAWN", 3)
    answer = browser.json("/api/search-tree", artifact="search/66666666", task_id=TASK)
    assert answer["left_out"] == 2
    assert sorted(node["visits"] for node in answer["nodes"]) == [2, 4, 6]


@pytest.mark.parametrize(
    ("path", "query", "status", "field"),
    [
        ("/api/search-trees", {"artifact": "grpo/aaaaaaaa"}, 404, "artifact"),
        ("/api/search-trees", {"artifact": "own/77777777"}, 400, "artifact"),
        ("/api/search-tree", {"artifact": "../../etc", "task_id": TASK}, 404, "artifact"),
        ("/api/search-tree", {"artifact": "search/66666666", "task_id": "none"}, 404, "task_id"),
        ("/api/search-tree", {"artifact": "search/66666666"}, 400, "task_id"),
    ],
)
def test_what_is_no_tree_is_said(browser: Browser, path: str, query: dict[str, str], status: int, field: str) -> None:
    assert browser.json(path, status, **query)["field"] == field


def test_a_store_without_a_search(tmp_path: Path) -> None:
    empty: dict[str, Any] = {"artifacts": [], "artifact": None, "total": 0, "tasks": []}
    assert Browser(tmp_path).json("/api/search-trees") == empty


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), min_size=1, max_size=30))
def test_the_best_path_is_one_way_from_the_root_to_a_leaf(made: list[tuple[int, float]]) -> None:
    parents: list[int | None] = [None] + [min(above, number) for number, (above, _) in enumerate(made[1:])]
    table = [{"total": value, "visits": 1} for _, value in made]
    path = sorted(nodes.best_path(table, parents))
    assert path[0] == 0
    assert [parents[node] for node in path[1:]] == path[:-1]
    assert path[-1] not in parents
    for node in path[1:]:
        beside = [number for number, parent in enumerate(parents) if parent == parents[node]]
        assert table[node]["total"] == max(table[other]["total"] for other in beside)


def test_what_a_policy_learned_from_is_named(tmp_path: Path) -> None:
    make_store(tmp_path, rows=2)
    catalog, learned = Catalog(tmp_path), "a1" * 16
    ids = pa.Table.from_pylist([{"trajectory_id": "grpo-aaaaaaaa-000000", "weight": 1.0}], schema=SELECTION_SCHEMA)
    publish(catalog, "chosen", "b1" * 16, "trajectories.select", {"trajectories": (Kind.TRAJECTORIES, ids)})
    publish(
        catalog,
        "pairs",
        "c1" * 16,
        "pairs.agentq",
        {"pairs": (Kind.PAIRS, pa.table({name: ["p"] for name in ("pair_id", "chosen_id", "rejected_id")}))},
    )
    read = {"rows": [("chosen", "trajectories", "b1" * 16)], "pairs": [("pairs", "pairs", "c1" * 16)]}
    publish(catalog, "dpo", learned, "train.dpo", {"model": (Kind.MODEL, Path.mkdir)}, read)
    entry = row(50, trajectory_id="after", policy=f"dpo/{learned[:8]}")
    TrajectoryBuffer(tmp_path).append([entry], stage="after", fingerprint="d1" * 16)
    policy = Browser(tmp_path).json("/api/rows/after")["lineage"]["policy"]
    assert policy["learned_from"] == [
        {"artifact": "chosen/b1b1b1b1", "kind": "rows"},
        {"artifact": "pairs/c1c1c1c1", "kind": "pairs"},
    ]
