"""Answers: what a rollout gave as its own, and how it compares with the ground truth."""

import json
import re
import string
from collections import Counter
from typing import Literal

from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Role, Trajectory

Declared = Literal["message", "tag", "boxed"]
"""Where the answer stands: the last message is the answer, or it says ``<answer>...</answer>`` or ``\\boxed{...}``."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(answer: str, truth: str) -> bool:
    """Equal up to surrounding white space."""
    return answer.strip() == truth.strip()


def normalized(text: str) -> str:
    """Lower case without punctuation, articles and doubled white space (SQuAD: Rajpurkar et al. 2016)."""
    plain = "".join(" " if char in string.punctuation else char for char in text.lower())
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


def f1(answer: str, truth: str) -> float:
    """The harmonic mean of precision and recall over normalised words (SQuAD: Rajpurkar et al. 2016, section 6.1)."""
    words, right = normalized(answer).split(), normalized(truth).split()
    if not words or not right:
        return float(words == right)
    shared = (Counter(words) & Counter(right)).total()
    return 2 * shared / (len(words) + len(right))


def final_answer(rollout: Trajectory, declared: Declared = "message") -> str | None:
    """What a rollout answered at its end; None if its last message is no answer, or declares none."""
    last = rollout.messages[-1] if rollout.messages else None
    if last is None or last.role is not Role.ASSISTANT or last.tool_calls:
        return None
    if declared == "message":
        return last.content
    if declared == "tag":
        matches = _TAG.findall(last.content)
        return matches[-1].strip() if matches else None
    return boxed(last.content)


def boxed(text: str) -> str | None:
    """What the last ``\\boxed{...}`` of a text holds, nested braces included; None without a whole one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for end in range(begin - 1, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[begin:end].strip()
    return None


def truths(task: Task) -> list[str]:
    """The answers that are right: the task's ground truth, or each of a list. Raises ValueError that names the task if
    it is neither text nor number."""
    given = json.loads(task.ground_truth)
    answers = given if isinstance(given, list) else [given]
    if not answers or not all(isinstance(answer, str | int | float) for answer in answers):
        raise ValueError(f"task {task.task_id} has the ground truth {task.ground_truth[:80]}; an answer is text")
    return [answer if isinstance(answer, str) else json.dumps(answer) for answer in answers]
