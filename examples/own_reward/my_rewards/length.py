"""What a long rollout costs."""

from pydantic import Field

from agentrl.rewards.component import Reward
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class Brevity(Reward):
    """1 for a rollout without any token of the policy, 0 from ``most`` on. A failure gains nothing by being short."""

    most: int = Field(64, ge=1, description="tokens of the policy from which on the value is 0")
    only_successes: bool = True

    def value(self, rollout: Trajectory, task: Task) -> float:
        if self.only_successes and not rollout.success:
            return 0.0
        return max(0.0, 1 - rollout.n_action_tokens / self.most)
