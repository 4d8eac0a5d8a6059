"""The house of ``rooms``: which door leads where, and how far it is from any room to any other."""

from collections import Counter, deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from random import Random
from typing import Literal, get_args

Door = Literal["left", "right", "tunnel"]
DOORS: tuple[Door, ...] = get_args(Door)

# fmt: off
NAMES = (
    "attic", "bakery", "bath", "cabin", "cave", "cellar", "chapel", "clinic", "closet", "court", "crypt", "deck",
    "den", "dorm", "farm", "forge", "foyer", "garage", "garden", "gate", "gym", "hall", "hangar", "harbor",
    "kiosk", "kitchen", "lab", "larder", "library", "lobby", "loft", "market", "mill", "museum", "nursery", "office",
    "pantry", "park", "porch", "prison", "quay", "salon", "shed", "stable", "studio", "tower", "vault", "yard",
)
# fmt: on


class House:
    """``size`` rooms on a ring. A tunnel leads from each room to one drawn at random, and not back. With the 48 rooms
    of the default, distances are 1 to 8, and 3.7 on average.

    ``leads[room][door]`` is the number of the room behind a door.
    """

    def __init__(self, size: int) -> None:
        random = Random("rooms-1-3")
        tunnels = [random.choice([other for other in range(size) if other != room]) for room in range(size)]
        self.size = size
        self.leads = [((room - 1) % size, (room + 1) % size, tunnels[room]) for room in range(size)]
        self.names = [name_of(room) for room in range(size)]
        self.numbers = {name: room for room, name in enumerate(self.names)}

    def distances(self, goal: int) -> Sequence[int]:
        """The fewest doors from each room to ``goal``, [rooms]."""
        return self._distances[goal]

    def shortest(self, room: int, goal: int) -> Door:
        """The first door of a shortest way; ``room`` is not the goal."""
        ahead = self.distances(goal)
        return min(DOORS, key=lambda door: ahead[self.leads[room][DOORS.index(door)]])

    def pairs(self) -> Counter[int]:
        """Distance -> how many pairs of rooms are so far apart."""
        return Counter(far for ahead in self._distances for far in ahead if far)

    @cached_property
    def _distances(self) -> list[list[int]]:
        into: list[list[int]] = [[] for _ in range(self.size)]
        for room, behind in enumerate(self.leads):
            for other in behind:
                into[other].append(room)
        return [_search(goal, into) for goal in range(self.size)]


def name_of(room: int) -> str:
    """The name of a room. Beyond the first 48 it has a number, as in ``attic2``."""
    turn, index = divmod(room, len(NAMES))
    return NAMES[index] + (str(turn + 1) if turn else "")


@lru_cache(maxsize=8)
def house(size: int) -> House:
    """The house of that size; there is one of each."""
    return House(size)


def _search(goal: int, into: Sequence[Sequence[int]]) -> list[int]:
    far = [-1] * len(into)
    far[goal] = 0
    waiting = deque([goal])
    while waiting:
        room = waiting.popleft()
        for other in into[room]:
            if far[other] < 0:
                far[other] = far[room] + 1
                waiting.append(other)
    return far
