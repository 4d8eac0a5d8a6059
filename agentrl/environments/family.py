"""The ground of a family of tasks: what draws them, and episodes whose tools are typed methods.

A family is a class derived from :class:`Family` and an episode derived from :class:`ToolEpisode`. The family gives
drafts of tasks; the episode gives tools, the outcome, and, if it has an expert, ``advise``. Ids, splits, checks of
arguments, injected faults, demonstrations with noise, snapshots and the counts of a row come from here.

Nothing here blocks, so episodes run on the event loop itself. A tool that waits is a coroutine; tools that compute for
long belong in a plain class (:mod:`agentrl.environments.adapted`) or in a sandbox (:mod:`agentrl.sandbox`).
"""

import copy
import json
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from agentrl.environments.base import Observation, Score, Step, answered, timed
from agentrl.environments.faults import Faults
from agentrl.environments.scripted import random_turn
from agentrl.environments.task_splits import Draft, digest, draw
from agentrl.environments.tools import answer_async, schemas
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall


class FamilyConfig(BaseModel):
    """Settings that every family has. Those of one family are the fields of a class that is derived from this one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: list[int] | None = Field(None, min_length=1, description="levels of the tasks that are drawn; None: all")
    faults: Faults = Field(Faults(), description="faults of tools, injected with these probabilities")


class Family:
    """A family of tasks. ``levels`` are the shares of the levels among its tasks; ``episode`` is the class of its
    attempts, and ``max_steps`` the assistant messages that one may have."""

    name: str
    version: str
    max_steps: int
    verifier: str = "state"
    format_retries = 3
    replayable = True
    """The same calls give the same answers, faults included."""
    levels: Mapping[int, float]
    of_no_task: frozenset[str] = frozenset({"faults"})
    """Settings on which no task depends: the same tasks may be tried with faults and without."""
    episode: type["ToolEpisode[Any]"]

    def __init__(self, config: FamilyConfig) -> None:
        self.config = config
        self.tools = schemas(self.episode)
        if unknown := set(config.levels or ()) - set(self.levels):
            raise ValueError(
                f"levels: {self.name} has no level {min(unknown)}; it has {min(self.levels)} to {max(self.levels)}"
            )

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        """Tasks of one level, without end or until there are no more; one may come twice."""
        raise NotImplementedError

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Tasks for each split, none of them twice. Raises ValueError if ``sizes`` ask for more than exist."""
        shares = {level: self.levels[level] for level in self.config.levels or self.levels}
        return draw(self._variant, sizes, seed, shares, self.drafts, self._task)

    async def reset(self, task: Task) -> "ToolEpisode[Any]":
        return self.episode(self, task)

    def derived(self, task: Task, draft: Draft, level: int) -> Task:
        """A task that was made from another one: of its split, with an id that says so."""
        made = self._task(
            draft, f"{task.task_id}+{digest(draft.prompt, draft.truth, draft.metadata)}", task.split, level
        )
        return made.model_copy(update={"env": task.env})

    def _task(self, draft: Draft, task_id: str, split: str, level: int) -> Task:
        return draft.task(task_id, self.name, split, level, self.tools, self.verifier)

    @property
    def _variant(self) -> str:
        """The name, and the settings on which tasks depend."""
        given = self.config.model_dump(mode="json", exclude_defaults=True, exclude=set(self.of_no_task))
        return self.name + json.dumps({"version": self.version, **given}, sort_keys=True)


F = TypeVar("F", bound=Family)


class ToolEpisode(Generic[F]):
    """One attempt at one task. Methods under ``@tool`` are its tools; they may add to ``earned``, the reward of the
    step, and set ``done``, which ends the episode."""

    def __init__(self, family: F, task: Task) -> None:
        self.family = family
        self.task = task
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.tools = task.tools
        self.calls = 0
        self.answer: str | None = None
        self.earned: float | None = None
        self.done = False

    def outcome(self) -> Score:
        """The score of the episode as it is now; it may have ended without an answer."""
        raise NotImplementedError

    def said(self, text: str) -> Step | Awaitable[Step]:
        """What answers a message without calls. It is the answer, which ends the episode, unless a family says
        otherwise. It may be a coroutine."""
        self.answer = text
        return Step(done=True)

    def observed(self, call: ToolCall, seen: Observation) -> None:
        """Called after each call, to reward or count it."""

    def stray(self, random: Random) -> Message:
        """A turn at random: what a noisy expert does by mistake, and a random policy always."""
        return random_turn(self, random)

    async def step(self, message: Message) -> Step:
        self.earned = None
        if not message.tool_calls:
            step = self.said(message.content)
            step = await step if isinstance(step, Awaitable) else step
            return replace(step, reward=self.earned)
        observations: list[Observation] = []
        faults = 0
        for call in message.tool_calls:
            fault = self.family.config.faults.draw(self.task.task_id, self.calls)
            faults += fault is not None
            observations.append(await timed(self._called(call, fault)))
            if self.done:
                break
        step = answered(message, observations, faults=faults)
        return replace(step, reward=self.earned, done=self.done)

    async def score(self) -> Score:
        return self.outcome()

    async def close(self) -> None:
        pass

    async def snapshot(self) -> dict[str, Any]:
        """The state of the episode, apart from it: later steps do not change it."""
        return self._copied(vars(self))

    async def restore(self, state: dict[str, Any]) -> None:
        """Go back to a snapshot, which may be restored again."""
        vars(self).clear()
        vars(self).update(self._copied(state))

    def earn(self, reward: float) -> None:
        self.earned = reward + (self.earned or 0.0)

    def calling(self, name: str, **arguments: Any) -> Message:
        """An assistant message that calls one tool."""
        call = ToolCall(id=f"call_{self.calls}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))
        return Message(role=Role.ASSISTANT, tool_calls=[call])

    def saying(self, text: str) -> Message:
        """An assistant message without a call."""
        return Message(role=Role.ASSISTANT, content=text)

    async def _called(self, call: ToolCall, fault: str | None) -> Observation:
        number, self.calls = self.calls, self.calls + 1
        faults = self.family.config.faults
        if fault is None or fault == "truncated":
            seen = await answer_async(self, call)
            seen = faults.cut(seen) if fault else seen
        else:
            seen = faults.refusal(fault, self.task.task_id, number)
        if seen.reward is not None:
            self.earn(seen.reward)
        self.done |= seen.done
        self.observed(call, seen)
        return seen

    @staticmethod
    def _copied(state: dict[str, Any]) -> dict[str, Any]:
        shared = {id(state[name]): state[name] for name in ("family", "task", "opening", "tools")}
        return copy.deepcopy(state, shared)
