"""Weights of tokens in supervised training."""

import re
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.advantages.group import centred_advantages
from agentrl.advantages.turns import action_runs
from agentrl.schemas.step_value import StepValue
from agentrl.schemas.trajectory import UnscoredError

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
    for start, end in action_runs(mask):
        pieces = [decode([token]) for token in ids[start:end]]
        text = "".join(pieces)
        free = _differing(text)
        begin = 0
        for offset, piece in enumerate(pieces):
            if piece and not any(free[begin : begin + len(piece)]):
                weights[start + offset] = template
            begin += len(piece)
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


def without_losses(weights: Sequence[float] | np.ndarray, steps: Sequence[StepValue]) -> np.ndarray:
    """Weights of a row's tokens, [tokens], with 0 on the turns that lost value: those after which all of the interval
    of the value lies below the value before them."""
    kept = np.array(weights)
    for step in steps:
        if step.high < step.v:
            kept[step.token_start : step.token_end] = 0.0
    return kept


def row_weights(rows: pa.Table, weighting: Literal["none", "reward", "advantage"]) -> np.ndarray:
    """Weight of each trajectory, [rows], from its columns ``trajectory_id``, ``task_id`` and ``reward``: 1; its reward
    (reward-weighted regression); or reward minus the mean of its task, which is below 0 for those worse than it.

    Raises UnscoredError if a reward is needed and a row has none.
    """
    if weighting == "none":
        return np.ones(len(rows))
    rewards = rows["reward"]
    if rewards.null_count:
        raise UnscoredError("reward", rows.filter(pc.is_null(rewards))["trajectory_id"].to_pylist())
    if weighting == "reward":
        return rewards.to_numpy()
    return centred_advantages(rewards.to_numpy(), rows["task_id"].to_pylist())
