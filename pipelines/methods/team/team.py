"""The stage in which several agents act in one episode."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.engines import TokenEngineChoice
from agentrl.engines.configs import DEFAULT_ENGINE
from agentrl.engines.seeds import stream
from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.parts.budget import SamplingConfig, check_room
from agentrl.pipelines.parts.common import REWARDS, load_policy, rollout_runner
from agentrl.pipelines.parts.outcomes import record_failures
from agentrl.pipelines.stage import Context, StageConfig, stage
from agentrl.rewards import Rewards
from agentrl.rollouts.limits import Limits
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.pipelines.methods.team.speaking import Speaking
    from agentrl.rollouts.runner import RolloutRunner

TASKS_AT_ONCE = 64
"""Tasks whose rows are appended together: a killed run resumes at the next ones."""


class SpeakerConfig(BaseModel):
    """An agent that says one thing before another acts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="of the agent, in the column agent, and to those who read it")
    ask: str = Field(min_length=1, description="what it is asked, after the task")


class TeamConfig(StageConfig):
    speakers: list[SpeakerConfig] = Field(
        [SpeakerConfig(name="planner", ask="plan?")], min_length=1, description="who speaks, one after another"
    )
    actor: str = Field("walker", min_length=1, description="name of the agent that acts in the environment")
    samples: int = Field(4, ge=1, description="of each task, how often the speakers speak")
    acts: int = Field(
        1,
        ge=1,
        description="how often the actor acts after the same words. 1: all rows of an episode share its group. More: "
        "they are the actor's alternatives, with everything before frozen, and the speakers have their mean",
    )
    sampling: SamplingConfig = SamplingConfig()
    rewards: Rewards = Field([], description=REWARDS)
    engine: TokenEngineChoice = DEFAULT_ENGINE
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _one_speaker_has_alternatives(self) -> "TeamConfig":
        if self.acts > 1 and len(self.speakers) > 1:
            raise ValueError(
                f"acts {self.acts} with {len(self.speakers)} speakers: a later speaker's words are never drawn again "
                "after those of the speakers before it, so it has no marginal advantage; name one speaker, or set "
                "acts: 1 and credit: joint"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "TeamConfig":
        names = [*(speaker.name for speaker in self.speakers), self.actor]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two agents are called {twice[0]!r}; rows are told apart by the agent's name")
        return self


@stage("trajectories.team", version=1)
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
    from agentrl.pipelines.methods.team.speaking import Speaking

    policy = load_policy(model, config.engine)
    other = load_policy(speaker, config.engine) if speaker else policy
    rows, sampling = tasks.read(), config.sampling.of(policy)
    with rollout_runner(context, policy, rows, sampling, config.engine, config.limits, config.rewards) as acting:
        check_room(policy, acting, rows)
        version = " ".join(sorted({environment.version for environment in acting.environments(rows).values()}))
        places = [Speaking(speaker.ask, version) for speaker in config.speakers]
        with rollout_runner(context, other, rows, config.sampling.of(other), config.engine, config.limits) as talking:
            for shard, start in enumerate(range(0, len(rows), TASKS_AT_ONCE)):
                if not context.has_shard(shard):
                    part = rows[start : start + TASKS_AT_ONCE]
                    context.append(_episodes(context, config, part, start, acting, talking, places), shard)
                context.progress(min(start + TASKS_AT_ONCE, len(rows)), len(rows))
            record_failures(context, acting, talking)
    _measure(context, config)
    return context.select()


def _episodes(
    context: Context,
    config: TeamConfig,
    tasks: Sequence[Task],
    start: int,
    acting: "RolloutRunner",
    talking: "RolloutRunner",
    places: "Sequence[Speaking]",
) -> list[Trajectory]:
    """The rows of all agents at these tasks."""
    from agentrl.pipelines.methods.team.speaking import SOURCE, one_episode, shown, word_of
    from agentrl.rollouts.rationalize import literal
    from agentrl.rollouts.runner import Attempt

    each = len(places) + config.acts
    first = [
        (task, sample, (start + index) * config.samples * each)
        for index, task in enumerate(tasks)
        for sample in range(config.samples)
    ]

    def ids(offset: int) -> list[str]:
        return [context.trajectory_id(ticket + sample * each + offset) for _, sample, ticket in first]

    talks = [""] * len(first)
    spoken: list[list[Trajectory]] = [[] for _ in first]
    groups = [context.trajectory_id(ticket) for *_, ticket in first]
    for number, (speaker, speaking) in enumerate(zip(config.speakers, places, strict=True)):
        attempts = [
            Attempt(task, sample, literal(text), group)
            for (task, sample, _), text, group in zip(first, talks, groups, strict=True)
        ]
        seed = stream(context.seed, "team", start, number)
        for place_of, row in enumerate(talking.acting_in(speaking).run(attempts, seed, ids(number), SOURCE)):
            spoken[place_of].append(row)
            talks[place_of] = f"{talks[place_of]} {shown(speaker.name, word_of(row))}".strip()
    walks = {}
    for (task, sample, ticket), text, group in zip(first, talks, groups, strict=True):
        names = [context.trajectory_id(ticket + sample * each + len(places) + act) for act in range(config.acts)]
        of_acts = group if config.acts == 1 else names[0]  # not that of the speakers, whose first row names the task's
        for act, name in enumerate(names):
            walks[name] = Attempt(task, sample if config.acts == 1 else act, literal(text), of_acts)
    seed = stream(context.seed, "team", start, len(places))
    acted = acting.run(list(walks.values()), seed, list(walks), SOURCE)
    agents = [*(speaker.name for speaker in config.speakers), config.actor]
    return [
        row
        for number, rows in enumerate(spoken)
        for row in one_episode(rows, agents, acted[number * config.acts : (number + 1) * config.acts])
    ]


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
