"""The agents of a team that an online stage does not train: another model, which is an input."""

from typing import TYPE_CHECKING, NamedTuple

from agentrl.engines.configs import EmbeddedConfig, EngineConfig
from agentrl.pipelines.handles import Model
from agentrl.pipelines.parts.common import load_policy
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.team import Playing, Team

if TYPE_CHECKING:
    from agentrl.engines.base import Sampling
    from agentrl.models.policy import Policy
    from agentrl.pipelines.stages.online_config import OnlineConfig
    from agentrl.rollouts.acting import Act


class Frozen(NamedTuple):
    """The inputs of an online stage that are agents of its team."""

    speaker: Model | None = None
    actor: Model | None = None

    def check(self, team: Team | None) -> None:
        """Raise ValueError unless some agent of the team is trained, and each input is one that acts once."""
        given = [name for name, model in self._asdict().items() if model is not None]
        if given and team is None:
            raise ValueError(f"inputs.{given[0]} is wired, and team is not set; set team, or unwire it")
        if len(given) > 1:
            raise ValueError(
                "inputs.speaker and inputs.actor are wired, so no agent would be trained; unwire the one that is model"
            )
        if given and team and team.acts > 1:
            raise ValueError(
                f"inputs.{given[0]} is wired, and team.acts is {team.acts}: alternatives after the same words are "
                "those of agents that are one model; set acts: 1, or unwire it"
            )

    def playing(self, config: "OnlineConfig") -> Playing | None:
        """The team in rollouts, with what the frozen agents act by."""
        team, model = config.team, self.speaker or self.actor
        if team is None or model is None:
            return Playing(team) if team else None
        others = [speaker.name for speaker in team.speakers] if self.speaker else [team.actor]
        embedded = config.engine if isinstance(config.engine, EmbeddedConfig) else EmbeddedConfig(schedule="free")
        policy = load_policy(model, embedded)
        act = acting_as(policy, embedded, config.sampling(policy), config.limits)
        return Playing(team, frozenset(others), act, trained=False)


def acting_as(policy: "Policy", engine: EngineConfig, sampling: "Sampling", limits: Limits) -> "Act":
    """What agents act by that are another model than the one that is rolled out."""
    from agentrl.rollouts.acting import Act

    return Act(engine.build(policy), policy.codec, sampling, limits, speaker=policy)
