"""A tabular policy of ``rooms`` as an engine with tokens, whose values are known exactly."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from agentrl.chat.codec import ChatCodec
from agentrl.engines.base import Sampling, Session, Turn, Weights
from agentrl.environments.rooms.house import DOORS, house
from agentrl.environments.rooms.values import ANSWER, TabularPolicy, values
from agentrl.schemas.trajectory import Message, Role, Span, ToolCall, Trajectory

HOME = house(48)


def stumbling(error: float) -> TabularPolicy:
    """The shortest way, and with probability ``error`` any of the four actions."""

    def chances(room: str, goal: str) -> Mapping[str, float]:
        best = ANSWER if room == goal else HOME.shortest(HOME.numbers[room], HOME.numbers[goal])
        return {action: error / 4 + (1 - error) * (action == best) for action in (*DOORS, ANSWER)}

    return chances


class TabularEngine:
    """Acts by a tabular policy. Its log-prob of a turn lies on the turn's first token."""

    exact = reproducible = True
    version = 0

    def __init__(self, codec: ChatCodec, policy: TabularPolicy) -> None:
        self.codec, self.policy, self.turns = codec, policy, 0

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], seed: int, **_: Any) -> Turn:
        self.turns += 1
        chances = self.policy(*state_of(session.messages))
        [action] = Random(seed).choices(list(chances), list(chances.values()))
        message = said(action, sum(message.role is Role.ASSISTANT for message in session.messages))
        ids = self.codec.assistant(message)
        return Turn(ids, [-0.5] * len(ids), [Span(version=self.version, start=0, end=len(ids))], "stop")

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        return [-1.0] * (len(ids) - start)

    async def load(self, weights: Weights) -> None:
        self.version = weights.version

    async def close(self) -> None:
        pass


def said(action: str, number: int) -> Message:
    if action == ANSWER:
        return Message(role=Role.ASSISTANT, content="here")
    call = ToolCall(id=f"call_{number}", name="go", arguments=f'{{"door": "{action}"}}')
    return Message(role=Role.ASSISTANT, tool_calls=[call])


def state_of(messages: Sequence[Message]) -> tuple[str, str]:
    """The room that one is in, and the goal."""
    start, goal = messages[0].content.split("?")[0].split(" to ")
    visited = [message.content for message in messages if message.role is Role.TOOL]
    return (visited[-1] if visited else start), goal


def exact(row: Trajectory, boundary: int, policy: TabularPolicy, messages: int = 12) -> float:
    """The value of the state of a row before its turn number ``boundary``."""
    turns = [position for position, message in enumerate(row.messages) if message.role is Role.ASSISTANT]
    room, goal = state_of(row.messages[: turns[boundary]])
    return values(HOME, goal, policy, messages)[messages - boundary][HOME.numbers[room]]
