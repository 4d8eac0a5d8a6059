"""Search trees: the nodes that a stage such as ``search.tree`` wrote, laid out, with the path that was worth most."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl.datastore.errors import StoreError
from agentrl.flows.viewer.pages.tree import TOKENS, columns_of_drawing, rows_of_drawing
from agentrl.flows.viewer.query.artifacts import Artifacts, label, numbers
from agentrl.flows.viewer.refused import RefusedError
from agentrl.flows.viewer.wire.search import NodeBox, SearchedTask, SearchTrees
from agentrl.schemas.manifest import Kind, Manifest
from agentrl.schemas.node import NODE_SCHEMA
from agentrl.statistics.intervals import wilson

DRAWN = 2000
"""Nodes of a tree that are drawn."""

ROW = ("trajectory_id", "tokenizer", "policy", "input_ids", "env", "prompt")

Node = dict[str, Any]
"""A row of ``nodes``: see :class:`agentrl.schemas.node.SearchNode`."""


def searched(artifacts: Artifacts, artifact: str | None, offset: int, limit: int) -> SearchTrees:
    """The trees of an artifact. Raises RefusedError if it has none."""
    made = _with_nodes(artifacts)
    if artifact is None and not made:
        return SearchTrees(artifacts=[], artifact=None, total=0, tasks=[])
    shown = artifact or next(iter(made))
    nodes = _read(artifacts, made, shown)
    counted = nodes.group_by("task_id").aggregate([([], "count_all")])
    order = counted.sort_by([("count_all", "descending"), ("task_id", "ascending")])["task_id"]
    page = order.slice(offset, limit)
    of_page = nodes.filter(pc.is_in(nodes["task_id"], value_set=page.combine_chunks())).to_pylist()
    trees: dict[str, list[Node]] = {name: [] for name in page.to_pylist()}
    for node in of_page:
        trees[node["task_id"]].append(node)
    tree_tasks = [_task(name, each) for name, each in trees.items()]
    return SearchTrees(artifacts=list(made), artifact=shown, total=len(order), tasks=tree_tasks)


def _task(name: str, nodes: Sequence[Node]) -> SearchedTask:
    root = next((node for node in nodes if node["parent_node"] is None), nodes[0])
    rewards = [node["reward"] for node in nodes if node["terminal"] and node["reward"] is not None]
    low, high = _interval(root)
    return SearchedTask(
        task_id=name,
        nodes=len(nodes),
        depth=max(node["depth"] for node in nodes),
        visits=root["visits"],
        value=_value(root),
        low=low,
        high=high,
        ends=sum(node["terminal"] for node in nodes),
        best=max(rewards, default=None),
    )


def _with_nodes(artifacts: Artifacts) -> dict[str, Manifest]:
    """By their names, newest first."""
    outputs = ((manifest, manifest.outputs.get("nodes")) for manifest in artifacts.all())
    return {
        label(manifest): manifest for manifest, output in outputs if output is not None and output.kind is Kind.TABLE
    }


def _read(artifacts: Artifacts, made: dict[str, Manifest], artifact: str, task_id: str | None = None) -> pa.Table:
    if artifact not in made:
        reason = f"no artifact {artifact[:100]!r} holds the nodes of a search"
        raise RefusedError(reason, field="artifact", allowed=list(made), status=404)
    manifest = made[artifact]
    where = None if task_id is None else pc.field("task_id") == task_id
    try:
        path = artifacts.catalog.open(manifest, manifest.outputs["nodes"].path)
        return pq.read_table(path, columns=NODE_SCHEMA.names, filters=where)
    except (OSError, StoreError):
        raise RefusedError(f"{artifact} was freed since it was listed", field="artifact", status=404) from None
    except pa.ArrowInvalid as error:  # an own stage may call another table so
        reason = f"the nodes of {artifact} are none of a search: {str(error).splitlines()[0][:200]}"
        raise RefusedError(reason, field="artifact") from None


def nodes_of(artifacts: Artifacts, artifact: str, task_id: str) -> tuple[list[Node], int]:
    """The nodes of a tree, parents before children, and how many were left out. Raises RefusedError if there is no such
    tree."""
    nodes = _read(artifacts, _with_nodes(artifacts), artifact, task_id).to_pylist()
    if not nodes:
        reason = f"{artifact} has no tree of task {task_id[:100]!r}"
        raise RefusedError(reason, field="task_id", status=404)
    nodes.sort(key=lambda node: (-node["visits"], node["depth"]))  # a parent is visited as often as each child, or more
    return sorted(nodes[:DRAWN], key=lambda node: node["depth"]), len(nodes) - len(nodes[:DRAWN])


def drawn(nodes: Sequence[Node], texts: Sequence[str]) -> list[NodeBox]:
    """Nodes with their places; ``texts`` are what they say. Of siblings, those that were visited most come first."""
    places = {node["node_id"]: number for number, node in enumerate(nodes)}
    parents = [places.get(node["parent_node"]) for node in nodes]
    columns, rows, path = columns_of_drawing(parents), rows_of_drawing(parents), best_path(nodes, parents)
    boxes = []
    for number, node in enumerate(nodes):
        low, high = _interval(node)
        own = {name: node[name] for name in ("trajectory_id", "token_start", "token_end", "visits", "own")}
        own |= {name: node[name] for name in ("reward", "terminal", "born")}
        box = NodeBox(
            **own,
            parent=parents[number],
            text=texts[number],
            value=_value(node),
            low=low,
            high=high,
            best=number in path,
            x=columns[number],
            y=rows[number],
        )
        boxes.append(box)
    return boxes


def best_path(nodes: Sequence[Node], parents: Sequence[int | None]) -> set[int]:
    """Positions of the nodes on the way from the root along the child of the highest value, and of equals the one that
    was visited most."""
    below: dict[int | None, list[int]] = {}
    for number, parent in enumerate(parents):
        below.setdefault(parent, []).append(number)
    path: set[int] = set()
    at: int | None = None
    while children := below.get(at):
        worth = {number: (_value(nodes[number]) or 0.0, nodes[number]["visits"], -number) for number in children}
        at = max(children, key=lambda number: worth[number])
        path.add(at)
    return path


def _value(node: Node) -> float | None:
    return node["total"] / node["visits"] if node["visits"] else None


def _interval(node: Node) -> tuple[float, float] | tuple[None, None]:
    """Wilson's, if the sum may be one of rewards between 0 and 1."""
    total, visits = node["total"], node["visits"]
    return wilson(total, visits) if visits and 0 <= total <= visits else (None, None)


def beginnings(rows: pa.Table, nodes: Sequence[Node]) -> Iterator[tuple[np.ndarray, str, str]]:
    """The first tokens of each node's turn, their tokenizer, and the policy that sampled them. ``rows`` are the
    trajectories of the nodes, with the columns :data:`ROW`."""
    row_numbers = {name: number for number, name in enumerate(rows["trajectory_id"].to_pylist())}
    ids = [numbers(ids_of_row, np.int32) for ids_of_row in rows["input_ids"]]
    makers = list(zip(rows["tokenizer"].to_pylist(), rows["policy"].to_pylist(), strict=True))
    for node in nodes:
        row, start = row_numbers[node["trajectory_id"]], node["token_start"]
        yield ids[row][start : min(node["token_end"], start + TOKENS)], *makers[row]
