"""An engine that says what it is told to, and a runner that plays it."""

import json
from collections.abc import Sequence
from typing import Any

from agentrl.engines.base import Sampling, Session, Turn
from agentrl.rollouts.limits import Limits
from agentrl.rollouts.runner import Attempt, RolloutRunner
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory


class Scripted:
    """Says these turns: a mapping calls a tool, text is the answer."""

    exact = False
    reproducible = True
    version = 0

    def __init__(self, *turns: Any) -> None:
        self.turns = turns

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        return Session(key=key, root=root)

    async def turn(self, session: Session, sampling: Sampling, *, stop: Sequence[int], seed: int, **_: Any) -> Turn:
        number = sum(message.role is Role.ASSISTANT for message in session.messages)
        text = self.turns[min(number, len(self.turns) - 1)]
        if isinstance(text, str):
            return Turn([], [], [], "stop", Message(role=Role.ASSISTANT, content=text))
        [(name, arguments)] = text.items()
        call = ToolCall(id=f"call_{number}", name=name, arguments=json.dumps(arguments))
        return Turn([], [], [], "stop", Message(role=Role.ASSISTANT, tool_calls=[call]))


def play(environment: Any, task: Task, *turns: Any, number: int = 1, **limits: Any) -> list[Trajectory]:
    runner = RolloutRunner(None, Scripted(*turns), environment, Sampling(), limits=Limits(**limits))
    return runner.run([Attempt(task, n) for n in range(number)], 0, [f"r{n}" for n in range(number)])
