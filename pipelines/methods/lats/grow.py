"""Trees of turns that a policy grows: what ``search.tree`` writes as tables, and ``evaluate.policy`` picks from."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from agentrl.advantages.turns import acting
from agentrl.pipelines.methods.lats.judging import NOTES, Reflector, StateJudge
from agentrl.pipelines.methods.lats.tree import TreeNode, agreement, back_up, mixed, select
from agentrl.pipelines.methods.lats.valuing import Valuing
from agentrl.pipelines.methods.reflexion.notes import said_by
from agentrl.pipelines.parts.common import count, secrets_of
from agentrl.pipelines.parts.continuing import Continuations
from agentrl.pipelines.parts.in_context import NOTE, notes_as_text
from agentrl.pipelines.stage import Context, StageConfig, reveal
from agentrl.rollouts.rationalize import literal
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Termination, Trajectory

if TYPE_CHECKING:
    from agentrl.rollouts.continuations import ForkPoint
    from agentrl.rollouts.runner import RolloutRunner

BY = "search"
"""How the values of this stage are found."""


ALPHA = 0.5
"""Agent Q's share of what a search finds itself."""


class TreeSearchConfig(StageConfig):
    """How a tree grows, and what guides it."""

    select: Literal["uct", "agentq"] = Field("uct", description="what is followed: LATS's bound, or Agent Q's")
    c: float = Field(sqrt(2), ge=0, description="weight of what was seldom visited")
    branch: int = Field(5, ge=1, description="continuations of a node that is expanded")
    depth: int = Field(7, ge=1, description="turns from the beginning from which on nothing is expanded")
    rounds: int = Field(30, ge=1, description="expansions of each tree, the beginning's included")
    budget_tokens: int | None = Field(
        None, ge=1, description="sampled tokens of a task from which on its tree does not grow; null: no such limit"
    )
    oracle: bool = Field(
        False,
        description="the search is guided by the true reward, and ends with the first success; otherwise it is guided "
        "by how many continuations come to the same end, and rewards are read when it is over",
    )
    judge: Annotated[Literal["reward_model"] | StateJudge | None, ADDED] = Field(
        None,
        description="who says what the states of the tree are worth: models, as in {engines: [{type: openai, ...}]}, "
        "or reward_model, the input of that name",
    )
    alpha: Annotated[float, ADDED] = Field(
        ALPHA, ge=0, le=1, description="share of what the search finds itself in a value; the rest is the judge's"
    )
    simulate: Annotated[int | None, ADDED] = Field(
        None, ge=1, description="turns of a continuation, which is cut there and judged; null: to its end"
    )
    reflect: Annotated[Literal["env"] | Reflector | None, ADDED] = Field(
        None,
        description=f"who notes why attempts failed: the environment, or models. New attempts see up to {NOTES} notes",
    )

    @model_validator(mode="after")
    def _is_guided(self) -> "TreeSearchConfig":
        if self.judge is None and (self.simulate is not None or self.alpha != ALPHA):
            name = "simulate" if self.simulate is not None else "alpha"
            raise ValueError(f"{name} needs a judge: {_NEEDS[name]}; set judge: {{engines: [...]}}, or leave it out")
        if self.reflect == "env" and not self.oracle:
            raise ValueError(
                "reflect: env tells the search what the verifier knows; set oracle: true, or let a model reflect: "
                "reflect: {engines: [...]}"
            )
        if self.reflect is not None and not self.oracle and self.judge is None:
            raise ValueError(
                "reflect needs to know which attempts failed: set judge: {engines: [...]}, or oracle: true, if the "
                "search may look at rewards"
            )
        return self


_NEEDS = {
    "simulate": "a continuation that is cut has no end, and only a model can say what it is worth",
    "alpha": "it is the share of what the search finds itself, and the rest is the judge's",
}


