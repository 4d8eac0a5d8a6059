"""A reward model that says what the states of a search are worth, in the place of a model that is asked."""

from typing import TYPE_CHECKING

from agentrl.advantages.turns import acting, turn_spans
from agentrl.pipelines.handles import RewardModel
from agentrl.pipelines.parts.selected import check_tokenizer
from agentrl.schemas.task import Task
from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from agentrl.pipelines.methods.lats.judging import StateJudge

WIRED = "reward_model"
"""The judge of a search that is its input of that name."""


class Valuing:
    """What a process reward model makes of a state: its probability of success after the last turn.

    Raises ValueError if the model values no turns.
    """

    fails = 0.5
    """An end that is worth less counts as failed."""

    def __init__(self, given: RewardModel) -> None:
        from agentrl.training.reward_model import RewardNet

        self._net, about = RewardNet.load(given.path, f"{given.stage}/{given.fingerprint[:8]}")
        if about.kind != "prm":
            raise ValueError(
                f"inputs.reward_model is of kind: {about.kind}, which says nothing of states in the middle of a "
                "rollout; wire one of kind: prm"
            )

    async def estimate(self, row: Trajectory, messages: int, task: Task) -> float | None:
        """The value of the state of a row after its first ``messages``; None before its first turn."""
        from agentrl.training.rows import TrainingRows

        check_tokenizer(row.trajectory_id, row.tokenizer, self._net.policy)
        turns = len(acting(row.messages[:messages]))
        if not turns:
            return None
        _, end = turn_spans(row.messages, row.action_mask)[turns - 1]
        state = TrainingRow(
            row_id=row.trajectory_id,
            input_ids=row.input_ids[:end],
            mask=[False] * (end - 1) + [True],
            weights=[0.0] * end,
        )
        [[value]] = self._net.scores(TrainingRows.of([state]), end)
        return float(value)

    async def close(self) -> None:
        """There is nothing to close."""


def check_judge(judge: "StateJudge | str | None", given: RewardModel | None) -> None:
    """Raise ValueError unless a reward model is wired if, and only if, it is the judge."""
    if (judge == WIRED) != (given is not None):
        raise ValueError(
            f"judge: {WIRED} needs inputs.{WIRED}, of rewards.train with kind: prm"
            if judge == WIRED
            else f"inputs.{WIRED} is wired, and judge is another; set judge: {WIRED}, or leave it out"
        )
