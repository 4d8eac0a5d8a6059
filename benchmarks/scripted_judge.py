"""A judge whose quality is known, for the experiment `rank` of ``methods.py``."""

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from agentrl.engines import EngineChoice
from agentrl.engines.configs import EngineConfig
from agentrl.rewards.component import Grade
from agentrl.rewards.judge import Ranking
from schemas.task import Task
from schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.engines.base import Engine
    from agentrl.models.policy import Policy


class Nobody(EngineConfig):
    """In the place of an engine, for a judge that asks none."""

    exact: ClassVar[bool] = False
    type: str = "nobody"

    def build(self, policy: "Policy | None") -> "Engine":
        raise NotImplementedError("a scripted judge asks no engine")


class Scripted(Ranking):
    """Ranks walks in `rooms`: first those that it takes for walks to their goal, then the others, each in an order of
    chance. Its verdict of a walk is right with probability ``right``, drawn anew in each order. No model is asked."""

    type: str
    engines: list[EngineChoice] = Field([Nobody()])
    right: float = Field(0.8, ge=0, le=1)
    alone: bool = Field(False, description="places are the whole reward: what the environment gave is taken out")

    @property
    def is_outcome(self) -> bool:
        return self.alone

    async def grades(self, group: Sequence[Trajectory], task: Task) -> list[Grade]:
        places = await super().grades(group, task)
        if not self.alone:
            return places
        return [
            replace(one, value=(one.value or 0.0) - rollout.scored_reward())
            for one, rollout in zip(places, group, strict=True)
        ]

    async def ask(self, place: int, prompt: str, number: int) -> dict[str, Any]:
        asked, listed, _ = prompt.split("\n\n")
        goal = json.loads(asked.split("\n")[0].partition(": ")[2]).rstrip("?").rpartition(" ")[2]
        chance = Random(f"{place} {number} {prompt}")
        walks = [json.loads(line.partition(": ")[2]) for line in listed.split("\n")]
        verdicts = [(chance.random() < self.right) == _came_to(goal, walk) for walk in walks]
        order = sorted(range(len(walks)), key=lambda one: (not verdicts[one], chance.random()))
        return {"ranking": [1 + one for one in order]}


def _came_to(goal: str, walk: list[dict[str, Any]]) -> bool:
    """Whether a walk ends with words in its goal."""
    last = walk[-1]
    return len(walk) > 1 and last["role"] == "assistant" and "calls" not in last and walk[-2]["content"] == goal
