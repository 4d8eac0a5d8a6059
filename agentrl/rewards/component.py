"""Components of a reward: what each is worth, how they add up, and that the outcome carries at least half."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.schemas.annotations import ADDED
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import RewardComponent, Trajectory


@dataclass(frozen=True)
class Grade:
    """What one component gives a rollout. ``value`` is None if it cannot be graded, and ``why`` says why. ``details``
    are recorded beside the value, with weight 0."""

    value: float | None
    details: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


class Reward(BaseModel):
    """One component of the reward. The fields of a class that is derived from this one are its settings.

    Values lie in [-1, 1], so that weights say how much each component counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    weight: float = Field(1.0, allow_inf_nan=False, description="the reward grows by this times the value")
    name: str = Field("", description="of the component in the rows; the class's name if it is empty")

    @abstractmethod
    def value(self, rollout: Trajectory, task: Task) -> float | Grade:
        """What a rollout is worth. ``rollout`` has the environment's reward and ``final_state`` already."""

    async def grades(self, group: Sequence[Trajectory], task: Task) -> list[Grade]:
        """A grade for each rollout of a group, in their order: by default what :meth:`value` gives, called in a thread.
        A component that compares the rollouts of a group, or asks a model, overrides it."""
        return await asyncio.to_thread(lambda: [self._grade(rollout, task) for rollout in group])

    def _grade(self, rollout: Trajectory, task: Task) -> Grade:
        given = self.value(rollout, task)
        if isinstance(given, Grade):
            return given
        try:
            return Grade(float(given))
        except (TypeError, ValueError):
            name = f"reward {self.component} of {rollout.trajectory_id}"
            raise TypeError(
                f"{name} is {given!r:.80}; give a number, or Grade(None, why=...) if there is none"
            ) from None

    def review(self, graded: Sequence[tuple[float, bool | None]]) -> dict[str, float]:
        """Metrics of all values of a stage, each with the success of its rollout (None: unknown). It raises if the
        component is not to be trusted."""
        return {}

    async def close(self) -> None:
        """Free what the component holds. It may be used again afterwards."""

    @property
    def is_outcome(self) -> bool:
        """Whether it says how well the task was solved. All other components together may count as much, and no
        more."""
        return False

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole reward: what the environment gave counts with weight 0, and success stays what it
        was."""
        return False

    def solved(self, value: float) -> bool:
        """Whether an outcome of this value counts as a success."""
        return value >= 1.0

    @property
    def component(self) -> str:
        """The component's name in the rows."""
        return self.name or self.type.rpartition(":")[2]


class Verifier(Reward):
    """A component that compares what a rollout achieved with what its task asks for. It is the outcome."""

    solved_from: float = Field(1.0, gt=0, le=1, description="value from which on the task counts as solved")

    @property
    def is_outcome(self) -> bool:
        return True

    def solved(self, value: float) -> bool:
        return value >= self.solved_from


class Unverified(Reward):
    """A component that says what the policy believes, and not whether it is right."""

    alone: Annotated[bool, ADDED] = Field(
        False,
        description="it is the whole reward: what the environment gave is recorded with weight 0, and success stays as "
        "verified. The file must then evaluate a policy that learned from it",
    )

    @property
    def is_whole(self) -> bool:
        return self.alone


class EnvironmentReward(Verifier):
    """What the environment gave, as the rollout's row has it: for ``trajectories.score``, whose rewards replace the
    environment's. Its value is the stored reward, whatever its range."""

    type: Literal["environment"] = "environment"

    def value(self, rollout: Trajectory, task: Task) -> float | Grade:
        return Grade(rollout.reward, why="" if rollout.reward is not None else "the environment gave no reward")


def check_names(rewards: list[Reward]) -> list[Reward]:
    """Raises ValueError if two components have one name."""
    names = [reward.component for reward in rewards]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two components are called {doubled[0]!r}; give one another name")
    return rewards


