"""A policy may learn from a reward that nothing verifies only if the same file measures it by one that does."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.pipelines.file.load import Node


def unverified(node: "Node", nodes: "Mapping[str, Node]") -> str:
    """What is wrong if the whole reward of a stage says only what the policy believes, and no evaluation follows it."""
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
