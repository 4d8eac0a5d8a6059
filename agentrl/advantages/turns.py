"""Credit by turn: a turn is a run of consecutive action tokens, an assistant message."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from schemas.trajectory import Message, Role

Span = tuple[int, int]
"""First token, and the one after the last."""


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
    """Reward of each turn, [turns]: what its message and the tool messages after it were given, and ``final`` on the
    last.
    A trajectory without step rewards has ``final`` alone."""
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
    """Trajectory slicing: 0 up to the turn in which a failed row leaves the success that it follows longest, 1 from
    that turn on, [tokens]. The good prefix is replayed without blame; without a success of the group all is blamed."""
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
    failed one spans the turns after the last that was reached. Where all were reached every turn counts.
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
