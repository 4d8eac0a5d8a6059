"""Exact values of a tabular policy in ``rooms``, by dynamic programming over the messages that are left."""

from collections.abc import Callable, Mapping, Sequence

from agentrl.environments.rooms.house import DOORS, House

ANSWER = "answer"

TabularPolicy = Callable[[str, str], Mapping[str, float]]
"""Name of the room, name of the goal -> probabilities of the doors and of ``answer``; what is not named has 0."""


def values(house: House, goal: str, policy: TabularPolicy, messages: int, slip: float = 0.0) -> list[list[float]]:
    """The probability of success, [messages + 1, rooms]: the first index is the number of assistant messages that are
    left, the last of which can only be an answer.

    Raises ValueError if probabilities are negative, or do not add up to 1.
    """
    end = house.numbers[goal]
    chances = [_checked(policy(name, goal), name) for name in house.names]
    ahead = [0.0] * house.size
    by_messages = [ahead]
    for left in range(1, messages + 1):
        ahead = [
            chance.get(ANSWER, 0.0) * (room == end)
            + (left > 1)
            * sum(
                chance.get(door, 0.0) * _behind(house, ahead, room, number, slip) for number, door in enumerate(DOORS)
            )
            for room, chance in enumerate(chances)
        ]
        by_messages.append(ahead)
    return by_messages


def _behind(house: House, ahead: Sequence[float], room: int, door: int, slip: float) -> float:
    """The expected value after going through a door."""
    behind = [ahead[other] for other in house.leads[room]]
    return (1 - slip) * behind[door] + slip * sum(behind) / len(behind)


def _checked(chance: Mapping[str, float], room: str) -> Mapping[str, float]:
    if unknown := set(chance) - {*DOORS, ANSWER}:
        raise ValueError(f"the policy in {room} takes {sorted(unknown)}; it may take {', '.join([*DOORS, ANSWER])}")
    if min(chance.values(), default=0.0) < 0 or abs(sum(chance.values()) - 1) > 1e-9:
        raise ValueError(f"the policy in {room} has the probabilities {dict(chance)}; they must add up to 1")
    return chance
