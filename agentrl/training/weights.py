"""Weights of tokens in supervised training."""

import re
from collections.abc import Callable, Sequence
from typing import Literal

from agentrl.advantages.group import centred_advantages
from agentrl.advantages.turns import turn_spans
from schemas.trajectory import Trajectory

Decode = Callable[[list[int]], str]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?|(-?\d[\d.eE+-]*|true|false|null)')


def template_weights(ids: Sequence[int], mask: Sequence[bool], decode: Decode, template: float) -> list[float]:
    """Weight of each token, [tokens]: ``template`` for what every tool call has in common (tags, braces, quotes,
    keys), 1 for what differs, the tool's name and the values of arguments, and for all else.

    Braces and keys are learnt within a few steps and are most of a call's tokens; at full weight they are most of
    the loss (Agent-FLAN: Chen et al. 2024, section 3.2). ``decode`` turns token ids into text.
    """
    weights = [1.0] * len(ids)
    for start, end in turn_spans(mask):
        pieces = [decode([token]) for token in ids[start:end]]
        text = "".join(pieces)
        free = _differing(text)
        place = 0
        for offset, piece in enumerate(pieces):
            if piece and not any(free[place : place + len(piece)]):
                weights[start + offset] = template
            place += len(piece)
    return weights


def _differing(text: str) -> list[bool]:
    """Whether each character is outside of tool calls, or in one's name or values."""
    free = [True] * len(text)
    for call in _CALL.finditer(text):
        free[call.start() : call.end()] = [False] * (call.end() - call.start())
        for literal in _LITERAL.finditer(text, *call.span(1)):
            if literal.group(2):  # a key
                continue
            group = 1 if literal.group(1) is not None else 3
            start, end = literal.span(group)
            free[start:end] = [True] * (end - start)
    return free


def row_weights(rows: Sequence[Trajectory], weighting: Literal["none", "reward", "advantage"]) -> list[float]:
    """Weight of each trajectory, [rows]: 1; its reward (reward-weighted regression); or reward minus the mean of its
    task; for a row that is worse than the mean it is 0, or negative for a negative example. Raises UnscoredError if a
    reward is needed and a row has none."""
    if weighting == "none":
        return [1.0] * len(rows)
    if weighting == "reward":
        return [row.scored_reward() for row in rows]
    return centred_advantages([row.scored_reward() for row in rows], [row.task_id for row in rows]).tolist()
