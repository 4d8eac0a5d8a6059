"""``textarena``: games of the package textarena for one player. What the policy says is its move, and the game answers;
there are no tools. A task is a seed, and splits share none."""

import json
import re
from collections.abc import Generator
from random import Random
from typing import Annotated, Any

from pydantic import Field

from agentrl.environments.adapters.seeds import OwnChance, seeded
from agentrl.environments.base import Observation, Score
from agentrl.environments.scripted import NoExpertError
from agentrl.schemas.installation import is_installed
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role

INSTALL = "pip install --no-deps textarena==0.7.4, then pip install nltk openai python-dotenv requests rich websockets"
"""Its requirement ``chess`` is under GPL-3.0, and chess games alone import it. So no extra of ours installs it."""


class TextArena:
    """``id`` is that of a game, whose limit of turns holds besides ``max_steps``. A task is solved if its reward is
    ``solved_from`` or more. The expert bisects, and plays GuessTheNumber alone."""

    name, version, replayable = "textarena", "1", True

    def __init__(
        self,
        id: Annotated[str, Field(description="of the game, such as GuessTheNumber-v0", min_length=1)],
        options: Annotated[dict[str, Any], Field(description="keyword arguments of textarena.make")] = {},  # noqa: B006
        solved_from: Annotated[float, Field(description="reward from which on a task is solved")] = 1.0,
        max_steps: Annotated[int, Field(ge=1, description="assistant messages of an episode")] = 64,
    ) -> None:
        if not is_installed("textarena"):
            raise ValueError(f"environment textarena needs the package textarena; {INSTALL}")
        self.id, self.options, self.solved_from, self.max_steps = id, options, solved_from, max_steps

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        """Seeds for each split. Raises ValueError if the game cannot be played here, or not by one."""
        try:
            prompt = Game(self, 0).seen.partition("\n")[0]
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"textarena cannot play {self.id!r} with one player: {type(error).__name__}: {reason}"
            ) from None
        return seeded(self.id, self.name, prompt, "[]", sizes, seed)

    def episode(self, task: Task) -> "Game":
        return Game(self, json.loads(task.metadata)["seed"])

    def demonstrate(self, task: Task, noise: float, random: Random) -> Generator[Message, list[Message], None]:
        """Bisection of the numbers that are left; with probability ``noise``, any number of all."""
        bounds = re.search(r"the number between (\d+) and (\d+)", self.episode(task).seen)
        if bounds is None:
            raise NoExpertError(f"{self.id} has no expert: GuessTheNumber alone has one; sample from a teacher")
        first, last = low, high = int(bounds[1]), int(bounds[2])
        while True:
            number = random.randint(first, last) if random.random() < noise else (low + high) // 2
            answers = yield Message(role=Role.ASSISTANT, content=f"[{number}]")
            hint = answers[-1].content if answers else ""
            low = max(low, number + 1) if "higher" in hint else low
            high = min(high, number - 1) if "lower" in hint else high


class Game:
    """One attempt."""

    def __init__(self, arena: TextArena, seed: int) -> None:
        import textarena

        self.arena, self.chance, self.turns, self.done = arena, OwnChance(seed), 0, False
        with self.chance():
            self.game = textarena.make(f"{arena.id}-raw", **arena.options)  # unwrapped, it tells only what is new
            self.game.reset(num_players=1, seed=seed)
            self.seen = self._told()

    def _told(self) -> str:
        told = self.game.get_observation()[1]
        return "\n".join(text for _, text, kind in told if kind.name != "PLAYER_ACTION")

    def opening(self) -> str:
        return self.seen

    def user(self, text: str) -> Observation:
        with self.chance():
            self.done, _ = self.game.step(text)
            self.turns += 1
            told = [self._told(), str(self.state()["ended"]) if self.done else ""]
        return Observation("\n".join(filter(None, told)), reward=self.reward, done=self.done)

    @property
    def reward(self) -> float:
        """What the game gives at its end."""
        return float((self.game.close()[0] or {}).get(0, 0.0)) if self.done else 0.0

    def score(self, answer: str | None) -> Score:
        return Score(self.reward >= self.arena.solved_from, (RewardComponent(name="reward", value=self.reward),))

    def state(self) -> dict[str, Any]:
        return {"turns": self.turns, "ended": self.game.close()[1][0].get("reason") if self.done else None}
