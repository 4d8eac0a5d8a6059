"""What rollouts need of an environment: tasks, and episodes that answer what a policy says and score it.

An environment of one's own may be a plain synchronous class instead (:mod:`agentrl.environments.adapted`).
"""

import re
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from random import Random
from time import monotonic
from typing import Any, Protocol

from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall, Trajectory

FORMAT_ERROR = "format_error"
"""``name`` of the user turn that answers a turn whose calls cannot be read. No environment has seen that turn."""

MAX_STEPS = 32
"""Assistant messages of an episode, if its environment does not say ``max_steps``."""


@dataclass(frozen=True)
class Observation:
    """What a tool call returned. ``error`` marks a call that the tool refused, ``reward`` is that of this call, if the
    environment gives one, and ``done`` ends the episode: calls after it are not made. ``seconds`` is the wall time of
    the call."""

    content: str
    error: bool = False
    reward: float | None = None
    done: bool = False
    seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Score:
    """The outcome of an episode: weighted reward components, and whether it counts as solved. Without components, the
    reward is 1 for a success and 0 for a failure.

    ``state`` is what a verifier needs to score the episode again without the environment; JSON-serialisable. If tasks
    have subgoals, ``subgoals`` in it lists for each of them, in order, the number (from 0) of the tool call that
    reached it, or None if none did. ``credit: subgoal`` reads it.
    """

    success: bool
    components: tuple[RewardComponent, ...] = ()
    state: Any = None

    def __post_init__(self) -> None:
        given = list(self.components)
        if not all(isinstance(component, RewardComponent) for component in given):
            raise TypeError(f"components are RewardComponent(name=..., value=..., weight=...), not {given!r:.80}")
        if not given:  # a sum of nothing would be 0 for successes too, and teach nothing
            given = [RewardComponent(name="success", value=float(self.success))]
        object.__setattr__(self, "components", tuple(given))
        if not isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}; values and weights of components are finite numbers")

    @property
    def reward(self) -> float:
        return sum(component.value * component.weight for component in self.components)


@dataclass(frozen=True)
class Step:
    """What answers an assistant message: tool results, user turns, or nothing. ``reward`` is that of this step, if the
    environment gives one. ``done`` ends the episode; so does a step without messages. Numbers in ``info`` are summed
    over the episode: ``tool_errors`` counts calls that were refused. ``seconds`` are the wall times of the calls that
    ``messages`` answer, one for each message, or none: then the time of a single call is that of the step."""

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    info: Mapping[str, int] = field(default_factory=dict)
    seconds: Sequence[float | None] = field(default=(), compare=False)

    def timed(self, seconds: float) -> "Step":
        """The step after so many seconds."""
        alone = len(self.messages) == 1 and self.messages[0].role is Role.TOOL
        return replace(self, seconds=[seconds]) if alone and not self.seconds else self

    def known(self, first: int) -> dict[int, float]:
        """The seconds that are known, by numbers of messages of which ``first`` is that of the first one here."""
        return {first + number: seconds for number, seconds in enumerate(self.seconds) if seconds is not None}


class Episode(Protocol):
    """One attempt at one task. Its methods must not block: run what may block in ``asyncio.to_thread``.

    An exception of any method is a failure of the environment: it ends this episode alone, as ``env_error``, or if it
    is an :class:`agentrl.schemas.trajectory.InfrastructureError`, as ``infra_error``. It may have the methods of
    :class:`Restorable`.
    """

    opening: list[Message]
    """The messages that the policy sees first."""
    tools: str
    """JSON of the tools on offer."""

    async def step(self, message: Message) -> Step:
        """Answer an assistant message. Unknown tools and bad arguments are observations, never exceptions."""
        ...

    async def score(self) -> Score | None:
        """Score the episode as it is now; it may have ended without an answer. None is unscored."""
        ...

    async def close(self) -> None:
        """Free what the episode holds."""
        ...


class Restorable(Protocol):
    """An episode whose state can be kept, and gone back to (:mod:`agentrl.environments.forks`)."""

    async def snapshot(self) -> Any:
        """Its state now, which later steps do not change."""
        ...

    async def restore(self, state: Any) -> None:
        """Go on from a snapshot of an episode of the same task."""
        ...


