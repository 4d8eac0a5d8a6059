"""What stages of a file are to each other: which comes first, which make the same, and what measures a policy."""

import graphlib
import heapq
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.pipelines.file.load import Edge, Node


def in_order(nodes: "Mapping[str, Node]") -> "dict[str, Node]":
    """Upstream first, otherwise in the order of the file. Raises graphlib.CycleError."""
    sorter = graphlib.TopologicalSorter({name: node.upstream for name, node in nodes.items()})
    sorter.prepare()
    names = list(nodes)
    number_of_name = {name: number for number, name in enumerate(names)}
    ordered: dict[str, Node] = {}
    ready: list[int] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, number_of_name[name])
        name = names[heapq.heappop(ready)]
        ordered[name] = nodes[name]
        sorter.done(name)
    return ordered


def twins(nodes: "Mapping[str, Node]") -> Iterator[tuple[str, str, str]]:
    """(stage, input, what is wrong) where a stage reads the same of two stages that differ by their names alone.
    ``nodes`` are in order."""
    made: dict[str, int] = {}  # stages that make the same have the same number
    numbers: dict[Hashable, int] = {}

    def content(edge: "Edge") -> Hashable:
        return made.get(edge.stage, edge.stage), edge.output

    for name, node in nodes.items():
        inputs = tuple((field, tuple(map(content, edges))) for field, edges in node.inputs.items())
        key = node.stage.name, node.config.model_dump_json(), node.seed, inputs
        made[name] = numbers.setdefault(key, len(numbers))
        for field, edges in node.inputs.items():
            first: dict[Hashable, Edge] = {}
            for edge in edges:
                same = first.setdefault(content(edge), edge)
                if same.stage != edge.stage:
                    yield name, field, _same(same, edge, nodes[edge.stage].seed)


def _same(first: "Edge", second: "Edge", seed: int) -> str:
    return (
        f"{second} is the same as {first}, since {second.stage} and {first.stage} differ by their names alone: give "
        f"{second.stage} a seed of its own, such as seed: {seed + 1}, or leave it out"
    )


def unverified(node: "Node", nodes: "Mapping[str, Node]") -> str:
    """What is wrong if the whole reward of a stage says only what the policy believes, and no evaluation follows it: a
    policy may learn from a reward that nothing verifies only if the same file measures it by one that does."""
    whole = [
        f"{reward.component} with alone: true" for reward in getattr(node.config, "rewards", ()) if reward.is_whole
    ]
    if node.stage.name == "scores.from_verdicts":
        whole.append("what verdicts of a policy say of its own rollouts")
    if not whole or any(nodes[name].stage.name == "evaluate.policy" for name in _after(node.name, nodes)):
        return ""
    return (
        f"{whole[0]} rises whether the policy gets better or only surer, and no evaluate.policy follows "
        "this stage; add one of the policy that learns from it, with tasks that are verified: inputs: "
        "{model: ..., tasks: tasks.heldout, dev: tasks.dev}"
    )


def _after(name: str, nodes: "Mapping[str, Node]") -> set[str]:
    """The stages that read from a stage, directly or not."""
    reached: set[str] = set()
    todo = {name}
    while todo:
        todo = {other for other, node in nodes.items() if other not in reached and todo.intersection(node.upstream)}
        reached |= todo
    return reached
