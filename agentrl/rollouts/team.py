"""Teams: agents that act in one episode one after another. All but the last one say one thing each, which those after
them read; the last one acts in the environment. Each agent's turns are a row of their own: what the engine read and
sampled for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.engines.base import Session
from agentrl.engines.seeds import stream
from agentrl.environments.agent import AgentEnvironment
from agentrl.environments.conversation import AskedOnce
from agentrl.rollouts.acting import Act
from agentrl.rollouts.attempts import Attempt
from agentrl.rollouts.episodes import EpisodeRun
from agentrl.rollouts.rationalize import literal
from agentrl.rollouts.segments import Segment, firsts
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

SOURCE = "team"


class SpeakerConfig(BaseModel):
    """An agent that says one thing before another acts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="of the agent, in the column agent, and to those who read it")
    ask: str = Field(min_length=1, description="what it is asked, after the task")


class Team(BaseModel):
    """Who acts in an episode, and how often the last one acts after the same words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    speakers: list[SpeakerConfig] = Field(
        [SpeakerConfig(name="planner", ask="plan?")], min_length=1, description="who speaks, one after another"
    )
    actor: str = Field("walker", min_length=1, description="name of the agent that acts in the environment")
    acts: int = Field(
        1,
        ge=1,
        description="how often the actor acts after the same words. 1: all rows of an episode share its group. More: "
        "they are the actor's alternatives, with everything before frozen, and the speakers have their mean",
    )

    @model_validator(mode="after")
    def _one_speaker_has_alternatives(self) -> "Team":
        if self.acts > 1 and len(self.speakers) > 1:
            raise ValueError(
                f"acts {self.acts} with {len(self.speakers)} speakers: a later speaker's words are never drawn again "
                "after those of the speakers before it, so it has no marginal advantage; name one speaker, or set "
                "acts: 1 and credit: joint"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "Team":
        names = [*(speaker.name for speaker in self.speakers), self.actor]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two agents are called {twice[0]!r}; rows are told apart by the agent's name")
        return self

    def rollouts(self, samples: int) -> int:
        """Rollouts of a task at which the speakers speak ``samples`` times: what is said and each act after it are
        rollouts of their own, if there are several acts."""
        return samples if self.acts == 1 else samples * (1 + self.acts)

    def attempts(self, task: Task, group: str, rows: Sequence[Trajectory], rollouts: int) -> list[Attempt]:
        """What is rolled out next of a task that has these ``rows`` of ``rollouts``, in order: whole episodes, or the
        words, and then the acts after them. There are none if it has all of them."""
        if len(firsts(rows)) == rollouts:
            return []
        if self.acts == 1:
            return [Attempt(task, index, group=group) for index in range(rollouts)]
        spoken = rollouts // (1 + self.acts)
        if not rows:
            return [Attempt(task, index, group=group, turns=1) for index in range(spoken)]
        heard = [literal(shown(row.agent, word_of(row.messages))) for row in rows for _ in range(self.acts)]
        return [Attempt(task, spoken + index, words, group) for index, words in enumerate(heard)]

    def credited(self, rows: Sequence[Trajectory]) -> list[Trajectory]:
        """All rows of a task, in order, with what they are compared with. If the actor acted several times, its rows
        after the same words are a group, named by the first of them, and those words have the mean of their rewards:
        none if the speaker failed by no doing of its own, or no act has a reward."""
        if self.acts == 1:
            return list(rows)
        spoken, acted = list[Trajectory](), list[Trajectory]()
        words = len(rows) // (1 + self.acts)
        for number, row in enumerate(rows[:words]):
            own = rows[words + number * self.acts :][: self.acts]
            rewards = [act.reward for act in own if act.reward is not None]
            heard = bool(rewards) and row.termination is not Termination.INFRA_ERROR
            spoken.append(row.model_copy(update={"reward": fmean(rewards) if heard else None}))
            update = {"agent": self.actor, "parent_id": row.trajectory_id, "group_id": own[0].trajectory_id}
            acted += [act.model_copy(update=update) for act in own]
        return [*spoken, *acted]


@dataclass(frozen=True)
class Playing:
    """A team in rollouts. The agents that ``others`` names act by ``other``, the rest by the policy that is rolled out.
    The rows of the others are ``trained`` on, or are inputs of the episode alone, without a reward."""

    team: Team
    others: frozenset[str] = frozenset()
    other: Act | None = None
    trained: bool = True

    def check(self, environments: Iterable[object]) -> None:
        """Raise ValueError if an environment is an agent program, which has agents of its own."""
        if programs := [env.name for env in environments if isinstance(env, AgentEnvironment)]:
            raise ValueError(
                f"env {programs[0]!r} is an agent program, whose sub-agents are rows of its episodes already; leave "
                "team out, or use an environment of tools"
            )


@dataclass
class TeamRun(EpisodeRun):
    """The episode of a team; what is not of its speakers is of the actor. An attempt that is cut after ``turns`` of its
    own has the words alone."""

    playing: Playing = field(kw_only=True)
    spoken: list[EpisodeRun] = field(default_factory=list)
    acted: bool = False
    used: bool = False  # the session that the run was given, by an agent

    async def run(self) -> None:
        """See :meth:`agentrl.rollouts.episodes.EpisodeRun.run`."""
        team, words = self.playing.team, list[str]()
        for number, speaker in enumerate(team.speakers):
            run = self._speaking(number, literal(" ".join(words)))
            self.spoken.append(run)
            try:
                await run.run()
            finally:
                if run.act is not self.act:
                    run.session.end()
            self.info.update(run.info)
            self.termination, self.error, self.lasting = run.termination, run.error, run.lasting
            if run.error:
                return
            words.append(shown(speaker.name, word_of(run.messages)))
        if self.attempt.turns is not None:
            return
        act, session = self._seat(team.actor, len(team.speakers))
        before, self.acted = self.session, True
        self.attempt = replace(self.attempt, hint=literal(" ".join(words)))
        self.act, self.session = act, session
        try:
            await super().run()
        finally:
            before.end()

    def _speaking(self, number: int, heard: str) -> EpisodeRun:
        """The turn of a speaker who is shown what was said before."""
        speaker = self.playing.team.speakers[number]
        act, session = self._seat(speaker.name, number)
        environment = AskedOnce(SOURCE, self.environment.version, speaker.ask)
        attempt = replace(self.attempt, hint=heard, turns=None)
        return EpisodeRun(act, environment, attempt, session, stream(self.seed, "agent", number), self.deadline)

    def _seat(self, name: str, number: int) -> tuple[Act, Session]:
        """What an agent acts by, and its session. An engine may wait for all of its open sessions, so the policy's ends
        when its next one begins, and at the end of the episode; those of another act end with the agent's turns."""
        other, key = self.playing.other, (*self.session.key, number)
        root = f"{self.attempt.group_id} {number}"
        if other is not None and name in self.playing.others:
            return other, other.engine.open(key, root)
        if self.used:
            self.session.end()
            self.session = self.act.engine.open(key, root)
        self.used = True
        return self.act, self.session

    @property
    def segments(self) -> list[Segment]:
        """One for each agent that had its turn, in their order, those that are not trained on last."""
        names = [speaker.name for speaker in self.playing.team.speakers]
        parts = [self._of(name, part) for name, run in zip(names, self.spoken, strict=False) for part in run.segments]
        if self.acted:
            parts += [self._of(self.playing.team.actor, part) for part in super().segments]
        ordered = sorted(parts, key=lambda part: not part.trained)
        last = ordered.index(parts[len(names) - 1]) if self.acted else 0
        return [replace(part, parent=last) if part.agent == self.playing.team.actor else part for part in ordered]

    def _of(self, name: str, part: Segment) -> Segment:
        if name not in self.playing.others:
            return replace(part, agent=name)
        speaker = self.playing.other.speaker if self.playing.other else None
        return replace(part, agent=name, speaker=speaker, trained=self.playing.trained)


def word_of(messages: Sequence[Message]) -> str:
    """What an agent said; nothing if it came to no end."""
    return next((message.content.strip() for message in messages if message.role is Role.ASSISTANT), "")


def shown(agent: str, word: str) -> str:
    """What later agents read of it, after the task."""
    return f"{agent}: {word}"
