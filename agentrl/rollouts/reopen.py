"""Reopening: the same run after another opening. What follows the opening keeps its tokens and its mask."""

from collections.abc import Sequence
from typing import Any

from agentrl.chat.codec import ChatCodec, spanned
from agentrl.schemas.trajectory import Message, Role, Span, Trajectory


def opening_of(row: Trajectory) -> list[Message]:
    """The messages before the first one of the assistant: all of them if there is none."""
    return row.messages[: _first_turn(row)]


def reopened(
    row: Trajectory,
    opening: Sequence[Message],
    codec: ChatCodec | None,
    trajectory_id: str,
    source: str,
    tools: str | None = None,
    **changes: Any,
) -> Trajectory:
    """The row, called ``trajectory_id``, after another ``opening`` and, if given, with other ``tools``: its parent is
    the row itself. ``changes`` are other columns. A row without tokens needs no ``codec``.

    Its log-probabilities are NaN, since no policy has sampled these tokens after this opening. It shares no prefix with
    its parent, so ``fork_at`` is 0; what was not trained on in the parent is not trained on here.

    Raises ValueError if the first turn of a row with tokens has no span in them.
    """
    number = _first_turn(row)
    offered = row.tools if tools is None else tools
    known = row.message_seconds
    of_row = {
        "trajectory_id": trajectory_id,
        "episode_id": trajectory_id,
        "parent_id": row.trajectory_id,
        "fork_at": 0,
        "source": source,
        "tools": offered,
        "message_seconds": [*[None] * len(opening), *known[number:]] if known else None,
        **changes,
    }
    if not row.input_ids:
        return row.model_copy(update={"messages": [*opening, *row.messages[number:]], **of_row})
    start = row.messages[number].token_start if number < len(row.messages) else None
    if start is None or codec is None:
        raise ValueError(f"{row.trajectory_id} has tokens, and its first turn no span in them; it cannot be reopened")
    ids = codec.opening(list(opening), offered)
    shift = len(ids) - start
    mask = [False] * len(ids) + row.action_mask[start:]
    return row.model_copy(
        update={
            "messages": [*spanned(opening, 0, len(ids)), *(moved(message, shift) for message in row.messages[number:])],
            "input_ids": ids + row.input_ids[start:],
            "action_mask": mask,
            "logprobs": [float("nan")] * len(mask),
            "spans": [Span(version=span.version, start=span.start + shift, end=span.end + shift) for span in row.spans],
            "n_tokens": len(mask),
            **of_row,
        }
    )


def _first_turn(row: Trajectory) -> int:
    indexes = (number for number, message in enumerate(row.messages) if message.role is Role.ASSISTANT)
    return next(indexes, len(row.messages))


def moved(message: Message, shift: int) -> Message:
    """A message whose span begins ``shift`` tokens later."""
    if message.token_start is None or message.token_end is None:
        return message
    return message.model_copy(
        update={"token_start": message.token_start + shift, "token_end": message.token_end + shift}
    )
