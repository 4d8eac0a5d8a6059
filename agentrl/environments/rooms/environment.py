"""The environment ``rooms``. A task is a start and a goal: "attic to vault?". The policy goes through doors, and says
something without a call when it stands in the goal. Its level is the distance.

The map never changes, so it can be learned by heart; held-out tasks are other pairs of rooms. The value of a tabular
policy is known exactly (:mod:`agentrl.environments.rooms.values`), and every room that was reached was a goal.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from pydantic import Field

from agentrl.environments.base import Score
from agentrl.environments.family import Family, FamilyConfig, ToolEpisode
from agentrl.environments.rooms.house import DOORS, NAMES, Door, house
from agentrl.environments.task_splits import Draft
from agentrl.environments.tools import tool
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Trajectory


class RoomsConfig(FamilyConfig):
    size: int = Field(len(NAMES), ge=4, le=1000, description="rooms of the house; there is one house of each size")
    slip: float = Field(
        0.0,
        ge=0,
        le=1,
        description="probability that a door leads to what is behind a random one, drawn anew each time",
    )
    signs: bool = Field(False, description="signs at the doors of each room name the rooms behind them")
    spoken: bool = Field(False, description="the expert names the room that it goes to, before it goes through a door")


class RoomsEpisode(ToolEpisode["Rooms"]):
    """One walk."""

    def __init__(self, family: "Rooms", task: Task) -> None:
        super().__init__(family, task)
        where = json.loads(task.metadata)
        self.numbers: dict[str, int] = family.house.numbers
        self.room, self.goal = self.numbers[where["start"]], self.numbers[where["goal"]]
        self.ahead = family.house.distances(self.goal)
        self.whole = max(1, self.ahead[self.room])
        self.visited = [self.room]
        self.reached: dict[int, int] = {}  # distance -> number of the call that first came so near

    @tool
    def go(self, door: Door) -> str:
        """Go through a door; returns the name of the room behind it. When you are in the goal, reply without a call.

        door: the door to go through
        """
        if self.family.config.slip and self.family.chance.random() < self.family.config.slip:
            door = self.family.chance.choice(DOORS)
        before, self.room = self.room, self.family.house.leads[self.room][DOORS.index(door)]
        self.visited.append(self.room)
        self.reached.setdefault(self.ahead[self.room], self.calls - 1)
        self.earn((self.ahead[before] - self.ahead[self.room]) / self.whole)
        return self.family.seen(self.room)

    def outcome(self) -> Score:
        success = self.answer is not None and self.room == self.goal
        names = self.family.house.names
        state = {
            "visited": [names[room] for room in self.visited],
            "answered": self.answer is not None,
            "subgoals": [self.reached.get(far) for far in range(self.whole - 1, -1, -1)],
        }
        return Score(success, (RewardComponent(name="in_goal", value=float(success)),), state)

    def advise(self) -> Message:
        """The next door of a shortest way, or the end."""
        if self.room == self.goal:
            return self.saying("here")
        return self._going(self.family.house.shortest(self.room, self.goal))

    def stray(self, random: Random) -> Message:
        if random.random() < 0.2:
            return self.saying("here")
        return self._going(random.choice(DOORS))

    def _going(self, door: Door) -> Message:
        """The expert's call."""
        call = self.calling("go", door=door)
        if not self.family.config.spoken:
            return call
        house = self.family.house
        return call.model_copy(update={"content": house.names[house.leads[self.room][DOORS.index(door)]] + "."})


class Rooms(Family):
    """The environment; see the module's docstring."""

    name = "rooms"
    version = "1"
    max_steps = 12
    episode = RoomsEpisode
    config: RoomsConfig
    of_no_task = frozenset({"faults", "spoken"})

    def __init__(self, config: RoomsConfig = RoomsConfig()) -> None:  # noqa: B008  (frozen)
        self.house = house(config.size)
        self.levels = dict(sorted(self.house.pairs().items()))
        self.replayable = not config.slip
        self.chance = Random()
        super().__init__(config)

    def drafts(self, level: int, random: Random) -> Iterator[Draft]:
        far = [
            (start, goal)
            for goal in range(self.house.size)
            for start, distance in enumerate(self.house.distances(goal))
            if distance == level
        ]
        random.shuffle(far)
        return (self._draft(*pair) for pair in far)

    def achieved(self, row: Trajectory, task: Task) -> list[Task]:
        """Tasks from the same start to each room that a row came to, in the order of the visits. A walk to a room
        solves the task of that room if it ends there with an answer."""
        start = self.house.numbers[json.loads(task.metadata)["start"]]
        room_names = [message.content.split(".")[0] for message in row.messages if message.role is Role.TOOL]
        rooms = dict.fromkeys(self.house.numbers[name] for name in room_names if name in self.house.numbers)
        return [self._between(task, start, room) for room in rooms if room != start]

    def goal(self, task: Task) -> str:
        """The start and the goal: tasks of two splits never share both, whatever their prompts show."""
        where: dict[str, Any] = json.loads(task.metadata)
        return f"{where['start']} {where['goal']}"

    def reflect(self, row: Trajectory, task: Task) -> str:
        """The first door of a failed walk that led no nearer to the goal, or where it gave up."""
        where: dict[str, Any] = json.loads(task.metadata)
        ahead = self.house.distances(self.house.numbers[where["goal"]])
        room = self.house.numbers[where["start"]]
        calls = [call for message in row.messages for call in message.tool_calls]
        answers = [message for message in row.messages if message.role is Role.TOOL]
        for call, answer in zip(calls, answers, strict=False):
            reached = self.house.numbers.get(answer.content.split(".")[0])
            if reached is None:
                continue
            if ahead[reached] >= ahead[room]:
                return f"not {call.parsed().get('door')} at {self.house.names[room]}"
            room = reached
        return f"go on at {self.house.names[room]}" if ahead[room] else ""

    def vary(self, task: Task, random: Random) -> Task:
        """A task whose start or goal lies behind a door of the old one."""
        where: dict[str, Any] = json.loads(task.metadata)
        start, goal = self.house.numbers[where["start"]], self.house.numbers[where["goal"]]
        near = [(other, goal) for other in self.house.leads[start]] + [
            (start, other) for other in self.house.leads[goal]
        ]
        return self._between(task, *random.choice([pair for pair in near if pair[0] != pair[1]]))

    def proposed(self, text: str, like: Task, random: Random) -> Task | None:
        """The task of a question that somebody wrote; None if it names no two rooms of the house."""
        start, _, goal = text.partition("?")[0].partition(" to ")
        known = self.house.numbers
        if start not in known or goal not in known or start == goal:
            return None
        return self._between(like, known[start], known[goal])

    def _between(self, task: Task, start: int, goal: int) -> Task:
        return self.derived(task, self._draft(start, goal), self.house.distances(goal)[start])

    def _draft(self, start: int, goal: int) -> Draft:
        begin, end = self.house.names[start], self.house.names[goal]
        prompt = f"{begin} to {end}?"
        if self.config.signs:
            prompt += f" You are in {self.seen(start)}"
        return Draft(prompt, end, {"start": begin, "goal": end})

    def seen(self, room: int) -> str:
        """What one sees in a room: its name, and the signs if there are any."""
        if not self.config.signs:
            return self.house.names[room]
        behind = zip(DOORS, self.house.leads[room], strict=True)
        signs = ", ".join(f"{self.house.names[other]} {door}" for door, other in behind)
        return f"{self.house.names[room]}. {signs}"
