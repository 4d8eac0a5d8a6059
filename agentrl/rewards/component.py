"""Reward components of the user's own, which are added to what the environment gives."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from schemas.choice import OneOf
from schemas.task import Task
from schemas.trajectory import RewardComponent, Trajectory


class Reward(BaseModel):
    """One component of the reward. The fields of a class that is derived from this one are its settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    weight: float = Field(1.0, description="the reward grows by this times the value")
    name: str = Field("", description="of the component in the rows; the class's name if it is empty")

    @abstractmethod
    def value(self, rollout: Trajectory, task: Task) -> float:
        """What a rollout is worth. ``rollout`` has the environment's reward and ``final_state`` already."""

    @property
    def component(self) -> str:
        """The component's name in the rows."""
        return self.name or self.type.rpartition(":")[2]


def _names_differ(rewards: list[Reward]) -> list[Reward]:
    names = [one.component for one in rewards]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two components are called {doubled[0]!r}; give one another name")
    return rewards


if TYPE_CHECKING:
    Rewards = list[Reward]
else:
    Rewards = Annotated[list[Annotated[Any, OneOf("reward", {}, Reward)]], AfterValidator(_names_differ)]


def with_rewards(rollout: Trajectory, task: Task, rewards: Sequence[Reward]) -> Trajectory:
    """A rollout with these components besides those that it has, and their weighted sum added to its reward.

    Raises ValueError that names the component if a value is no finite number, or if the environment has a component of
    that name.
    """
    if not rewards or rollout.reward is None:
        return rollout
    there = {component.name for component in rollout.reward_components}
    added = []
    for one in rewards:
        value = float(one.value(rollout, task))
        if not math.isfinite(value):
            raise ValueError(f"reward {one.component} of {rollout.trajectory_id} is {value}; give a finite number")
        if one.component in there:
            raise ValueError(f"environment {rollout.env} has a component {one.component!r} already; set its name")
        added.append(RewardComponent(name=one.component, value=value, weight=one.weight))
    total = rollout.reward + sum(component.value * component.weight for component in added)
    return rollout.model_copy(update={"reward": total, "reward_components": [*rollout.reward_components, *added]})
