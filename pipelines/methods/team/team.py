"""The stage in which several agents act in one episode."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.methods.team.frozen import acting_as
from agentrl.pipelines.parts.budget import SamplingConfig, check_room
from agentrl.pipelines.parts.common import REWARDS, load_policy, rollout_runner
from agentrl.pipelines.parts.outcomes import record_failures
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards import Rewards
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.team import Playing, Team
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.rollouts.runner import RolloutRunner

TASKS_AT_ONCE = 64
"""Tasks whose rows are appended together: a killed run resumes at the next ones."""


class TeamConfig(Team, StageConfig):
    samples: int = Field(4, ge=1, description="of each task, how often the speakers speak")
    sampling: SamplingConfig = SamplingConfig()
    rewards: Rewards = Field([], description=REWARDS)
    engine: TokenEngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()


@stage("trajectories.team", version=2)
def team(
    context: Context, config: TeamConfig, model: Model, tasks: Tasks, speaker: Model | None = None
) -> Trajectories:
    """Rollouts of several agents in one episode: each of ``speakers`` says one thing, which those after it read, and
    the actor acts in the environment. Each agent's turns are a row, with its name in ``agent``. All agents are
    ``model``, or those who speak are ``speaker``.

    With ``acts: 1`` the rows of an episode share its reward and the group of its task (joint credit). With more, the
    actor's rows after the same words are a group, so that a group estimator gives each agent its marginal advantage;
    then there is one speaker.
    """
    policy, rows = load_policy(model, config.engine), tasks.read()
    playing = Playing(config)
    if speaker:
        other = load_policy(speaker, config.engine)
        acting = acting_as(other, config.engine, config.sampling.of(other), config.limits)
        playing = Playing(config, frozenset(agent.name for agent in config.speakers), acting)
    with rollout_runner(
        context, policy, rows, config.sampling.of(policy), config.engine, config.limits, config.rewards, team=playing
    ) as runner:
        check_room(policy, runner, rows)
        for shard, start in enumerate(range(0, len(rows), TASKS_AT_ONCE)):
            if not context.has_shard(shard):
                part = rows[start : start + TASKS_AT_ONCE]
                context.append(_episodes(context, config, part, start, runner), shard)
            context.progress(min(start + TASKS_AT_ONCE, len(rows)), len(rows))
        record_failures(context, runner)
    _measure(context, config)
    return context.select()


def _episodes(
    context: Context, config: TeamConfig, tasks: Sequence[Task], start: int, runner: "RolloutRunner"
) -> list[Trajectory]:
    """The rows of all agents at these tasks."""
    from agentrl.rollouts.segments import firsts

    rollouts = config.rollouts(config.samples)
    first = {context.trajectory_id((start + index) * rollouts): index for index in range(len(tasks))}
    made: dict[str, list[Trajectory]] = {group: [] for group in first}
    for turn in range(1 + (config.acts > 1)):
        attempts = {
            context.trajectory_id((start + index) * rollouts + len(firsts(made[group])) + number): attempt
            for group, index in first.items()
            for number, attempt in enumerate(config.attempts(tasks[index], group, made[group], rollouts))
        }
        for row in runner.run(list(attempts.values()), stream(context.seed, "team", start, turn), list(attempts)):
            made[row.group_id or ""].append(row)
    return [row for rows in made.values() for row in config.credited(rows)]


def _measure(context: Context, config: TeamConfig) -> None:
    rows = context.select().table(["agent", "success", "n_action_tokens", "n_tool_calls"]).to_pylist()
    acted = [row["success"] for row in rows if row["agent"] == config.actor and row["success"] is not None]
    context.metrics.update(
        rows=len(rows),
        episodes=sum(row["agent"] == config.actor for row in rows),
        success=sum(acted) / max(1, len(acted)),
        sampled_tokens=sum(row["n_action_tokens"] for row in rows),
        environment_calls=sum(row["n_tool_calls"] for row in rows),
    )
