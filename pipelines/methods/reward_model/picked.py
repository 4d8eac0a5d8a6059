"""Which of several attempts at a task a reward model would take, and what it costs not to know better."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from agentrl.rewards.answers import normalized


class ScoredAttempt(NamedTuple):
    """An attempt at a task: its rows, what the reward model gives it, whether it succeeded (None: unknown), and what it
    answered (None: nothing)."""

    task: str
    ids: list[str]
    score: float
    success: bool | None
    answer: str | None


def by_task(attempts: Sequence[ScoredAttempt]) -> list[list[ScoredAttempt]]:
    """The attempts at each task, in their order."""
    tasks: dict[str, list[ScoredAttempt]] = {}
    for attempt in attempts:
        tasks.setdefault(attempt.task, []).append(attempt)
    return list(tasks.values())


def best_rows(tasks: Sequence[Sequence[ScoredAttempt]]) -> list[str]:
    """The rows of the attempt at each task with the highest score; of equal ones the first."""
    return [name for task in tasks for name in max(task, key=lambda attempt: attempt.score).ids]


def picks(task: Sequence[ScoredAttempt]) -> dict[str, float]:
    """The success at a task of the attempt with the highest score (``best_of_n``), of the ``first``, of one with the
    most frequent answer (``majority``), of one at ``random``, and whether any succeeded (``oracle``). Of equals one is
    drawn by lot, which is a mean here. Answers are compared without case and punctuation; if none is given, any attempt
    is as good."""
    outcomes = [bool(attempt.success) for attempt in task]
    highest = max(attempt.score for attempt in task)
    answers = [attempt.answer and normalized(attempt.answer) for attempt in task]
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    return {
        "best_of_n": fmean(attempt.success or 0.0 for attempt in task if attempt.score == highest),
        "first": float(outcomes[0]),
        "majority": fmean(won for won, answer in zip(outcomes, answers, strict=True) if votes[answer or ""] == most),
        "random": fmean(outcomes),
        "oracle": float(any(outcomes)),
    }


def picked(tasks: Sequence[Sequence[ScoredAttempt]]) -> dict[str, float | int]:
    """:func:`picks` over all tasks of several attempts whose outcomes are known, and how many these are."""
    known = [task for task in tasks if len(task) > 1 and all(attempt.success is not None for attempt in task)]
    each = [picks(task) for task in known]
    return {
        "reranked_tasks": len(known),
        **({name: fmean(task[name] for task in each) for name in each[0]} if each else {}),
    }
