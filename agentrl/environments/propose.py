"""``propose``: another environment, of which a task is proposed. A task of this one shows tasks of the other; the
policy's message is a new one, in the other's words. It succeeds if the other environment makes a task of it, by
``proposed(text, like, random)``: that is where programs run in a sandbox, if it is ``code``.

With ``tools`` the policy may call the other environment's tools before it proposes, as WebShaper's expander does: they
are those of an episode of the first task that is shown.

What a proposal is worth beyond that is for rollouts of its task to say, by the stage ``scores.from_proposals``.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import replace
from inspect import isawaitable, iscoroutinefunction
from random import Random
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.base import MAX_STEPS, Episode, NoTaskError, Score, Step
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role


class ProposeEpisode:
    """One proposal. ``made`` in its state is the task that became of it, None if it is no task; ``why`` says why, if
    the other environment does."""

    def __init__(self, environment: "Propose", task: Task) -> None:
        self.environment, self.task = environment, task
        self.opening = [Message(role=Role.USER, content=task.prompt)]
        self.tools = task.tools
        self.text: str | None = None
        self.inside: Episode | None = None

    async def step(self, message: Message) -> Step:
        if message.tool_calls and self.environment.tools:
            if self.inside is None:
                self.inside = await self.environment.other.reset(shown_by(self.task)[0])
            step = await self.inside.step(message)
            return replace(step, reward=None)  # it was given for another task
        self.text = None if message.tool_calls else message.content.strip()
        return Step(done=True)

    async def score(self) -> Score:
        made, why = None, ""
        try:
            made = await self.environment.made(self.text, self.task) if self.text else None
        except NoTaskError as error:
            why = str(error)
        state = {"proposal": self.text, "made": made and made.model_dump(), **({"why": why} if why else {})}
        return Score(made is not None, (RewardComponent(name="valid", value=float(made is not None)),), state)

    async def close(self) -> None:
        if self.inside is not None:
            await self.inside.close()


class Propose:
    """The environment; see the module's docstring."""

    name = "propose"
    version = "1"

    def __init__(
        self,
        env: Annotated[str, Field(description="the other environment, as tasks name it")] = "",
        tools: Annotated[
            bool,
            Field(description="its tools may be called before the proposal, in an episode of the first task"),
        ] = False,
    ) -> None:
        from agentrl.environments import load_environment

        if not env:
            raise ValueError("tasks of propose are those of another environment; make them by tasks.to_propose")
        self.env = env
        self.other: Any = load_environment(env)
        if not hasattr(self.other, "proposed"):
            raise ValueError(f"env {env!r} takes no proposals; give it proposed(text, like, random) -> a task or None")
        if tools and not iscoroutinefunction(self.other.reset):
            raise ValueError(f"env {env!r} is no environment with episodes of its own; set tools: false")
        self.tools, self.max_steps = tools, getattr(self.other, "max_steps", MAX_STEPS) if tools else 1

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        raise ValueError("tasks of propose are made of tasks; use the stage tasks.to_propose, not tasks.generate")

    def asking(self, shown: Sequence[Task], task_id: str) -> Task:
        """The task of proposing one that is like those ``shown``, which are at least one."""
        texts = [task.prompt for task in shown]
        form = getattr(self.other, "proposal", "")
        return Task(
            task_id=task_id,
            env=f"{self.name}{json.dumps({'env': self.env, **({'tools': True} if self.tools else {})})}",
            tools=shown[0].tools if self.tools else "[]",
            split=shown[0].split,
            prompt="\n".join(["Propose another task.", *texts]) + (f"\nReply with {form}" if form else ""),
            verifier="proposed",
            metadata=json.dumps({"shown": [task.model_dump() for task in shown]}),
        )

    async def made(self, text: str, task: Task) -> Task | None:
        """The task that a text becomes, of the split of the tasks that were shown; None if it is none.

        Raises NoTaskError if it is none and the other environment says why, and TypeError if that returns something
        else.
        """
        like, *_ = shown_by(task)
        made = self.other.proposed(text, like, Random(f"{task.task_id} {text}"))
        made = await made if isawaitable(made) else made
        if not isinstance(made, Task | None):
            raise TypeError(f"proposed() of env {self.env!r} returned {made!r:.80}; return a Task, or None for no task")
        return made and made.model_copy(update={"env": like.env, "split": like.split})

    async def reset(self, task: Task) -> ProposeEpisode:
        return ProposeEpisode(self, task)

    async def close(self) -> None:
        if hasattr(self.other, "close"):
            await self.other.close()

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """A variant of a task that is shown, by ``vary`` of the other environment; with probability ``noise`` that task
        itself, which is nothing new. With ``tools``, or if its tasks have none, it is what the other environment's
        ``demonstrate_proposal`` says, if it has that."""
        first = shown_by(task)[0]
        if hasattr(self.other, "demonstrate_proposal") and (self.tools or first.tools == "[]"):
            yield from self.other.demonstrate_proposal(first, noise, random)
            return
        if not hasattr(self.other, "vary") or hasattr(self.other, "proposal"):
            raise ValueError(f"env {self.env!r} makes no variants whose prompts are proposals; nobody can demonstrate")
        like = random.choice(shown_by(task))
        variant = None if random.random() < noise else self.other.vary(like, random)
        yield Message(role=Role.ASSISTANT, content=(variant or like).prompt)


def shown_by(task: Task) -> list[Task]:
    """The tasks that a task of proposing shows."""
    return [Task.model_validate(shown) for shown in json.loads(task.metadata)["shown"]]
