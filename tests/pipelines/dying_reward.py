"""A reward for tests of workers: it ends the process that scores a row, once for each row that asks for it."""

import os
import signal
from pathlib import Path

from agentrl.rewards.component import Reward
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class Dying(Reward):
    """Gives 0.5. ``folder`` remembers which rows ended a process."""

    folder: str
    rows: list[str]

    def value(self, rollout: Trajectory, task: Task) -> float:
        mark = Path(self.folder) / rollout.trajectory_id
        if rollout.trajectory_id in self.rows and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.5