@dataclass
class GrownTree:
    """The tree of one task. ``ends`` names for each of its rows the last node on its path. ``judged`` has what the
    judge says of the ends of rows. ``notes`` are about failed rows; ``shown`` are those that an attempt has seen, and
    ``hints`` has what rows were shown, as a template."""

    task: Task
    config: TreeSearchConfig
    root: TreeNode = field(default_factory=lambda: TreeNode("root"))
    rows: dict[str, Trajectory] = field(default_factory=dict)
    ends: dict[str, TreeNode] = field(default_factory=dict)
    judged: dict[str, float | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    hints: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    """Rows that came since the tree was guided last."""

    def next(self) -> TreeNode | None:
        """The node to expand; None if the tree does not grow any more. With notes that no attempt has seen, it is the
        beginning."""
        spent = sum(row.n_action_tokens for row in self.rows.values())
        if self.config.budget_tokens is not None and spent >= self.config.budget_tokens:
            return None
        if self.config.oracle and any(row.success for row in self.rows.values()):
            return None
        if not self.root.children or self.notes != self.shown:
            return self.root if self.root.children else None
        config = self.config
        return select(self.root, config.select, config.c, config.depth, config.alpha)

    def point(self, node: TreeNode) -> "ForkPoint":
        from agentrl.rollouts.continuations import node as state

        return state(self.rows[node.row], node.turn, self.task, self.hints.get(node.row, ""))

    def grow(self, node: TreeNode, rows: Sequence[Trajectory], born: int, hint: str = "") -> None:
        """Add the continuations of a node. What has no turn, or ended because a server did, says nothing."""
        from agentrl.rollouts.continuations import node_name

        for row in rows:
            turns, cut = acting(row.messages), row.termination is Termination.CANCELLED
            if len(turns) <= node.turn or (row.reward is None and not cut):
                continue
            if not self.rows:
                self.root.row = row.trajectory_id
                self.root.name = node_name(self.task.task_id, row.input_ids[: turns[0].token_start])
            over = len(turns) == node.turn + 1
            end = row.n_tokens if over else turns[node.turn + 1].token_start
            name = node_name(self.task.task_id, row.input_ids[:end])
            child = node.children.get(name)
            if child is None:
                child = TreeNode(name, row.trajectory_id, node.turn + 1, node, over and not cut, born)
                node.children[name] = child
            self.rows[row.trajectory_id] = row
            self.ends[row.trajectory_id] = child
            self.new.append(row.trajectory_id)
            if hint:
                self.hints[row.trajectory_id] = hint

    def guide(self) -> None:
        """Count what continuations seem worth: the reward if the search may look at it, else how many end alike, or of
        one that was cut what the judge says; for ``uct``, mixed with what the judge says of the node."""
        whole = [name for name, row in self.rows.items() if row.termination is not Termination.CANCELLED]
        if self.config.oracle:
            own = {name: self.rows[name].scored_reward() for name in whole}
        else:
            own = dict(zip(whole, agreement([_said(self.rows[name]) for name in whole]), strict=True))
        ends = []
        for name, end in self.ends.items():
            value = own[name] if name in own else self.judged.get(name) or 0.0
            ends.append((end, mixed(value, end.judge, self.config.alpha) if self.config.select == "uct" else value))
        back_up(self.root, ends)

    def settle(self) -> None:
        """Count rewards, of what has one."""
        scored = [(end, self.rows[name]) for name, end in self.ends.items() if self.rows[name].reward is not None]
        back_up(self.root, [(end, row.scored_reward()) for end, row in scored])


def _said(row: Trajectory) -> str:
    """How a row ended: what was heard last, and the answer."""
    answers = [message.content for message in row.messages if message.role is Role.TOOL]
    return f"{row.termination}\0{answers[-1] if answers else ''}\0{row.messages[-1].content}"


def grow(
    context: Context,
    config: TreeSearchConfig,
    runner: "RolloutRunner",
    tasks: Sequence[Task],
    first: int = 0,
    shard: int = 0,
    valuing: Valuing | None = None,
) -> list[GrownTree]:
    """The trees of tasks, whose rewards are counted at the end; what they cost is in the metrics. Rows are numbered
    from ``first`` on, and shards from ``shard`` on. ``valuing`` is the judge that is a reward model.

    Raises ValueError that names an environment whose episodes cannot be made again.
    """
    from agentrl.rollouts.continuations import check_replayable

    places = runner.environments(tasks)
    check_replayable(places)
    silent = [name for name, family in places.items() if not hasattr(family, "reflect")]
    if config.reflect == "env" and silent:
        raise ValueError(
            f"reflect: env, but environment {silent[0]!r} has no reflect(row, task); give the class that method, or "
            "let a model reflect: reflect: {engines: [...]}"
        )
    for secret in secrets_of([config.judge, config.reflect]):
        reveal(secret)
    sampled = Continuations(context, runner, config.branch, BY, config.simulate, first, shard)
    trees = [GrownTree(task, config) for task in tasks]
    guide = _Guide(config, runner, valuing)
    try:
        for tree, rows in zip(trees, sampled.whole(tasks), strict=True):
            tree.grow(tree.root, rows, 0)
        guide.after(trees)
        for number in range(1, config.rounds):
            growing = [(tree, node) for tree in trees if (node := tree.next())]
            if not growing:
                break
            _round(sampled, growing, number)
            guide.after([tree for tree, _ in growing])
            context.progress(number + 1, config.rounds, growing=len(growing))
    finally:
        guide.close()
    sampled.finish()
    count(context, guide.counts)
    for tree in trees:
        tree.settle()
    return trees


def _round(sampled: Continuations, growing: Sequence[tuple[GrownTree, TreeNode]], number: int) -> None:
    """Expand a node of each tree. The beginning is tried again with notes."""
    again = [tree for tree, node in growing if node is tree.root]
    further = [(tree, node) for tree, node in growing if node is not tree.root]
    hints = [literal(notes_as_text(tree.notes)) for tree in again]
    tags = [[f"{NOTE}{tree.task.task_id}-{index}" for index in range(len(tree.notes))] for tree in again]
    for tree, hint, rows in zip(again, hints, sampled.whole([o.task for o in again], hints, tags), strict=True):
        tree.shown = tree.notes
        tree.grow(tree.root, rows, number, hint)
    points = [tree.point(node) for tree, node in further]
    rows_of_point = sampled.of(points)
    for (tree, node), point in zip(further, points, strict=True):
        tree.grow(node, rows_of_point[point.name], number, point.hint)


class _Guide:
    """Asks judges and reflecting models after each round, and lets trees count what continuations seem worth."""

    def __init__(self, config: TreeSearchConfig, runner: "RolloutRunner", valuing: Valuing | None) -> None:
        self.config, self.runner = config, runner
        self.judge = config.judge if isinstance(config.judge, StateJudge) else valuing
        self.counts: dict[str, int] = {}

    def after(self, trees: Sequence[GrownTree]) -> None:
        if self.judge is not None or self.config.reflect is not None:
            self.runner.wait(self._after(trees))
        for tree in trees:
            tree.guide()
            tree.new = []

    async def _after(self, trees: Sequence[GrownTree]) -> None:
        if judge := self.judge:
            await asyncio.gather(*(self._node(judge, tree, node) for tree in trees for node in _born(tree)))
            await asyncio.gather(*(self._end(judge, tree, name) for tree in trees for name in self._ends(tree)))
        if self.config.reflect is not None:
            await asyncio.gather(*map(self._reflected, trees))

    def _ends(self, tree: GrownTree) -> list[str]:
        """The rows whose ends are judged: those that were cut, and all if failures are learned from."""
        every = self.config.reflect is not None and not self.config.oracle
        return [name for name in tree.new if every or tree.rows[name].termination is Termination.CANCELLED]

    async def _node(self, judge: StateJudge | Valuing, tree: GrownTree, node: TreeNode) -> None:
        row = tree.rows[node.row]
        turns = acting(row.messages)
        ended = len(turns) <= node.turn
        number = (
            len(row.messages)
            if ended
            else next(n for n, message in enumerate(row.messages) if message is turns[node.turn])
        )
        node.judge = self._counted(await judge.estimate(row, number, tree.task))

    async def _end(self, judge: StateJudge | Valuing, tree: GrownTree, name: str) -> None:
        row = tree.rows[name]
        tree.judged[name] = self._counted(await judge.estimate(row, len(row.messages), tree.task))

    def _counted(self, value: float | None) -> float | None:
        for name in ("judged", *(["unjudged"] if value is None else [])):
            self.counts[name] = self.counts.get(name, 0) + 1
        return value

    async def _reflected(self, tree: GrownTree) -> None:
        """Take notes of failed attempts of a round."""
        for name in tree.new:
            if len(tree.notes) >= NOTES:
                return
            row = tree.rows[name]
            if not self._has_failed(tree, name):
                continue
            if isinstance(self.config.reflect, Reflector):
                note = await self.config.reflect.note(row, tree.task)
            else:
                note = said_by(self.runner.environments([tree.task])[tree.task.env], row, tree.task)
            if note and note not in tree.notes:
                tree.notes += (note,)
                self.counts["notes"] = self.counts.get("notes", 0) + 1

    def _has_failed(self, tree: GrownTree, name: str) -> bool:
        if tree.rows[name].termination is Termination.CANCELLED:
            return False
        if self.config.oracle:
            return tree.rows[name].success is False
        value = tree.judged.get(name)
        return value is not None and self.judge is not None and value < self.judge.fails

    def close(self) -> None:
        for judge in (self.judge, self.config.reflect):
            if isinstance(judge, StateJudge | Valuing | Reflector):
                self.runner.wait(judge.close())


def _born(tree: GrownTree) -> list[TreeNode]:
    """The nodes below the root that nobody has judged, of rows that are new."""
    new = set(tree.new)
    return [node for node in tree.root.walk() if node.parent is not None and node.row in new and node.judge is None]
