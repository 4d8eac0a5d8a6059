"""``minigrid``: worlds of MiniGrid and BabyAI, told in words: the mission, what the agent sees and how far away it is.
The policy acts as in :mod:`agentrl.environments.adapters.gymnasium`. BabyAI's bot is the expert of BabyAI's levels."""

from collections.abc import Generator
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from agentrl.environments.adapters.gymnasium import GymnasiumEnvironment, GymnasiumEpisode, Text, acting
from agentrl.environments.scripted import NoExpertError
from agentrl.schemas.installation import install_hint
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role

if TYPE_CHECKING:
    from gymnasium import Env

WALL = "a wall"
LEAST = 0.05  # a success earns 1 - 0.9 x steps / the world's limit of steps, so 0.1 or more; a failure earns nothing


class MiniGrid(GymnasiumEnvironment):
    """``id`` is that of a world of the package, whose limit of steps holds besides ``max_steps``."""

    name, version, replayable = "minigrid", "1", True

    def __init__(
        self,
        id: Annotated[str, Field(description="of the world, such as BabyAI-GoToLocal-v0", min_length=1)],
        options: Annotated[dict[str, Any], Field(description="keyword arguments of gymnasium.make")] = {},  # noqa: B006
        prompt: Text = "Do your mission in a world of cells. You see what is before you, up to 6 steps away.",
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 64,
    ) -> None:
        try:
            from minigrid.core.actions import Actions
        except ImportError:
            raise ValueError(f"environment minigrid needs its package; {install_hint('minigrid')}") from None
        super().__init__(id, options, prompt, [action.name for action in Actions], LEAST, max_steps)

    def make(self) -> "Env[Any, Any]":
        import minigrid  # noqa: F401  registers its worlds

        return super().make()

    def episode(self, task: Task) -> "GymnasiumEpisode":
        return World(self, task)

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """What the bot does, and with probability ``noise`` an action at random, after which the bot plans again."""
        from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

        world = World(self, task)
        try:
            if not hasattr(world.env.unwrapped, "instrs"):
                raise NoExpertError(f"{self.id} has no expert: the package has a bot for BabyAI's levels alone")
            bot, names, taken = BabyAIBot(world.env), list(self.actions or ()), None
            while True:
                try:
                    planned = bot.replan(taken)
                except DisappearedBoxError:
                    yield Message(role=Role.ASSISTANT, content="The box is gone.")  # which was opened by mistake
                    return
                taken = planned if random.random() >= noise else type(planned)(random.randrange(len(names)))
                yield acting(names[taken], world.steps)
                world.act(taken)
        finally:
            world.close()


class World(GymnasiumEpisode):
    """One attempt, whose observations are words: what is seen, the nearest first, with the first wall on each side."""

    def _shown(self, observation: Any) -> str:
        cells = {
            (len(column) - 1 - down, right - len(observation["image"]) // 2): cell
            for right, column in enumerate(observation["image"])
            for down, cell in enumerate(column)
        }  # (steps forward, steps to the right) -> kind, colour, state; where the agent is, what it carries
        carried, seen, walled = _named(cells.pop((0, 0))), [f"Mission: {observation['mission']}."], set()
        for (forward, right), cell in sorted(cells.items(), key=lambda item: (sum(map(abs, item[0])), item[0])):
            named, side = _named(cell), (forward > 0, (right > 0) - (right < 0))
            if named == WALL and ((forward and right) or side in walled):
                continue
            walled |= {side} if named == WALL else set()
            seen += [f"You see {named} {_where(forward, right)}."] if named else []
        return "\n".join([*seen, f"You carry {carried or 'nothing'}."])


def _named(cell: Any) -> str:
    """A thing with its article, or nothing if a cell is empty or not seen."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    kind, colour = IDX_TO_OBJECT[int(cell[0])], IDX_TO_COLOR[int(cell[1])]
    if kind in ("unseen", "empty", "floor", "agent"):
        return ""
    state = {number: name for name, number in STATE_TO_IDX.items()}[int(cell[2])] if kind == "door" else ""
    words = "wall" if kind == "wall" else f"{state} {colour} {kind}".strip()
    return f"{'an' if words.startswith('open') else 'a'} {words}"


def _where(forward: int, right: int) -> str:
    ways = {"forward": forward, "right" if right > 0 else "left": abs(right)}
    return " and ".join(f"{number} step{'s' * (number > 1)} {way}" for way, number in ways.items() if number)
