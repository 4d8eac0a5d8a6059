"""The stage that says what the turns of stored rows are worth."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from agentrl.advantages.turns import turn_spans
from agentrl.pipelines.handles import Model, Steps, Tasks, Trajectories
from agentrl.pipelines.methods.slicing.estimates import StateValue, at_the_end, estimate, first_fall
from agentrl.pipelines.parts.budget import check_room
from agentrl.pipelines.parts.common import load_policy, rollout_runner
from agentrl.pipelines.parts.continuing import Continuations, ContinuingConfig, TaskRow, chosen_turns, rows_to_continue
from agentrl.pipelines.stage import Context, stage
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.rollouts.continuations import ForkPoint

BY = "continuation"
"""How the values of this stage are found."""


class ValueConfig(ContinuingConfig):
    where: Literal["all", "failed", "uncertain", "bisect"] = Field(
        "failed",
        description="turns that are valued: all; all of rows that did not succeed; those whose tokens were least "
        "likely; or of each failed row the turn at which it was lost, found by bisection and then drawn again",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of the reward for each turn up to the end")
    hard: bool = Field(False, description="a value is 1 if any continuation has a reward above 0, else 0")


class Valued(NamedTuple):
    steps: Steps
    trajectories: Trajectories


@stage("steps.value", version=1)
def value(
    context: Context,
    config: ValueConfig,
    trajectories: list[Trajectories],
    model: Model,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> Valued:
    """What turns of stored rows are worth to a policy, the prover: the mean reward of ``k`` continuations from the
    state before a turn and from the state after it. The continuations are an output too; they can be trained on.

    Unscored rows are left out and counted. Raises ValueError that names an environment whose episodes cannot be made
    again.
    """
    from agentrl.rollouts.continuations import check_replayable

    policy = load_policy(model, config.engine)
    given = rows_to_continue(context, trajectories, tasks, policy)
    rows = [(row, task) for row, task in given if row.reward is not None]
    known = [task for _, task in rows]
    sampling = config.sampling.of(policy)
    with rollout_runner(context, policy, known, sampling, config.engine, config.limits, config.rewards) as runner:
        check_replayable(runner.environments(known))
        check_room(policy, runner, known)
        forked = Continuations(context, runner, config.k)
        states = _States(forked, config)
        wanted = _lost(rows, states) if config.where == "bisect" else _chosen(rows, states, config)
    forked.finish()
    steps = [step for row, turns in wanted for step in _steps(row, turns, states, model.name)]
    context.metrics.update(
        rows=len(rows),
        unscored=len(given) - len(rows),
        valued_rows=len({step.trajectory_id for step in steps}),
        valued_turns=len(steps),
        unvalued_turns=sum(len(turns) for _, turns in wanted) - len(steps),
        progress=fmean(step.progress for step in steps) if steps else 0.0,
    )
    return Valued(context.steps(steps), context.select())


class _States:
    """The values of states: boundaries between the turns of rows."""

    def __init__(self, forked: Continuations, config: ValueConfig) -> None:
        self._forked, self._config = forked, config
        self._values: dict[tuple[str, int], StateValue | None] = {}

    def find(self, wanted: Iterable[tuple[TaskRow, int]]) -> None:
        """Find the values of boundaries of rows, all at once."""
        from agentrl.rollouts.continuations import node

        missing: dict[tuple[str, int], ForkPoint] = {}
        for (row, task), boundary in wanted:
            state = row.trajectory_id, boundary
            if state in self._values:
                continue
            if boundary == _end(row):
                self._values[state] = at_the_end(row.scored_reward())
            else:
                missing[state] = node(row, boundary, task)
        self._take(missing, self._forked.of(missing.values()))

    def find_again(self, chosen: Iterable[tuple[TaskRow, int]]) -> None:
        """Put values from new continuations in the place of those by which boundaries were chosen, which are as much
        too high or too low as helped them to be chosen."""
        from agentrl.rollouts.continuations import node

        drawn = {
            (row.trajectory_id, boundary): node(row, boundary, task)
            for (row, task), boundary in chosen
            if boundary < _end(row)
        }
        self._take(drawn, self._forked.again(drawn.values()))

    def _take(self, places: "Mapping[tuple[str, int], ForkPoint]", made: Mapping[str, Sequence[Trajectory]]) -> None:
        for state, point in places.items():
            scored = [row for row in made[point.name] if row.reward is not None]
            self._values[state] = self._estimate(scored) if scored else None

    def _estimate(self, rows: Sequence[Trajectory]) -> StateValue:
        rewards = [row.scored_reward() for row in rows]
        return estimate(rewards, [row.n_steps for row in rows], self._config.gamma, self._config.hard)

    def at(self, row: Trajectory, boundary: int) -> StateValue | None:
        """The value of a boundary; None if it was not asked for, or no continuation from there has a reward."""
        return self._values.get((row.trajectory_id, boundary))


Turns = list[tuple[Trajectory, list[int]]]
"""Rows, and numbers of their turns."""


def _chosen(rows: Sequence[TaskRow], states: _States, config: ValueConfig) -> Turns:
    """The turns that ``where`` names, when the values on both sides of them are found."""
    assert config.where != "bisect"
    turns = [chosen_turns(row, config.where, config.turns) for row, _ in rows]
    states.find(
        (row, turn + side)
        for row, turns_of_row in zip(rows, turns, strict=True)
        for turn in turns_of_row
        for side in (0, 1)
    )
    return [(row, turns_of_row) for (row, _), turns_of_row in zip(rows, turns, strict=True)]


def _lost(rows: Sequence[TaskRow], states: _States) -> Turns:
    """The turns at which failed rows were lost, when the values on both sides of them are found. The searches of all
    rows go on side by side. A search without a value to go on with names no turn."""
    failed = [task_row for task_row in rows if not task_row[0].success]
    searches = [first_fall(_end(row), row.scored_reward()) for row, _ in failed]
    asked = {index: next(search) for index, search in enumerate(searches) if _end(failed[index][0])}
    lost: list[list[int]] = [[] for _ in failed]
    while asked:
        states.find((failed[index], boundary) for index, boundary in asked.items())
        for index, boundary in list(asked.items()):
            del asked[index]
            if (estimate := states.at(failed[index][0], boundary)) is None:
                continue
            try:
                asked[index] = searches[index].send(estimate.value)
            except StopIteration as end:
                lost[index] = [] if end.value is None else [end.value]
    sides = [
        (task_row, turn + side)
        for task_row, turns in zip(failed, lost, strict=True)
        for turn in turns
        for side in (0, 1)
    ]
    states.find(sides)  # an end, which no search asks for
    states.find_again(sides)
    return [(row, turns) for (row, _), turns in zip(failed, lost, strict=True)]


def _end(row: Trajectory) -> int:
    """The last boundary of a row, which is the number of its turns."""
    return len(turn_spans(row.messages, row.action_mask))


def _steps(row: Trajectory, turns: Sequence[int], states: _States, prover: str) -> Iterator[StepValue]:
    """The table's rows of a trajectory. Turns without a value on both sides have none."""
    spans = turn_spans(row.messages, row.action_mask)
    for turn in turns:
        before, after = states.at(row, turn), states.at(row, turn + 1)
        if before is None or after is None:
            continue
        start, end = spans[turn]
        yield StepValue(
            trajectory_id=row.trajectory_id,
            turn=turn,
            token_start=start,
            token_end=end,
            v=before.value,
            q=after.value,
            n=after.n,
            low=after.low,
            high=after.high,
            by=BY,
            policy=prover,
        )
