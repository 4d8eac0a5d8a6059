"""What the engine needs of an environment: tasks, tools, and episodes that answer tool calls and score an answer."""

from collections.abc import Generator
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from schemas.task import Task
from schemas.trajectory import Message, RewardComponent, Role, ToolCall


@dataclass(frozen=True)
class Observation:
    """What a tool call returned. ``error`` marks a call that the tool refused."""

    content: str
    error: bool = False


@dataclass(frozen=True)
class Score:
    """The outcome of an episode: weighted reward components, and whether it counts as solved."""

    success: bool
    components: tuple[RewardComponent, ...]

    @property
    def reward(self) -> float:
        return sum(component.value * component.weight for component in self.components)


class Episode(Protocol):
    """One attempt at one task. Holds the environment's state."""

    def opening(self) -> list[Message]:
        """The messages that the policy sees first."""
        ...

    def call(self, call: ToolCall) -> Observation:
        """Answer one tool call. Unknown tools and bad arguments are observations with ``error``, never exceptions."""
        ...

    def score(self, answer: str | None) -> Score:
        """Score the final answer; None when the episode ended without one."""
        ...

    def state(self) -> dict[str, Any]:
        """What a verifier needs to score the episode again without the environment; JSON-serialisable.

        If tasks have subgoals, ``subgoals`` lists for each of them, in order, the number (from 0) of the tool call that
        reached it, or None if none did. ``credit: subgoal`` reads it.
        """
        ...


def answer_calls(episode: Episode, message: Message) -> tuple[list[Message], list[Observation]]:
    """Tool messages that answer an assistant message's calls, in their order, and the observations that they carry."""
    observations = [episode.call(call) for call in message.tool_calls]
    answers = [
        Message(role=Role.TOOL, content=observation.content, tool_call_id=call.id, name=call.name)
        for call, observation in zip(message.tool_calls, observations, strict=True)
    ]
    return answers, observations


class Environment(Protocol):
    """A family of tasks. ``max_steps`` counts assistant messages."""

    name: str
    version: str
    max_steps: int
    tools: list[dict[str, Any]]

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks for each split, disjoint between splits. Raises ValueError if that many do not exist."""
        ...

    def episode(self, task: Task) -> Episode: ...


class Demonstrator(Protocol):
    """An environment that comes with a scripted expert."""

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Observation], None]:
        """Assistant messages of one attempt; observations are sent back into the generator with ``send``."""
        ...
