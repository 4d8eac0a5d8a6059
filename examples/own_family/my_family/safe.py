"""``safe``: finding the number of a safe by asking whether it is higher or lower."""

import json
from collections.abc import Iterator
from random import Random

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent


class SafeConfig(FamilyConfig):
    lowest: int = Field(1, ge=0, description="least number of a safe")


class SafeEpisode(ToolEpisode["Safes"]):
    """One attempt. The number lies between ``low`` and ``high``."""

    def __init__(self, family: "Safes", task: Task) -> None:
        super().__init__(family, task)
        self.number = int(json.loads(task.ground_truth))
        self.low, self.high = family.config.lowest, json.loads(task.metadata)["high"]

    @tool
    def turn(self, number: int) -> str:
        """Try a number. Reply with the number alone when you know it.

        number: whole, within the bounds
        """
        before = self.high - self.low
        if number == self.number:
            self.low = self.high = number
        elif number < self.number:
            self.low = max(self.low, number + 1)
        else:
            self.high = min(self.high, number - 1)
        self.earn((before - (self.high - self.low)) / max(1, before))
        return "open" if number == self.number else "higher" if number < self.number else "lower"

    def outcome(self) -> Score:
        success = self.answer == str(self.number)
        return Score(success, (RewardComponent(name="opened", value=float(success)),), {"left": self.high - self.low})

    def advise(self) -> Message:
        """Halve what is left, or answer."""
        if self.low == self.high:
            return self.saying(str(self.low))
        return self.calling("turn", number=(self.low + self.high + 1) // 2)


class Safes(Family):
    """The level is the number of turns that always suffice, about."""

    name = "safe"
    version = "1"
    max_steps = 24
    levels = {4: 0.3, 6: 0.3, 8: 0.4}  # noqa: RUF012
    episode = SafeEpisode
    config: SafeConfig

    def __init__(self, config: SafeConfig = SafeConfig()) -> None:  # noqa: B008
        super().__init__(config)

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        while True:
            high = self.config.lowest + random.randint(2 ** (level - 1), 2**level)
            number = random.randint(self.config.lowest, high)
            yield Draft(f"Safe: {self.config.lowest} to {high}.", number, {"high": high}, key=(high, number))
