"""``gymnasium``: environments of the Gymnasium API whose actions are text or few, played in a conversation.

The policy acts by the tool ``act``. A task is a seed: two of one seed begin alike, and splits share none. Rewards of
steps are those of the environment, and their sum is the outcome.
"""

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from agentrl.environments.adapters.seeds import seeded
from agentrl.environments.base import Observation, Score
from agentrl.schemas.installation import install_hint, is_installed
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, ToolCall

if TYPE_CHECKING:
    from gymnasium import Env

_MARKED = re.compile(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

Text = Annotated[str, Field(description="what the policy is told before the first observation")]


class GymnasiumEnvironment:
    """``id`` is a registered environment, ``module:Name-v0`` to import its module first. Its observations are shown as
    text; if ``options`` say ``render_mode: ansi``, what it draws is shown, with what is marked by a colour in brackets.
    ``actions`` names those of a discrete space, in order; without names they are numbers. A task is solved if the
    rewards sum up to ``solved_from`` or more."""

    name = "gymnasium"
    version = "1"

    def __init__(
        self,
        id: Annotated[str, Field(description="of the environment, such as FrozenLake-v1", min_length=1)],
        options: Annotated[dict[str, Any], Field(description="keyword arguments of gymnasium.make")] = {},  # noqa: B006
        prompt: Text = "Act until the episode ends.",
        actions: Annotated[list[str] | None, Field(description="names of discrete actions")] = None,
        solved_from: Annotated[float, Field(description="sum of rewards from which on a task is solved")] = 1.0,
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 64,
    ) -> None:
        if not is_installed("gymnasium"):
            raise ValueError(f"environment gymnasium needs the package gymnasium; {install_hint('gymnasium')}")
        self.id, self.options, self.prompt, self.actions = id, options, prompt, actions
        self.solved_from, self.max_steps = solved_from, max_steps

    def make(self) -> "Env[Any, Any]":
        """A new environment of the package. Raises ValueError if the package has none of this name, or refuses the
        options."""
        import gymnasium

        try:
            return gymnasium.make(self.id, **self.options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"gymnasium refuses {self.id!r} with options {self.options}: {error}") from None

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Seeds for each split, from a block that belongs to ``seed``. Raises ValueError if the block is too small, or
        if the environment's actions have no text form."""
        env = self.make()
        offered = json.dumps([tool(self.names(env.action_space))])
        env.close()
        return seeded(self.id, self.name, self.prompt, offered, sizes, seed)

    def names(self, space: Any) -> list[str] | None:
        """Names of the actions, in order; None if an action is free text. Raises ValueError if they have no text
        form."""
        import gymnasium

        if isinstance(space, gymnasium.spaces.Text):
            return None
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise ValueError(f"{self.id} has actions of {space}; use one with Discrete or Text actions")
        names = self.actions or [str(number) for number in range(int(space.start), int(space.start + space.n))]
        if len(names) != int(space.n):
            raise ValueError(f"{self.id} has {space.n} actions, and {len(names)} names are given in `actions`")
        return names

    def episode(self, task: Task) -> "GymnasiumEpisode":
        return GymnasiumEpisode(self, task)


class GymnasiumEpisode:
    """One attempt: from ``reset`` with the task's seed to the end that the environment declares."""

    def __init__(self, environment: GymnasiumEnvironment, task: Task) -> None:
        self.environment, self.task = environment, task
        self.env = environment.make()
        self.space: Any = self.env.action_space
        self.names = environment.names(self.space)
        self.total, self.steps, self.ended = 0.0, 0, ""
        self.first, _ = self.env.reset(seed=json.loads(task.metadata)["seed"])

    def opening(self) -> list[Message]:
        return [Message(role=Role.USER, content=f"{self.task.prompt}\n\n{self._shown(self.first)}")]

    def call(self, call: ToolCall) -> Observation:
        arguments = call.parsed()
        if call.name != "act" or not isinstance(arguments, dict) or "action" not in arguments:
            return Observation('the only tool is act, with {"action": ...}', error=True)
        chosen_action = str(arguments["action"])
        if self.ended:
            return Observation("the episode has ended", error=True, done=True)
        if self.names and chosen_action not in self.names:
            return Observation(f"no action {chosen_action!r}; there are {', '.join(self.names)}", error=True)
        if not self.names and not self.space.contains(chosen_action):
            return Observation(f"{chosen_action!r} is no action of {self.space}", error=True)
        return self.act(self.names.index(chosen_action) + int(self.space.start) if self.names else chosen_action)

    def act(self, action: Any) -> Observation:
        """Do an action of the space, and see what comes of it."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.steps += 1
        self.total += float(reward)
        self.ended = "terminated" if terminated else "truncated" if truncated else ""
        return Observation(self._shown(observation), reward=float(reward), done=bool(self.ended))

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self.env.render_mode == "ansi":
            return _COLOUR.sub("", _MARKED.sub(r"[\1]", str(self.env.render()))).strip("\n")
        return json.dumps(observation, default=_plain)

    def score(self, answer: str | None) -> Score:
        solved = self.total >= self.environment.solved_from
        return Score(solved, (RewardComponent(name="return", value=self.total),))

    def state(self) -> dict[str, Any]:
        return {"return": self.total, "steps": self.steps, "ended": self.ended}

    def close(self) -> None:
        self.env.close()


def acting(action: str, number: int) -> Message:
    """The message that does an action, as call ``number`` of an episode."""
    call = ToolCall(id=f"call_{number}", name="act", arguments=json.dumps({"action": action}))
    return Message(role=Role.ASSISTANT, tool_calls=[call])


def tool(names: list[str] | None, about: str = "Do one action and see what comes of it.") -> dict[str, Any]:
    """The tool ``act``, by which one of the named actions is done, or one in words."""
    action = {"type": "string", "enum": names} if names else {"type": "string"}
    parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
    return {"type": "function", "function": {"name": "act", "description": about, "parameters": parameters}}


def _plain(value: Any) -> Any:
    """NumPy's arrays and numbers as JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
