"""Rewards by name. A stage's ``rewards`` are a list of components, each ``{type, weight, ...settings}``; one of the
user's own is named ``module:Class`` (:class:`agentrl.rewards.component.Reward`).

To add a component, write its class and name it in the table below.
"""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from agentrl.rewards.component import Reward, check_names, check_shares
from agentrl.schemas.choice import OneOf

REWARDS = {
    "environment": "agentrl.rewards.component:EnvironmentReward",
    "exact": "agentrl.rewards.verifiers:ExactAnswer",
    "f1": "agentrl.rewards.verifiers:F1",
    "math": "agentrl.rewards.mathematics:Mathematics",
    "tests": "agentrl.rewards.verifiers:TestReport",
    "state": "agentrl.rewards.verifiers:FinalState",
    "format": "agentrl.rewards.behaviour:Form",
    "tool_use": "agentrl.rewards.behaviour:ToolUse",
    "tool_match": "agentrl.rewards.behaviour:ToolMatch",
    "safety": "agentrl.rewards.behaviour:Safety",
    "length_linear": "agentrl.rewards.length:LinearLength",
    "length_sigmoid": "agentrl.rewards.length:SigmoidLength",
    "overlong": "agentrl.rewards.length:OverlongPunishment",
    "confidence": "agentrl.rewards.confidence:Confidence",
    "self_consistency": "agentrl.rewards.consistency:SelfConsistency",
    "judge": "agentrl.rewards.judge:Judge",
    "ranking": "agentrl.rewards.judge:Ranking",
}
"""``type`` -> ``module:Class``."""


def _added_to_the_environments(rewards: list[Reward]) -> list[Reward]:
    if any(reward.type == "environment" for reward in rewards):
        raise ValueError("the environment's reward counts already, with weight 1; leave `environment` out here")
    check_shares(rewards)
    return rewards


if TYPE_CHECKING:
    Components = list[Reward]
    Rewards = list[Reward]
else:
    Components = Annotated[
        list[Annotated[Any, OneOf("reward", REWARDS, Reward)]],
        AfterValidator(check_names),
    ]
    """Type of a config field that holds a whole reward."""
    Rewards = Annotated[Components, AfterValidator(_added_to_the_environments)]
    """Type of a config field that holds what is added to the environment's reward."""
