"""An environment for tests, whose server is up while a file is there, and may be down for one task."""

import os
from pathlib import Path

from agentrl.environments.base import Score, Step
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import InfrastructureError, Message, RewardComponent, Role


class Flaky:
    """``FLAKY_SERVER`` names the file. What it says is "but for task N", or nothing."""

    name = "flaky"
    version = "1"

    def tasks(self, sizes: dict[str, int], seed: int) -> dict[str, list[Task]]:
        return {}

    async def reset(self, task: Task) -> "Visit":
        path = Path(os.environ["FLAKY_SERVER"])
        if not path.exists() or path.read_text() == f"but for task {task.task_id.rpartition('-')[2]}":
            raise InfrastructureError("the server is down")
        return Visit(task)


class Visit:
    tools = "[]"

    def __init__(self, task: Task) -> None:
        self.opening = [Message(role=Role.USER, content=task.prompt)]

    async def step(self, message: Message) -> Step:
        return Step(done=True)

    async def score(self) -> Score:
        return Score(True, (RewardComponent(name="served", value=1.0),))

    async def close(self) -> None:
        pass