class Environment(Protocol):
    """A family of tasks. It may have ``max_steps``, the assistant messages of an episode; ``format_retries``, how many
    turns of an episode may have calls that cannot be read, each of which is answered by what is wrong with it; and
    ``replayable``: True says that the same messages always get the same answers, so that an episode can be made
    again. What it holds open is freed by ``async def close()``, if it has that."""

    name: str
    version: str

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks for each split, disjoint between splits. Raises ValueError if that many do not exist."""
        ...

    async def reset(self, task: Task) -> Episode:
        """A new attempt at a task."""
        ...


class PlainEnvironment(Protocol):
    """A synchronous class that is adapted (:mod:`agentrl.environments.adapted`)."""

    name: str
    version: str

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """As those of an environment."""
        ...

    def episode(self, task: Task) -> Any:
        """A new attempt at a task."""
        ...


class Demonstrator(Protocol):
    """An environment that comes with a scripted expert."""

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """Assistant messages of one attempt; the messages that answer each are sent back into the generator."""
        ...


class NoTaskError(ValueError):
    """A text that somebody proposes is no task. The message is a word for why, by which stages count it."""


def not_a_task(why: str = "") -> str:
    """What stages count a proposal as that is no task, with a word for why if the environment gave one."""
    return f"not_a_task_{why}" if why else "not_a_task"


class Advised(Protocol):
    """An episode that knows what an expert would do next, from wherever it is."""

    def advise(self) -> Message:
        """The expert's next turn."""
        ...

    def stray(self, random: Random) -> Message:
        """A turn at random, as a mistake of the expert."""
        ...


class Reflecting(Protocol):
    """An environment that can say what to do otherwise after a failed attempt."""

    def reflect(self, row: Trajectory, task: Task) -> str:
        """A note for later attempts at the same task; nothing if there is nothing to say."""
        ...


def tool_message(call: ToolCall, content: str, error: bool | None = None) -> Message:
    """The message that answers a call. ``error`` says whether it reports a failure; None if that is not known."""
    return Message(role=Role.TOOL, content=content, tool_call_id=call.id, name=call.name, error=error)


def answered(message: Message, observations: Sequence[Observation], **info: int) -> Step:
    """The step of what the first calls of an assistant message returned. Their rewards are summed; ``info`` is added to
    the number of refused calls."""
    answers = [
        tool_message(call, seen.content, bool(seen.error))
        for call, seen in zip(message.tool_calls, observations, strict=False)
    ]
    rewards = [seen.reward for seen in observations if seen.reward is not None]
    errors = sum(seen.error for seen in observations)
    done = any(seen.done for seen in observations)
    seconds = [seen.seconds for seen in observations[: len(answers)]]
    return Step(answers, sum(rewards) if rewards else None, done, {"tool_errors": errors, **info}, seconds)


async def timed(call: Awaitable[Observation]) -> Observation:
    """The observation of a call, with the seconds that it took."""
    began = monotonic()
    return replace(await call, seconds=monotonic() - began)


def answer_calls(call: Callable[[ToolCall], Observation], message: Message) -> Step:
    """The step that answers all calls of an assistant message, in their order, up to one that ends the episode."""
    observations: list[Observation] = []
    for tool_call in message.tool_calls:
        began = monotonic()
        observations.append(replace(call(tool_call), seconds=monotonic() - began))
        if observations[-1].done:
            break
    return answered(message, observations)


_CUT = re.compile(r"\n\[cut here: the whole has ([0-9]+) characters\]$")


def cut(text: str, longest: int) -> str:
    """The text, or if it has more than ``longest`` characters (100 or more), the beginning of it and how many it has:
    ``longest`` characters together. What was cut once is not cut again, and if it is cut shorter, it still says how
    many characters it had at first."""
    if len(text) <= longest:
        return text
    before = _CUT.search(text)
    note = f"\n[cut here: the whole has {before[1] if before else len(text)} characters]"
    return text[: max(0, longest - len(note))] + note


def is_cut(text: str) -> bool:
    """Whether :func:`cut` has cut a text."""
    return bool(_CUT.search(text))
