"""Agreement of the rollouts of one group with each other, for tasks without a ground truth."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from agentrl.rewards.answers import Declared, final_answer, normalized
from agentrl.rewards.component import Grade, Unverified
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class SelfConsistency(Unverified):
    """1 if a rollout's answer is the one that most rollouts of its group gave (self-consistency: Wang et al. 2023; as a
    reward: TTRL, Zuo et al. 2025), else 0. Of answers that are equally frequent none is the majority. Answers are
    compared without case, punctuation and articles; a rollout without an answer gets 0."""

    type: Literal["self_consistency"] = "self_consistency"
    of: Literal["majority", "share"] = Field("majority", description="share: the share of the group with that answer")
    declared: Declared = Field("message", description="where the answer stands")

    def value(self, rollout: Trajectory, task: Task) -> float:
        return self._values([rollout])[0]

    async def grades(self, group: Sequence[Trajectory], task: Task) -> list[Grade]:
        return [Grade(value) for value in self._values(group)]

    def _values(self, group: Sequence[Trajectory]) -> list[float]:
        finals = [final_answer(rollout, self.declared) for rollout in group]
        answers = [None if final is None else normalized(final) for final in finals]
        votes = Counter(answer for answer in answers if answer)
        if self.of == "share":
            return [votes[answer] / len(group) if answer else 0.0 for answer in answers]
        ranked = votes.most_common(2)
        tied = len(ranked) == 2 and ranked[0][1] == ranked[1][1]
        return [float(bool(answer) and not tied and answer == ranked[0][0]) for answer in answers]
