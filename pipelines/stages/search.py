"""The stage that searches: trees of turns, whose leaves are rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from agentrl.advantages.turns import acting, turn_spans
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.rewards import Rewards
from agentrl.rollouts.limits import Limits
from agentrl.search.tree import TreeNode, agreement, back_up, rest_value, select
from agentrl.statistics.intervals import wilson
from pipelines.handles import Model, Steps, Table, Tasks, Trajectories
from pipelines.stage import Context, StageConfig, stage
from pipelines.stages.budget import SamplingConfig, check_room
from pipelines.stages.common import REWARDS, load_policy, rollout_runner, warn_of_splits
from pipelines.stages.continuing import Continuations
from schemas.arrow import to_table
from schemas.node import NODE_SCHEMA, SearchNode
from schemas.step import StepValue
from schemas.task import Task
from schemas.trajectory import Role, Trajectory

if TYPE_CHECKING:
    from agentrl.rollouts.continuations import ForkPoint

BY = "search"
"""How the values of this stage are found."""


class TreeConfig(StageConfig):
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
    value: Literal["shepherd", "rest"] = Field(
        "shepherd", description="what steps are worth: the mean reward behind them, or ReST-MCTS*'s weighted value"
    )
    sampling: SamplingConfig = SamplingConfig()
    rewards: Rewards = Field([], description=REWARDS)
    engine: TokenEngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()


class Searched(NamedTuple):
    trajectories: Trajectories
    nodes: Table
    steps: Steps


@stage("search.tree", version=1)
def tree(context: Context, config: TreeConfig, tasks: Tasks, model: Model) -> Searched:
    """Monte-Carlo tree search over the turns of a policy, a tree for each task (LATS, Agent Q). The rows are trainable
    as they are; ``nodes`` says how they hang together, and ``steps`` what the turns in the trees are worth.

    Raises ValueError that names an environment whose episodes cannot be made again.
    """
    from agentrl.rollouts.continuations import check_replayable

    policy, known = load_policy(model, config.engine), tasks.read()
    splits = {task.split: sum(one.split == task.split for one in known) for task in known}
    warn_of_splits(splits, "tasks")
    sampling = config.sampling.of(policy)
    with rollout_runner(context, policy, known, sampling, config.engine, config.limits, config.rewards) as runner:
        check_replayable(runner.environments(known))
        check_room(policy, runner, known)
        sampled = Continuations(context, runner, config.branch, BY)
        trees = [_Tree(task, config) for task in known]
        for one, rows in zip(trees, sampled.whole(known), strict=True):
            one.grow(one.root, rows, 0)
        for number in range(1, config.rounds):
            growing = [(one, node) for one in trees if (node := one.next())]
            if not growing:
                break
            points = [one.point(node) for one, node in growing]
            found = sampled.of(points)
            for (one, node), point in zip(growing, points, strict=True):
                one.grow(node, found[point.name], number)
            context.progress(number + 1, config.rounds, growing=len(growing))
    sampled.finish()
    for one in trees:
        one.settle()
    nodes = [row for one in trees for row in one.nodes()]
    context.metrics.update(
        tasks=len(known),
        solved_tasks=sum(any(row.success for row in one.rows.values()) for one in trees),
        rows=sum(len(one.rows) for one in trees),
        nodes=len(nodes),
        deepest=max((one.depth for one in nodes), default=0),
    )
    steps = [step for one in trees for step in one.steps(model.name)]
    return Searched(context.select(), context.table(to_table(nodes, NODE_SCHEMA), "nodes"), context.steps(steps))


@dataclass
class _Tree:
    """The tree of one task. ``ends`` names for each of its rows the last node on its path."""

    task: Task
    config: TreeConfig
    root: TreeNode = field(default_factory=lambda: TreeNode("root"))
    rows: dict[str, Trajectory] = field(default_factory=dict)
    ends: dict[str, TreeNode] = field(default_factory=dict)

    def next(self) -> TreeNode | None:
        """The node to expand; None if the tree does not grow any more."""
        spent = sum(row.n_action_tokens for row in self.rows.values())
        if self.config.budget_tokens is not None and spent >= self.config.budget_tokens:
            return None
        if self.config.oracle and any(row.success for row in self.rows.values()):
            return None
        return select(self.root, self.config.select, self.config.c, self.config.depth) if self.root.children else None

    def point(self, node: TreeNode) -> "ForkPoint":
        from agentrl.rollouts.continuations import node as state

        return state(self.rows[node.row], node.turn, self.task)

    def grow(self, node: TreeNode, rows: Sequence[Trajectory], born: int) -> None:
        """Add the continuations of a node. What has no turn, or ended because a server did, says nothing."""
        from agentrl.rollouts.continuations import node_name

        for row in rows:
            turns = acting(row.messages)
            if len(turns) <= node.turn or row.reward is None:
                continue
            if not self.rows:
                self.root.row = row.trajectory_id
                self.root.name = node_name(self.task.task_id, row.input_ids[: turns[0].token_start])
            over = len(turns) == node.turn + 1
            end = row.n_tokens if over else turns[node.turn + 1].token_start
            name = node_name(self.task.task_id, row.input_ids[:end])
            child = node.children.get(name)
            if child is None:
                child = TreeNode(name, row.trajectory_id, node.turn + 1, node, over, born)
                node.children[name] = child
            self.rows[row.trajectory_id] = row
            self.ends[row.trajectory_id] = child
        if self.config.oracle:
            self.settle()
            return
        agree = agreement([_said(row) for row in self.rows.values()])
        back_up(self.root, list(zip(self.ends.values(), agree, strict=True)))

    def settle(self) -> None:
        """Count rewards."""
        back_up(self.root, [(end, self.rows[name].scored_reward()) for name, end in self.ends.items()])

    def nodes(self) -> Iterator[SearchNode]:
        for one in self.root.walk():
            if not one.row:
                continue
            row = self.rows[one.row]
            start, end = _span(row, one.turn - 1) if one.parent else (0, _span(row, 0)[0])
            yield SearchNode(
                node_id=one.name,
                parent_node=one.parent.name if one.parent else None,
                task_id=self.task.task_id,
                depth=one.depth,
                trajectory_id=one.row,
                token_start=start,
                token_end=end,
                visits=one.visits,
                own=one.own,
                total=one.total,
                reward=row.reward if one.terminal else None,
                terminal=one.terminal,
                born=one.born,
            )

    def steps(self, prover: str) -> Iterator[StepValue]:
        """What the turns of the tree are worth, by the rewards behind them, or as ReST-MCTS* has it."""
        worth = self._rest() if self.config.value == "rest" else {}
        for one in self.root.walk():
            if one.parent is None:
                continue
            start, end = _span(self.rows[one.row], one.turn - 1)
            value, before = (worth.get(id(node), node.value) for node in (one, one.parent))
            plain = not worth and 0 <= one.total <= one.visits
            low, high = wilson(one.total, one.visits) if plain else (value, value)
            yield StepValue(
                trajectory_id=one.row,
                turn=one.turn - 1,
                token_start=start,
                token_end=end,
                v=before,
                q=value,
                n=one.visits,
                low=low,
                high=high,
                by=BY,
                policy=prover,
            )

    def _rest(self) -> dict[int, float]:
        """ReST-MCTS*'s values of all nodes. If no right end is known behind a node, its shortest end counts."""
        right: dict[int, int] = {}
        short: dict[int, int] = {}
        for name, end in self.ends.items():
            row, at = self.rows[name], end
            turns = len(acting(row.messages))
            while True:
                left = turns - at.turn
                short[id(at)] = min(left, short.get(id(at), left))
                if row.success:
                    right[id(at)] = min(left, right.get(id(at), left))
                if at.parent is None:
                    break
                at = at.parent
        found = {id(self.root): 0.0}
        for one in self.root.walk():
            if one.parent is not None:
                above = id(one.parent)
                steps = right.get(above, short[above])
                found[id(one)] = rest_value(found[above], id(one) in right, max(1, steps))
        return found


def _span(row: Trajectory, turn: int) -> tuple[int, int]:
    return turn_spans(row.messages, row.action_mask)[turn]


def _said(row: Trajectory) -> str:
    """How a row ended: what was heard last, and the answer."""
    heard = [message.content for message in row.messages if message.role is Role.TOOL]
    return f"{row.termination}\0{heard[-1] if heard else ''}\0{row.messages[-1].content}"
