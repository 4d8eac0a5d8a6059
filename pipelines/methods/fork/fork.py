"""The stage that continues stored rows."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from agentrl.advantages.turns import own_turns, turn_spans
from agentrl.engines import EngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.parts.budget import check_room
from agentrl.pipelines.parts.common import load_policy, policy_of, rollout_runner
from agentrl.pipelines.parts.continuing import (
    Continuations,
    ContinuingConfig,
    chosen_turns,
    rows_to_continue,
)
from agentrl.pipelines.stage import Context, stage
from agentrl.schemas.annotations import ADDED
from agentrl.schemas.trajectory import NOT_TRAINED, Trajectory

if TYPE_CHECKING:
    from agentrl.engines.base import Engine
    from agentrl.models.policy import Policy


class ForkConfig(ContinuingConfig):
    k: int = Field(4, ge=1, description="continuations of each state")
    at: Literal["all", "failed", "uncertain"] | list[int] = Field(
        "failed",
        description="turns before which rows are continued: all; all of rows that did not succeed; those whose tokens "
        "were least likely; or their numbers, from 0, and from -1 backwards",
    )
    replace: Annotated[Literal["resample", "default", "none"], ADDED] = Field(
        "resample",
        description="the turn at which rows are continued: sampled again; that of the input default; or an empty one. "
        "What is not sampled is not trained on",
    )
    differing: Annotated[Literal["drop", "go_on"], ADDED] = Field(
        "drop",
        description="continuations whose replay is answered otherwise than the row was: left out, and counted as "
        "diverged; or they go on after the answers of the row, in the state that the replay came to, tagged "
        "replay_differs; then any environment is tried, replayable or not",
    )
    measure: Annotated[bool, ADDED] = Field(
        False, description="rows of any split are continued, to measure a policy: no stage trains on the continuations"
    )
    engine: EngineChoice = Field(DEFAULT_ENGINE, description="what samples; an endpoint goes on from the text of rows")

    @model_validator(mode="after")
    def _endpoints_have_text(self) -> "ForkConfig":
        lacking = {"at: uncertain": self.at == "uncertain", f"replace: {self.replace}": self.replace != "resample"}
        if not self.engine.exact and any(lacking.values()):
            setting = next(name for name, holds in lacking.items() if holds)
            raise ValueError(f"{setting} needs token ids, which engine {self.engine.type} does not give; leave it out")
        return self


@stage("trajectories.fork", version=1)
def fork(
    context: Context,
    config: ForkConfig,
    trajectories: list[Trajectories],
    model: Model | None = None,
    tasks: list[Tasks] = [],  # noqa: B006  (an input that may be left out)
    default: Model | None = None,
) -> Trajectories:
    """Continuations of stored rows, ``k`` from each state that ``at`` names, by the model, or if the engine is an
    endpoint, by what is behind it. The episode is made again by
    replaying the row's own turns; if the environment answers otherwise than before, the continuation is dropped and
    counted as ``diverged``, or goes on and says so (``differing``). States that several rows share are continued once.
    Continuations of one state are a group, and only their own tokens are trained on. With ``replace``, their first turn
    is that of the policy ``default``, or empty; the others of the group are then compared with what becomes of that.

    Raises ValueError that names an environment whose episodes cannot be made again, or a row of another split than
    train unless ``measure`` is set.
    """
    from agentrl.rollouts.continuations import check_replayable, node, text_node

    policy = policy_of(model, config.engine)
    state = node if policy else text_node
    other = _default(config, default, policy)
    rows = rows_to_continue(context, trajectories, tasks, policy, config.measure)
    known = [task for _, task in rows]
    sampling = config.sampling.of(policy)
    with rollout_runner(
        context, policy, known, sampling, config.engine, config.limits, config.rewards, teacher=other
    ) as runner:
        if config.differing == "drop":
            check_replayable(runner.environments(known))
        check_room(policy, runner, known)
        replaced: Literal["", "default", "none"] = "" if config.replace == "resample" else config.replace
        tag = NOT_TRAINED if config.measure else ""
        go_on = config.differing == "go_on"
        forked = Continuations(context, runner, config.k, tag=tag, replaced=replaced, go_on=go_on)
        continuations = forked.of([state(row, turn, task) for row, task in rows for turn in _turns(row, config)])
    forked.finish()
    made = [row for group in continuations.values() for row in group]
    scored = [row.success for row in made if row.success is not None]
    context.metrics.update(
        rows=len(made),
        success=sum(scored) / max(1, len(scored)),
        continued=sum(bool(_turns(r, config)) for r, _ in rows),
    )
    if other is not None:
        context.metrics.update(foreign_tokens=sum(map(_of_first_turn, made)))
    return context.select()


def _default(config: ForkConfig, default: Model | None, policy: "Policy | None") -> "Engine | None":
    """What samples the turns of the policy ``default``, which reads the tokens of rows."""
    from agentrl.online.teacher import check_vocabulary

    if (default is not None) != (config.replace == "default"):
        lack = "default needs inputs.default, the policy whose turn it is"
        raise ValueError(f"replace: {lack}" if default is None else "inputs.default is wired; set replace: default")
    if default is None or policy is None:
        return None
    other = load_policy(default, config.engine)
    check_vocabulary(other, policy)
    return config.engine.build(other)


def _of_first_turn(row: Trajectory) -> int:
    """Tokens of the first turn after the fork."""
    return next((end - start for start, end in turn_spans(row.messages, row.action_mask) if start >= row.fork_at), 0)


def _turns(row: Trajectory, config: ForkConfig) -> list[int]:
    """Numbers of the turns before which a row is continued."""
    if not isinstance(config.at, list):
        return chosen_turns(row, config.at, config.turns)
    turns = own_turns(row)
    last = turns[-1] + 1 if turns else 0
    wanted = {turn if turn >= 0 else last + turn for turn in config.at}
    return [turn for turn in turns if turn in wanted]
