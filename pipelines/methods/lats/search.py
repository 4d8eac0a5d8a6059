"""The stage that searches: trees of turns, whose leaves are rows."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pydantic import Field

from agentrl.advantages.turns import acting, turn_spans
from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.pipelines.handles import Model, RewardModel, Steps, Table, Tasks, Trajectories
from agentrl.pipelines.methods.lats.grow import BY, GrownTree, TreeSearchConfig, grow
from agentrl.pipelines.methods.lats.tree import rest_value
from agentrl.pipelines.methods.lats.valuing import Valuing, check_judge
from agentrl.pipelines.parts.budget import SamplingConfig, check_room
from agentrl.pipelines.parts.common import REWARDS, load_policy, rollout_runner, warn_of_splits
from agentrl.pipelines.stage import Context, stage
from agentrl.rewards import Rewards
from agentrl.rollouts.limits import Limits
from agentrl.schemas.arrow import to_table
from agentrl.schemas.node import NODE_SCHEMA, SearchNode
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Trajectory
from agentrl.statistics.intervals import wilson


class TreeConfig(TreeSearchConfig):
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
def tree(
    context: Context, config: TreeConfig, tasks: Tasks, model: Model, reward_model: RewardModel | None = None
) -> Searched:
    """Monte-Carlo tree search over the turns of a policy, a tree for each task (LATS, Agent Q). The rows are trainable
    as they are; ``nodes`` says how they hang together, and ``steps`` what the turns in the trees are worth.
    ``reward_model`` is that of ``judge: reward_model``.

    Raises ValueError that names an environment whose episodes cannot be made again, or a task that is measured on if
    the search is guided by true rewards.
    """
    check_judge(config.judge, reward_model)
    valuing = Valuing(reward_model) if reward_model else None
    policy, known = load_policy(model, config.engine), tasks.read()
    if config.oracle and (measured := [task for task in known if task.split != "train"]):
        raise ValueError(
            f"oracle: true lets the search look at rewards, and {measured[0].task_id} is of split {measured[0].split}; "
            "wire tasks.train, or evaluate.policy with search, which reports what was found with feedback as such"
        )
    splits = {task.split: sum(other.split == task.split for other in known) for task in known}
    warn_of_splits(splits, "tasks")
    sampling = config.sampling.of(policy)
    with rollout_runner(context, policy, known, sampling, config.engine, config.limits, config.rewards) as runner:
        check_room(policy, runner, known)
        trees = grow(context, config, runner, known, valuing=valuing)
    nodes = [row for tree in trees for row in _nodes(tree)]
    context.metrics.update(
        tasks=len(known),
        solved_tasks=sum(any(row.success for row in tree.rows.values()) for tree in trees),
        rows=sum(len(tree.rows) for tree in trees),
        nodes=len(nodes),
        deepest=max((node.depth for node in nodes), default=0),
    )
    steps = [step for tree in trees for step in _steps(tree, model.name, config.value)]
    return Searched(context.select(), context.table(to_table(nodes, NODE_SCHEMA), "nodes"), context.steps(steps))


def _nodes(tree: GrownTree) -> Iterator[SearchNode]:
    for node in tree.root.walk():
        if not node.row:
            continue
        row = tree.rows[node.row]
        start, end = _span(row, node.turn - 1) if node.parent else (0, _span(row, 0)[0])
        yield SearchNode(
            node_id=node.name,
            parent_node=node.parent.name if node.parent else None,
            task_id=tree.task.task_id,
            depth=node.depth,
            trajectory_id=node.row,
            token_start=start,
            token_end=end,
            visits=node.visits,
            own=node.own,
            total=node.total,
            judge=node.judge,
            reward=row.reward if node.terminal else None,
            terminal=node.terminal,
            born=node.born,
        )


def _steps(tree: GrownTree, prover: str, value: Literal["shepherd", "rest"]) -> Iterator[StepValue]:
    """What the turns of the tree are worth, by the rewards behind them, or as ReST-MCTS* has it."""
    worth = _rest(tree) if value == "rest" else {}
    for node in tree.root.walk():
        if node.parent is None or not node.visits:
            continue
        start, end = _span(tree.rows[node.row], node.turn - 1)
        after, before = (worth.get(id(node), node.value) for node in (node, node.parent))
        plain = not worth and 0 <= node.total <= node.visits
        low, high = wilson(node.total, node.visits) if plain else (after, after)
        yield StepValue(
            trajectory_id=node.row,
            turn=node.turn - 1,
            token_start=start,
            token_end=end,
            v=before,
            q=after,
            n=node.visits,
            low=low,
            high=high,
            by=BY,
            policy=prover,
        )


def _rest(tree: GrownTree) -> dict[int, float]:
    """ReST-MCTS*'s values of all nodes. If no right end is known behind a node, its shortest end counts."""
    right: dict[int, int] = {}
    short: dict[int, int] = {}
    for name, end in tree.ends.items():
        row, at = tree.rows[name], end
        turns = len(acting(row.messages))
        while True:
            left = turns - at.turn
            short[id(at)] = min(left, short.get(id(at), left))
            if row.success:
                right[id(at)] = min(left, right.get(id(at), left))
            if at.parent is None:
                break
            at = at.parent
    values = {id(tree.root): 0.0}
    for node in tree.root.walk():
        if node.parent is not None:
            above = id(node.parent)
            steps = right.get(above, short[above])
            values[id(node)] = rest_value(values[above], id(node) in right, max(1, steps))
    return values


def _span(row: Trajectory, turn: int) -> tuple[int, int]:
    return turn_spans(row.messages, row.action_mask)[turn]
