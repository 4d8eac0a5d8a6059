"""Credit by turn: a turn is a run of consecutive action tokens, an assistant message."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from schemas.trajectory import Message, Role

Span = tuple[int, int]
"""Position of the first token, and of the one after the last."""


def turn_spans(mask: Sequence[bool]) -> list[Span]:
    """The runs of action tokens, in order."""
    spans, start = [], 0
    for is_action, group in groupby(mask):
        end = start + len(list(group))
        if is_action:
            spans.append((start, end))
        start = end
    return spans


def spread(values: Sequence[float] | np.ndarray, spans: Sequence[Span], length: int) -> list[float]:
    """A value for each span as a value for each token, [tokens]; 0 outside the spans."""
    out = np.zeros(length)
    for value, (start, end) in zip(values, spans, strict=True):
        out[start:end] = value
    return out.tolist()


def turn_rewards(messages: Sequence[Message], mask: Sequence[bool], final: float) -> list[float]:
    """Reward of each turn, [turns]: the rewards of its message and of the tool messages after it. The last turn also
    has ``final``, which is the only reward if the trajectory has no step rewards."""
    rewards: list[float] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            rewards.append(message.reward or 0.0)
        elif rewards:
            rewards[-1] += message.reward or 0.0
    spans = turn_spans(mask)
    rewards = (rewards + [0.0] * len(spans))[: len(spans)]
    if rewards:
        rewards[-1] += final
    return rewards


def divergence_weights(row: Sequence[int], mask: Sequence[bool], successes: Sequence[Sequence[int]]) -> list[float]:
    """Trajectory slicing: weights of a failed row's tokens, [tokens]. They are 0 before the turn in which the row
    differs from the success that shares its longest beginning, and 1 from that turn on. If the group has no success,
    all are 1."""
    shared = 0
    for other in successes:
        same = next((i for i, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), min(len(row), len(other)))
        shared = max(shared, same)
    spans = turn_spans(mask)
    blamed = [span for span in spans if span[1] > shared] or spans[-1:]
    start = blamed[0][0] if blamed and successes else 0
    return [float(place >= start) for place in range(len(row))]


def subgoal_weights(mask: Sequence[bool], reached: Sequence[int | None]) -> list[float]:
    """Subgoal decomposition: 1 on the turns spent on the subgoal that failed first, 0 elsewhere, [tokens].

    ``reached[g]`` is the turn at whose end subgoal ``g`` was reached, None if it was not; subgoals are in order. The
    failed one spans the turns after the last one that was reached. If all were reached, every turn counts.
    """
    spans = turn_spans(mask)
    first_failed = next((g for g, turn in enumerate(reached) if turn is None), None)
    if first_failed is None:
        return [1.0] * len(mask)
    before = reached[first_failed - 1] if first_failed else None
    start = 0 if before is None else before + 1
    blamed = spans[start:] or spans[-1:]
    weights = np.zeros(len(mask))
    for begin, end in blamed:
        weights[begin:end] = 1.0
    return weights.tolist()
