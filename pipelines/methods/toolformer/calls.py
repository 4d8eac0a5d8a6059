"""A call in the middle of a row: the row without it, with an empty answer, and the loss of what follows (Toolformer:
Schick et al. 2023, arXiv 2302.04761, section 2, "Filtering API calls").

    as it is:     [prompt]  find(Ann, boss) -> Bob    find(Bob, job) ...
    unanswered:   [prompt]  find(Ann, boss) ->        find(Bob, job) ...      loss of these tokens, the first ones
    without:      [prompt]                            find(Bob, job) ...      counting most

What follows keeps its tokens in all three. It is what the policy itself says after the answer, without answers of
tools.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import Any, NamedTuple, TypeVar

from agentrl.advantages.turns import acting
from agentrl.chat.codec import ChatCodec, spanned
from agentrl.chat.forms import numbered
from agentrl.rollouts.reopen import moved
from agentrl.schemas.trajectory import Message, Role, ToolCall, Trajectory

SOURCE = "calls_cut"

Value = TypeVar("Value")


class UnclearError(ValueError):
    """A call whose position in the tokens of its row is not known, or that the dialect cannot leave out alone."""


class CallLocation(NamedTuple):
    """Where a call stands: the number of its message, and its number among the calls of that message."""

    message: int
    call: int


class Variant(NamedTuple):
    """Tokens up to the last one that counts, and which of them are those that follow the call and count."""

    input_ids: list[int]
    mask: list[bool]


class Variants(NamedTuple):
    """A row as it is, without a call and its answer, and with the call and an empty answer."""

    given: Variant
    without: Variant
    unanswered: Variant


def locations(row: Trajectory) -> list[CallLocation]:
    """All calls of the turns that a row is trained on, in order."""
    turns = {id(turn) for turn in acting(row.messages) if any(row.action_mask[turn.token_start : turn.token_end])}
    return [
        CallLocation(number, call)
        for number, message in enumerate(row.messages)
        if id(message) in turns
        for call in range(len(message.tool_calls))
    ]


def call_at(row: Trajectory, location: CallLocation) -> ToolCall:
    return row.messages[location.message].tool_calls[location.call]


def token_weights(count: int, decay: float) -> list[float]:
    """Weights of the tokens that follow a call, the nearest first, without those that are 0: ``max(0, 1 - decay t)``
    divided by their sum. The paper divides by the sum of the whole window; over the tokens that there are, the loss is
    a mean near the end of a row too."""
    raw = list(takewhile(lambda weight: weight > 0, (1 - decay * t for t in range(count))))
    return [weight / sum(raw) for weight in raw]


def weighted_loss(logprobs: Sequence[float], decay: float) -> float:
    """``L_i(z)``: the weighted cross-entropy of the tokens that follow, in nats a token."""
    weights = token_weights(len(logprobs), decay)
    return -sum(weight * logprob for weight, logprob in zip(weights, logprobs, strict=False))


def gain(given: float, without: float, unanswered: float) -> float:
    """``L_i^- - L_i^+``: what a call and its answer take off the loss, beside the better of no call and no answer."""
    return min(without, unanswered) - given


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn with calls, the answer to each of them, and the tokens of the turn, [start, end), and of the next turn,
    from ``following`` on. ``spoken`` are the messages of the row with ids of calls as the dialect writes them."""

    row: Trajectory
    location: CallLocation
    spoken: list[Message]
    start: int
    end: int
    following: int

    @classmethod
    def of(cls, row: Trajectory, location: CallLocation, codec: ChatCodec) -> "AnsweredTurn | None":
        """None if no turn follows.

        Raises UnclearError if the turn has no span in the tokens, or is not answered by one answer to each call.
        """
        turn, after = row.messages[location.message], row.messages[location.message + 1 :]
        answers = list(takewhile(lambda message: message.role is not Role.ASSISTANT, after))
        if len(answers) == len(after):
            return None
        following = after[len(answers)].token_start
        if turn.token_start is None or turn.token_end is None or following is None:
            raise UnclearError(f"{row.trajectory_id} does not say where its turns lie in its tokens")
        if [answer.tool_call_id for answer in answers] != [call.id for call in turn.tool_calls]:
            raise UnclearError(f"{row.trajectory_id} does not have one answer to each call of a turn")
        spoken = numbered(row.messages, codec.template.id_form)
        return cls(row, location, spoken, turn.token_start, turn.token_end, following)

    @property
    def _answers(self) -> list[Message]:
        first = self.location.message + 1
        return self.spoken[first : first + len(self.spoken[self.location.message].tool_calls)]

    def variants(self, codec: ChatCodec, decay: float) -> Variants | None:
        """None if no token that is trained on follows. Raises UnclearError if the dialect cannot write one of them."""
        row = self.row
        positions = list(compress(range(self.following, len(row.input_ids)), row.action_mask[self.following :]))
        if not positions:
            return None
        last = positions[len(token_weights(len(positions), decay)) - 1] + 1
        ids, mask = row.input_ids[self.following : last], row.action_mask[self.following : last]
        heads = (row.input_ids[: self.following], self._head_without(codec), self._head_unanswered(codec))
        return Variants(*(Variant([*head, *ids], [*[False] * len(head), *mask]) for head in heads))

    def _head_without(self, codec: ChatCodec) -> list[int]:
        turn, between = self._shorter(codec)
        return [*self.row.input_ids[: self.start], *turn, *between]

    def _head_unanswered(self, codec: ChatCodec) -> list[int]:
        answers = list(self._answers)
        answers[self.location.call] = answers[self.location.call].model_copy(update={"content": ""})
        ids = self.row.input_ids
        return [*ids[: self.end], *self._between(codec, answers, ids[self.start : self.end])]

    def _between(self, codec: ChatCodec, answers: list[Message], turn: list[int]) -> list[int]:
        try:
            return codec.observations(answers, self.row.input_ids[: self.start], turn, self.row.tools)
        except ValueError as error:
            raise UnclearError(f"{self.row.trajectory_id}: {error}") from error

    def _shorter(self, codec: ChatCodec) -> tuple[list[int], list[int]]:
        """The turn without the call, and its other answers; nothing of both if it was the only call: what is said
        beside it goes with it, and the next turn stands where it stood, after the same tokens."""
        turn, answers = self.spoken[self.location.message], self._answers
        if len(turn.tool_calls) == 1:
            return [], []
        calls = _but(turn.tool_calls, self.location.call)
        shorter, others = turn.model_copy(update={"tool_calls": calls}), _but(answers, self.location.call)
        earlier = self.spoken[: self.location.message]
        before = list(takewhile(lambda message: message.role is not Role.ASSISTANT, reversed(earlier)))[::-1]
        try:
            ids = codec.assistant(shorter, others, before if len(before) < len(earlier) else ())
        except ValueError as error:
            raise UnclearError(f"{self.row.trajectory_id}: {error}") from error
        back = codec.parse(ids, self.row.input_ids[: self.start], self.row.tools).message
        if [(call.name, call.parsed()) for call in back.tool_calls] != [(call.name, call.parsed()) for call in calls]:
            raise UnclearError(
                f"{self.row.trajectory_id}: the dialect {codec.dialect} does not write calls that it reads"
            )
        return ids, self._between(codec, others, ids)

    def cut(self, codec: ChatCodec) -> Trajectory:
        """The row without the call, under its own name. Its log-probabilities are NaN: no policy has sampled what
        follows after this beginning."""
        row, number = self.row, self.location.message
        turn, between = self._shorter(codec)
        end = self.start + len(turn)
        shift = end + len(between) - self.following
        answers = _but(row.messages[number + 1 : number + 1 + len(self._answers)], self.location.call)
        kept: list[Message] = []
        if turn:
            calls = _but(row.messages[number].tool_calls, self.location.call)
            spans = {"token_start": self.start, "token_end": end}
            written = row.messages[number].model_copy(update={"tool_calls": calls, **spans})
            kept = [written, *spanned(answers, end, end + len(between))]
        after = row.messages[number + 1 + len(self._answers) :]
        ids = [*row.input_ids[: self.start], *turn, *between, *row.input_ids[self.following :]]
        trained = [True] * len(turn) + [False] * len(between)
        mask = [*row.action_mask[: self.start], *trained, *row.action_mask[self.following :]]
        refused = bool(self._answers[self.location.call].error)
        return row.model_copy(
            update={
                "messages": [*row.messages[:number], *kept, *(moved(message, shift) for message in after)],
                "message_seconds": None,
                "input_ids": ids,
                "action_mask": mask,
                "logprobs": [float("nan")] * len(ids),
                "spans": [],
                "n_tokens": len(ids),
                "n_action_tokens": sum(mask),
                "n_steps": row.n_steps - (not turn),
                "n_tool_calls": row.n_tool_calls - 1,
                "n_tool_errors": row.n_tool_errors - (refused and row.n_tool_errors > 0),
            }
        )


def _meant(calls: Sequence[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, call.parsed()) for call in calls]


def _but(values: Sequence[Value], number: int) -> list[Value]:
    """All but one of them."""
    return [value for other, value in enumerate(values) if other != number]
