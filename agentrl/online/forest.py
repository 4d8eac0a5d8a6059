"""Trees of rollouts (Tree-GRPO: Ji et al. 2025, arXiv 2509.21240): some rollouts of a ticket are whole, and others go
on from a turn of these.

The advantage of a rollout is that in the group of its ticket plus that in the group of its tree, as in the authors'
code. States are drawn as there: all turns of a tree are equally likely, and one may be drawn twice. Two things are
ours. A token that several rollouts share is trained on once, in the rollout that sampled it, with the mean of their
advantages; there it is trained on in each of them. And a rollout that is alone in its tree has the advantage 0 in it;
there it keeps its reward.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.advantages.turns import acting, own_turns, turn_spans
from agentrl.algorithms.policy_gradient import Advantages, Experience, PolicyGradient
from agentrl.rollouts.attempts import Prefix
from agentrl.rollouts.continuations import check_continuation, node
from agentrl.rollouts.episodes import DIVERGED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class ForestConfig(BaseModel):
    """How many rollouts of a ticket are whole, and how many go on from turns of others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trees: int = Field(2, ge=1, description="whole rollouts of each task, one for each of its trees")
    nodes: int = Field(2, ge=1, description="states drawn of each tree in each round, with one continuation each")
    rounds: int = Field(1, ge=0, description="rounds of continuations; those of one are drawn from in the next")

    @model_validator(mode="after")
    def _compares_some(self) -> "ForestConfig":
        if self.rows < 2:
            raise ValueError(
                "trees: 1 with rounds: 0 is one rollout of each task, with nothing to compare it with; set trees: 2 "
                "or more, or rounds: 1 or more"
            )
        return self

    @property
    def rows(self) -> int:
        """Rollouts of each task."""
        return self.trees * (1 + self.nodes * self.rounds)

    def tree(self, index: int) -> int:
        """The tree of the rollout with this number among those of its ticket."""
        return index if index < self.trees else (index - self.trees) // self.nodes % self.trees

    def prefixes(self, rows: Sequence[Trajectory], task: Task, seed: object) -> list[Prefix | None]:
        """What the next rollouts of a ticket begin with, given all of them so far in order: nothing (None) if they are
        whole. There are no more if the ticket has all of them. A tree without a turn to go on from, because its
        environment failed, begins again."""
        prefixes: list[Prefix | None] = []
        if not rows:
            return [None] * self.trees
        if len(rows) == self.rows:
            return prefixes
        for number in range(self.trees):
            states = [state for row in rows if self.tree(row.sample_index) == number for state in _states(row)]
            drawn = Random(f"{seed}-{number}").choices(states, k=self.nodes) if states else [None] * self.nodes
            prefixes += [None if state is None else node(*state, task).prefix for state in drawn]
        return prefixes

    def check(self, rows: Sequence[Trajectory]) -> None:
        """Raise ValueError that names a row of a ticket that is no continuation of its parent."""
        parents = {row.trajectory_id: row for row in rows}
        for row in rows:
            if row.fork_at and DIVERGED not in row.tags:
                parent = parents[row.parent_id or ""]
                check_continuation(row, Prefix(parent.trajectory_id, [], parent.input_ids[: row.fork_at]))


def _states(row: Trajectory) -> list[tuple[Trajectory, int]]:
    """The turns of a row that no other row of its tree has."""
    spans = turn_spans(row.messages, row.action_mask)
    return [(row, turn) for turn in own_turns(row) if spans[turn][0] > row.fork_at]


def replayed_calls(row: Trajectory) -> int:
    """Calls of a continuation that were made again to come to its state."""
    before = [message for message in acting(row.messages) if (message.token_start or 0) < row.fork_at]
    return sum(len(message.tool_calls) for message in before)


def forest_advantages(algorithm: PolicyGradient, step: Experience, config: ForestConfig) -> Advantages:
    """The advantages of rollouts that are trees, by an algorithm that ``credits_returns``. A row that goes on from one
    that is not among them, since that could not be scored, is taken to share no token with any."""
    trees = [f"{group} {config.tree(row.sample_index)}" for group, row in zip(step.groups, step.rollouts, strict=True)]
    both = [algorithm.advantages(grouped).tokens for grouped in (step, replace(step, groups=trees))]
    values = np.array([tokens[0] + other[0] for tokens, other in zip(*both, strict=True)], np.float64)
    return Advantages(shared_means(step.rollouts, values))


def shared_means(rows: Sequence[Trajectory], values: np.ndarray) -> list[np.ndarray]:
    """Values of rows [rows] as values of their tokens, [rows][tokens]: the mean over the row and all those that go on
    after the token. Rows come after those that they go on from."""
    places = {row.trajectory_id: number for number, row in enumerate(rows)}
    sums = [np.full(len(row.input_ids), value) for row, value in zip(rows, values.tolist(), strict=True)]
    counts = [np.ones(len(row.input_ids)) for row in rows]
    behind, number_behind = values.astype(float), np.ones(len(rows))
    for number in range(len(rows) - 1, -1, -1):
        row = rows[number]
        parent = places.get(row.parent_id or "") if row.fork_at else None
        if parent is None:
            continue
        sums[parent][: row.fork_at] += behind[number]
        counts[parent][: row.fork_at] += number_behind[number]
        behind[parent] += behind[number]
        number_behind[parent] += number_behind[number]
    return [total / count for total, count in zip(sums, counts, strict=True)]
