"""The stage that continues stored rows."""

from typing import Annotated, Literal

from pydantic import Field

from agentrl.advantages.turns import own_turns
from pipelines.handles import Model, Tasks, Trajectories
from pipelines.stage import Context, stage
from pipelines.stages.budget import check_room
from pipelines.stages.common import load_policy, rollout_runner
from pipelines.stages.continuing import (
    Continuations,
    ContinuingConfig,
    chosen_turns,
    rows_to_continue,
)
from schemas.annotations import ADDED
from schemas.trajectory import NOT_TRAINED, Trajectory


class ForkConfig(ContinuingConfig):
    k: int = Field(4, ge=1, description="continuations of each state")
    at: Literal["all", "failed", "uncertain"] | list[int] = Field(
        "failed",
        description="turns before which rows are continued: all; all of rows that did not succeed; those whose tokens "
        "were least likely; or their numbers, from 0, and from -1 backwards",
    )
    measure: Annotated[bool, ADDED] = Field(
        False, description="rows of any split are continued, to measure a policy: no stage trains on the continuations"
    )


@stage("trajectories.fork", version=1)
def fork(
    context: Context,
    config: ForkConfig,
    trajectories: list[Trajectories],
    model: Model,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
) -> Trajectories:
    """Continuations of stored rows by a policy, ``k`` from each state that ``at`` names. The episode is made again by
    replaying the row's own turns; if the environment answers otherwise than before, the continuation is dropped and
    counted as ``diverged``. States that several rows share are continued once. Continuations of one state are a group,
    and only their own tokens are trained on.

    Raises ValueError that names an environment whose episodes cannot be made again, or a row of another split than
    train unless ``measure`` is set.
    """
    from agentrl.rollouts.continuations import check_replayable, node

    policy = load_policy(model, config.engine)
    rows = rows_to_continue(trajectories, tasks, policy, config.measure)
    known = [task for _, task in rows]
    sampling = config.sampling.of(policy)
    with rollout_runner(context, policy, known, sampling, config.engine, config.limits, config.rewards) as runner:
        check_replayable(runner.environments(known))
        check_room(policy, runner, known)
        forked = Continuations(context, runner, config.k, tag=NOT_TRAINED if config.measure else "")
        found = forked.of([node(row, turn, task) for row, task in rows for turn in _turns(row, config)])
    forked.finish()
    made = [row for group in found.values() for row in group]
    scored = [row.success for row in made if row.success is not None]
    context.metrics.update(
        rows=len(made),
        success=sum(scored) / max(1, len(scored)),
        continued=sum(bool(_turns(r, config)) for r, _ in rows),
    )
    return context.select()


def _turns(row: Trajectory, config: ForkConfig) -> list[int]:
    """Numbers of the turns before which a row is continued."""
    if not isinstance(config.at, list):
        return chosen_turns(row, config.at, config.turns)
    turns = own_turns(row)
    last = turns[-1] + 1 if turns else 0
    wanted = {one if one >= 0 else last + one for one in config.at}
    return [turn for turn in turns if turn in wanted]
