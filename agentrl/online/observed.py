"""Cross-entropy on what environments answered, as the second stream of the loss (ECHO, arXiv 2605.24517). The stream of
the policy gradient stays what it is without."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from agentrl.schemas.training import TrainingRow
from agentrl.schemas.trajectory import Message, Role, Trajectory

Decode = Callable[[list[int]], str]

HALF = "\ufffd"
"""What a decoder writes for a token that ends within a character."""


class Observed:
    """Weights of the bodies of observations, by the role of their message, as in ``{"tool": 0.1}``. What a template
    writes around a body, and the opening, weigh nothing. ``unplaced`` counts bodies whose text is not found in their
    tokens; they weigh nothing either. ``decode`` turns token ids into text."""

    def __init__(self, observe: Mapping[str, float], decode: Decode) -> None:
        self.observe, self.decode = observe, decode
        self.unplaced = 0
        self._pieces: dict[int, str] = {}

    def weights(self, row: Trajectory) -> np.ndarray:
        """What each token of a rollout weighs, [tokens] in float32. Tokens that a fork shares with its parent weigh
        nothing: the parent has them. Nor do those that the segment before a row's has."""
        weights = np.zeros(len(row.input_ids), np.float32)
        blocks = [list(block) for _, block in groupby(row.messages, key=lambda message: message.role is Role.ASSISTANT)]
        for block in blocks[1:]:
            start, end = block[0].token_start, block[0].token_end
            if start is not None and end is not None and block[0].role is not Role.ASSISTANT:
                self._weigh(
                    weights, block, row.input_ids, start, max(start, *(message.token_end or end for message in block))
                )
        weights[: row.fork_at] = 0.0
        weights[: _again(row)] = 0.0
        return weights

    def _weigh(self, weights: np.ndarray, block: Sequence[Message], ids: Sequence[int], start: int, end: int) -> None:
        """Weigh the bodies of messages whose tokens lie from ``start`` to ``end``. White space is not compared: some
        tokenizers decode a token by itself without the space before it, and some templates trim bodies."""
        parts = list(self._parts(ids, start, end))
        starts, pieces = [*(first for first, _ in parts), end], [_bare(piece) for _, piece in parts]
        text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
        cursor = 0
        for message in block:
            body = _bare(message.content)
            index = text.find(body, cursor)
            if index < 0:
                self.unplaced += message.role.value in self.observe
                continue
            cursor = index + len(body)
            weight = self.observe.get(message.role.value)
            if not body or not weight:
                continue
            first = np.searchsorted(ends, index, side="right")
            after = np.searchsorted(ends, cursor, side="left") + 1
            weights[starts[first] : starts[after]] = weight

    def _parts(self, ids: Sequence[int], start: int, end: int) -> Iterator[tuple[int, str]]:
        """Text of the tokens from ``start`` to ``end``, each with the place of its first token: of one token, or of
        several that are whole characters together only."""
        first = start
        for position in range(start, end):
            piece = self._piece(ids[position]) if first == position else self.decode(list(ids[first : position + 1]))
            if HALF not in piece or position + 1 == end:
                yield first, piece
                first = position + 1

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self.decode([token])
        return self._pieces[token]

    def rows(
        self, trained: Sequence[TrainingRow], rollouts: Sequence[Trajectory], attempts: np.ndarray
    ) -> list[TrainingRow]:
        """Training rows with the second stream: those of the first stream, and those that have only observations, whose
        ``mask`` is false everywhere. They are in the order of the rollouts, of which ``attempts`` [rollouts] numbers
        the units."""
        known = {row.row_id: row for row in trained}
        reference = any(row.ref_logprobs for row in trained)
        with_weights = []
        for number, rollout in zip(attempts.tolist(), rollouts, strict=True):
            weights = self.weights(rollout)
            row = known.get(rollout.trajectory_id)
            if row is None and weights.any():
                row = _alone(rollout, number, reference)
            if row is not None:
                with_weights.append(row.model_copy(update={"ce_weights": weights.tolist()}))
        return with_weights


def _again(row: Trajectory) -> int:
    """How many of a row's first tokens stand in the segment before it too. If its policy was asked for a summary there,
    all before the row's own turns. If not, the answers to the last turn are new: the context was compressed before the
    policy saw them."""
    if not row.segment:
        return 0
    own = row.action_mask.index(True) if True in row.action_mask else len(row.action_mask)
    if (json.loads(row.sampling).get("compress") or {}).get("by") == "summary":
        return own
    ends = (message.token_end for message in row.messages if message.role is Role.ASSISTANT)
    return max((end for end in ends if end is not None and end <= own), default=own)


def _bare(text: str) -> str:
    """A text without white space."""
    return "".join(text.split())


def _alone(rollout: Trajectory, number: int, reference: bool) -> TrainingRow:
    """A row without a first stream."""
    nothing = [0.0] * len(rollout.input_ids)
    return TrainingRow(
        row_id=rollout.trajectory_id,
        unit=number,
        label=0 if rollout.success is None else 2 * rollout.success - 1,
        input_ids=rollout.input_ids,
        mask=[False] * len(rollout.input_ids),
        weights=nothing,
        logprobs=rollout.logprobs,
        ref_logprobs=nothing if reference else [],
    )