def check_shares(rewards: Sequence[Reward], environment: float = 1.0) -> None:
    """Raises ValueError if the outcome (what the environment gives, with the weight ``environment``, and verifiers)
    carries less than half of the reward, or if a component that is to be the whole reward is not alone."""
    if whole := [reward for reward in rewards if reward.is_whole]:
        if len(rewards) > 1:
            raise ValueError(
                f"{whole[0].component} has alone: true, and {len(rewards) - 1} other components are named; leave these "
                "or alone out"
            )
        return
    others = [reward for reward in rewards if not reward.is_outcome]
    outcome = environment + sum(abs(reward.weight) for reward in rewards if reward.is_outcome)
    rest = sum(abs(reward.weight) for reward in others)
    if rest <= outcome * (1 + 1e-9) and outcome > 0:
        return
    named = ", ".join(f"{reward.component} {abs(reward.weight):g}" for reward in others) or "no component"
    raise ValueError(
        f"the outcome has weight {outcome:g} and the rest {rest:g} ({named}): the outcome carries at least half, or a "
        f"policy learns to please the rest; "
        + (f"lower these weights to {outcome:g} together" if outcome > 0 else "name a verifier, or the environment's")
    )


@dataclass(frozen=True)
class Scored:
    """The reward of one rollout: None if it is unscored, and ``why`` says why."""

    reward: float | None
    components: list[RewardComponent]
    why: str = ""


async def graded(group: Sequence[Trajectory], task: Task, rewards: Sequence[Reward]) -> list[Scored]:
    """What each rollout of a group gets of ``rewards``: the weighted sum, and the components.

    Raises ValueError that names the component if a value is no finite number, or lies outside [-1, 1] although the
    component is no outcome.
    """
    by_reward = await asyncio.gather(*(reward.grades(group, task) for reward in rewards))
    results = []
    for index, rollout in enumerate(group):
        components, reasons = list[RewardComponent](), list[str]()
        for reward, grades in zip(rewards, by_reward, strict=True):
            grade = grades[index]
            if grade.value is None:
                reasons.append(f"{reward.component}: {grade.why or 'no value'}")
                continue
            _check_value(reward, grade.value, rollout)
            components.append(RewardComponent(name=reward.component, value=grade.value, weight=reward.weight))
            for detail, value in grade.details.items():
                components.append(RewardComponent(name=f"{reward.component}.{detail}", value=float(value), weight=0.0))
        total = sum(component.value * component.weight for component in components)
        results.append(Scored(None if reasons else total, components, "; ".join(reasons)))
    return results


def _check_value(reward: Reward, value: float, rollout: Trajectory) -> None:
    name = f"reward {reward.component} of {rollout.trajectory_id}"
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; give a finite number")
    if not reward.is_outcome and abs(value) > 1 + 1e-9:
        raise ValueError(f"{name} is {value:g}; values lie in [-1, 1], and the weight says how much they count")


UNSCORED = "unscored: "
"""How the tag of a row begins that a component could not grade."""


async def with_rewards(group: Sequence[Trajectory], task: Task, rewards: Sequence[Reward]) -> list[Trajectory]:
    """The rollouts of a group with these components besides those that they have, and their weighted sum added to the
    reward; a component that is the whole reward takes its place. A rollout without a reward stays as it is. One that a
    component cannot grade becomes unscored, and a tag says why.

    Raises ValueError as :func:`graded` does, or if the environment has a component of that name.
    """
    scored = [row for row in group if row.reward is not None]
    given = {component.name for row in scored for component in row.reward_components}
    if doubled := sorted(given & {reward.component for reward in rewards}):
        raise ValueError(f"environment {task.env} has a component {doubled[0]!r} already; set its name")
    by_id = dict(zip((id(row) for row in scored), await graded(scored, task, rewards), strict=True)) if scored else {}
    whole = any(reward.is_whole for reward in rewards)
    return [_added(row, by_id[id(row)], whole) if id(row) in by_id else row for row in group]


def _added(row: Trajectory, more: Scored, whole: bool) -> Trajectory:
    given = [part.model_copy(update={"weight": 0.0}) if whole else part for part in row.reward_components]
    components = [*given, *more.components]
    if more.reward is None:
        tags = [*row.tags, f"{UNSCORED}{more.why}"]
        return row.model_copy(update={"reward": None, "reward_components": components, "tags": tags})
    before = 0.0 if whole else row.scored_reward()
    return row.model_copy(update={"reward": before + more.reward, "reward_components": components})
