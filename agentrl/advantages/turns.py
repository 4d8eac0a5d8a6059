"""Credit by turn: a turn is an assistant message with tokens of its own, whether this row sampled them or not."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import Message, Role, Trajectory

Span = tuple[int, int]
"""Position of the first token, and of the one after the last."""


def acting(messages: Sequence[Message]) -> list[Message]:
    """The assistant messages that are turns, in order: those with tokens of their own, or all if none has a span.
    Those of an opening have none, and neither have those beyond the tokens."""
    answers = [message for message in messages if message.role is Role.ASSISTANT]
    if all(message.token_start is None for message in answers):
        return answers
    return [message for message in answers if (message.token_start or 0) < (message.token_end or 0)]


def turn_spans(messages: Sequence[Message], mask: Sequence[bool]) -> list[Span]:
    """The tokens of each turn, in order. If no assistant message has a span, as in some imported rows, the turns are
    the runs of action tokens."""
    spans = [(message.token_start, message.token_end) for message in acting(messages)]
    known_spans = [(start, end) for start, end in spans if start is not None and end is not None]
    return known_spans or action_runs(mask)


def own_turns(row: Trajectory) -> list[int]:
    """Numbers of the turns that a row does not share with its parent. A row without tokens that has a parent has as
    many of its own as it counts in ``n_steps``."""
    if not row.input_ids:
        turns = len(acting(row.messages))
        return list(range(turns - row.n_steps if row.parent_id else 0, turns))
    spans = turn_spans(row.messages, row.action_mask)
    return [number for number, (start, _) in enumerate(spans) if start >= row.fork_at]


def action_runs(mask: Sequence[bool]) -> list[Span]:
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


def progress_weights(length: int, steps: Sequence[StepValue]) -> list[float]:
    """What each valued turn added to the value, on its tokens; 0 elsewhere, [tokens] of a row of that ``length``."""
    return spread([step.progress for step in steps], [(step.token_start, step.token_end) for step in steps], length)


def fork_turn_weights(length: int, spans: Sequence[Span], fork_at: int) -> list[float]:
    """1 on the first turn that a continuation sampled itself, 0 elsewhere, [tokens] of a row of that ``length``; 1 on
    all tokens of a whole row (``fork_at`` 0)."""
    own = [span for span in spans if span[0] >= fork_at]
    return spread([1.0] * len(own[:1]), own[:1], length) if fork_at else [1.0] * length


def turn_rewards(messages: Sequence[Message], mask: Sequence[bool], final: float) -> list[float]:
    """Reward of each turn, [turns]: the rewards of its message and of the tool messages after it. The last turn also
    has ``final``, which is the only reward if the trajectory has no step rewards."""
    rewards: list[float] = []
    turns = {id(message) for message in acting(messages)}
    for message in messages:
        if id(message) in turns:
            rewards.append(message.reward or 0.0)
        elif rewards:
            rewards[-1] += message.reward or 0.0
    spans = turn_spans(messages, mask)
    rewards = (rewards + [0.0] * len(spans))[: len(spans)]
    if rewards:
        rewards[-1] += final
    return rewards


def divergence_weights(row: Sequence[int], spans: Sequence[Span], successes: Sequence[Sequence[int]]) -> list[float]:
    """Trajectory slicing: weights of a failed row's tokens, [tokens], given the ``spans`` of its turns. They are 0
    before the turn in which the row differs from the success that shares its longest beginning, and 1 from that turn
    on. If the group has no success, all are 1."""
    shared = 0
    for other in successes:
        same = next((i for i, (a, b) in enumerate(zip(row, other, strict=False)) if a != b), min(len(row), len(other)))
        shared = max(shared, same)
    blamed = [span for span in spans if span[1] > shared] or list(spans[-1:])
    start = blamed[0][0] if blamed and successes else 0
    return [float(position >= start) for position in range(len(row))]


def subgoal_weights(length: int, spans: Sequence[Span], reached: Sequence[int | None]) -> list[float]:
    """Subgoal decomposition: 1 on the turns spent on the subgoal that failed first, 0 elsewhere, [tokens] of a row of
    that ``length``, given the ``spans`` of its turns.

    ``reached[g]`` is the turn at whose end subgoal ``g`` was reached, None if it was not; subgoals are in order. The
    failed one spans the turns after the last one that was reached. If all were reached, every turn counts.
    """
    first_failed = next((g for g, turn in enumerate(reached) if turn is None), None)
    if first_failed is None:
        return [1.0] * length
    before = reached[first_failed - 1] if first_failed else None
    start = 0 if before is None else before + 1
    blamed = spans[start:] or spans[-1:]
    weights = np.zeros(length)
    for begin, end in blamed:
        weights[begin:end] = 1.0
    return weights.tolist()
