"""Judges whose quality is known, for the experiments `rank` and `guided` of ``methods.py``."""

import json
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from agentrl.engines import EngineChoice
from agentrl.engines.base import Session, Turn
from agentrl.engines.configs import EngineConfig
from agentrl.environments.rooms.house import NAMES, House
from agentrl.rewards.component import Grade
from agentrl.rewards.judge import Ranking
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, Trajectory

if TYPE_CHECKING:
    from agentrl.engines.base import Engine
    from agentrl.models.policy import Policy


class Guide(EngineConfig):
    """A judge of the states of walks in `rooms`, who knows the map: 0.9 for each door to the goal, multiplied, or
    whether a walk ended there. With probability 1 - ``right`` it says any number."""

    exact: ClassVar[bool] = False
    type: str
    right: float = Field(0.8, ge=0, le=1)

    def build(self, policy: "Policy | None") -> "Engine":
        return _Knowing(self.right)


class _Knowing:
    """Answers with text alone."""

    exact, reproducible, version = False, True, 0

    def __init__(self, right: float) -> None:
        self.right, self.house = right, House(len(NAMES))

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, *_: object, **__: object) -> Turn:
        asked = session.messages[-1].content
        chance = Random(asked)
        value = self._value(json.loads(asked.split("\n\n")[1])) if chance.random() < self.right else chance.random()
        return Turn([], [], [], "stop", Message(role=Role.ASSISTANT, content=json.dumps({"value": value})))

    async def close(self) -> None:
        """There is nothing to close."""

    def _value(self, shown: dict[str, Any]) -> float:
        start, _, goal = shown["task"].rstrip("?").split(" ")
        heard = [turn["content"] for turn in shown["transcript"] if turn["role"] == "tool"]
        here = next((room for room in reversed(heard) if room in self.house.numbers), start)
        if shown["transcript"] and _ended(shown["transcript"]):
            return float(here == goal)
        return float(0.9 ** self.house.distances(self.house.numbers[goal])[self.house.numbers[here]])


def _ended(walk: list[dict[str, Any]]) -> bool:
    return walk[-1]["role"] == "assistant" and "calls" not in walk[-1]


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
            replace(item, value=(item.value or 0.0) - rollout.scored_reward())
            for item, rollout in zip(places, group, strict=True)
        ]

    async def ask(self, position: int, prompt: str, number: int) -> dict[str, Any]:
        asked, listed, _ = prompt.split("\n\n")
        goal = json.loads(asked.split("\n")[0].partition(": ")[2]).rstrip("?").rpartition(" ")[2]
        chance = Random(f"{position} {number} {prompt}")
        walks = [json.loads(line.partition(": ")[2]) for line in listed.split("\n")]
        verdicts = [(chance.random() < self.right) == _came_to(goal, walk) for walk in walks]
        order = sorted(range(len(walks)), key=lambda value: (not verdicts[value], chance.random()))
        return {"ranking": [1 + item for item in order]}


def _came_to(goal: str, walk: list[dict[str, Any]]) -> bool:
    """Whether a walk ends with words in its goal."""
    return len(walk) > 1 and _ended(walk) and walk[-2]["content"] == goal
