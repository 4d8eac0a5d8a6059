"""A program in place of a model: what a trained policy should beat."""

import json
import re
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from agentrl.engines.configs import EngineConfig
from agentrl.schemas.trajectory import Message, Role, ToolCall

if TYPE_CHECKING:
    from agentrl.engines.base import Sampling, Session, Turn, Weights
    from agentrl.models.policy import Policy


class Program(EngineConfig):
    """Walks "city of the boss of Ann?" with ``find``, one relation a turn, and answers too early now and then."""

    exact: ClassVar[bool] = False  # its turns are text: no token ids, so that its rows train by SFT alone

    hasty: float = Field(0.1, ge=0, le=1, description="probability of an answer in place of the next call")

    def build(self, policy: "Policy | None") -> "ProgramEngine":
        return ProgramEngine(self.hasty)


class ProgramEngine:
    exact = False
    reproducible = True
    version = 0

    def __init__(self, hasty: float) -> None:
        self.hasty = hasty

    def open(self, key: tuple[int, ...] = (), root: str = "") -> "Session":
        from agentrl.engines.base import Session

        return Session(key=key, root=root)

    async def turn(
        self,
        session: "Session",
        sampling: "Sampling",
        *,
        stop: Sequence[int],
        seed: int,
        deadline: int = 0,
        time_limit: float | None = None,
    ) -> "Turn":
        from agentrl.engines.base import Turn

        question = next(message.content for message in session.messages if message.role is Role.USER)
        *relations, start = re.split(r" of (?:the )?", question.strip(" ?"))
        answers = [message.content for message in session.messages if message.role is Role.TOOL]
        who = answers[-1] if answers else start
        left = relations[: len(relations) - len(answers)]
        hasty = Random(f"{seed}-{session.key}-{len(answers)}").random() < self.hasty
        if not left or hasty:
            return Turn([], [], [], "stop", Message(role=Role.ASSISTANT, content=who))
        arguments = json.dumps({"who": who, "rel": left[-1]})
        call = ToolCall(id=f"call_{len(answers)}", name="find", arguments=arguments)
        return Turn([], [], [], "stop", Message(role=Role.ASSISTANT, tool_calls=[call]))

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        raise NotImplementedError("a program has no log-probabilities")

    async def load(self, weights: "Weights") -> None:
        raise NotImplementedError("a program has no weights")

    async def close(self) -> None:
        pass
