"""How sure a policy was of what it said, for tasks without a ground truth."""

import math
from statistics import fmean
from typing import Literal

from pydantic import Field

from agentrl.advantages.turns import turn_spans
from agentrl.rewards.answers import final_answer
from agentrl.rewards.component import Grade, Unverified
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory


class Confidence(Unverified):
    """``exp(mean log p)`` over the tokens that the policy sampled, from above 0 to 1: the geometric mean of their
    probabilities, as the row has them.

    The mean log-prob of sampled tokens estimates the negative entropy, which is the reward of RENT (Prabhudesai et al.
    2025, arXiv 2505.22660); the exponential puts it into [0, 1] and keeps the order. Self-certainty (INTUITOR: Zhao et
    al. 2025, arXiv 2505.19590), ``KL(uniform || p)``, needs the probabilities of all tokens, which rows do not have.
    """

    type: Literal["confidence"] = "confidence"
    over: Literal["row", "answer"] = Field(
        "row", description="which tokens count: all that were sampled, or those of the answer; 0 without an answer"
    )

    def value(self, rollout: Trajectory, task: Task) -> float | Grade:
        spans = turn_spans(rollout.messages, rollout.action_mask)
        start = 0
        if self.over == "answer":
            if final_answer(rollout) is None or not spans:
                return 0.0
            start = spans[-1][0]
        sampled = zip(rollout.logprobs[start:], rollout.action_mask[start:], strict=True)
        logprobs = [logprob for logprob, is_action in sampled if is_action]
        if not logprobs:
            return Grade(None, why="the row has no tokens that the policy sampled")
        if any(map(math.isnan, logprobs)):
            return Grade(None, why="the row has tokens without a log-prob of the policy")
        return math.exp(fmean(logprobs))
