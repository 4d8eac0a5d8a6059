"""Long episodes as segments: each begins with the prompt, what stands for the turns before it, and the last of these.

A token that was sampled is trained on in one segment, and is context in those after it. :func:`window` says how an
episode under way goes on, and :func:`segments` cuts a stored one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.chat.codec import ChatCodec, spanned, tokenize
from agentrl.engines.base import Compress
from agentrl.rollouts.reopen import moved, opening_of
from agentrl.rollouts.segments import SUMMARY
from agentrl.schemas.trajectory import Message, Role, Trajectory

By = Literal["drop", "schema", "summary"]
"""What stands for turns that are left out: nothing, a line for each of their calls, or a summary."""

RESULT_CHARS = 80
"""Of a tool's answer in a line of ``schema``."""

SUMMED_UP = 3
"""Calls whose answers a summary names that no policy wrote."""

ASK = Compress(limit=32).ask

SOURCE = "segmented"


class StepTooLongError(ValueError):
    """A turn that does not fit a segment even if nothing else but the prompt stands there."""


@dataclass(frozen=True)
class Exchange:
    """An assistant message, what answered it, and whether it is trained on."""

    messages: list[Message]
    trained: bool


def steps_of(row: Trajectory) -> list[Exchange]:
    """The steps of a row. In a row with tokens, a turn is trained on if a token of it is."""
    return [Exchange(step, _is_trained(row, step[0])) for step in _exchanges(row.messages[len(opening_of(row)) :])]


def _exchanges(messages: Sequence[Message]) -> list[list[Message]]:
    """Messages after an opening, by turns: each begins with what the assistant said."""
    steps: list[list[Message]] = []
    for message in messages:
        if message.role is Role.ASSISTANT:
            steps.append([])
        steps[-1].append(message)
    return steps


def _is_trained(row: Trajectory, turn: Message) -> bool:
    if not row.input_ids:
        return True
    return turn.token_start is not None and any(row.action_mask[turn.token_start : turn.token_end])


@dataclass(frozen=True)
class Window:
    """What an episode goes on from after its context was compressed: ``messages`` with their spans in ``ids``.
    ``left_out`` are the steps of the episode that no longer stand there."""

    messages: list[Message]
    ids: list[int]
    left_out: list[list[Message]]


def window(
    opening: Sequence[Message],
    left_out: Sequence[list[Message]],
    messages: Sequence[Message],
    ids: Sequence[int],
    compress: Compress,
    summary: str,
    encode: Callable[[list[Message]], list[int]],
) -> Window | None:
    """The next prompt of an episode, of at most ``compress.limit`` tokens; None if nothing but the opening is longer.

    ``opening`` is that of the episode, ``left_out`` are steps that do not stand in the context any more, ``messages``
    (with spans in ``ids``) those after the opening that do, up to the answers to the last turn. Tokens of turns and
    answers are taken over as they are; ``encode`` gives those of an opening.
    """
    steps = _exchanges(messages)
    for kept in range(min(compress.keep_last, len(steps)), -1, -1):
        dropped = [*left_out, *steps[: len(steps) - kept]]
        head = opening_after(opening, dropped, compress.by, summary)
        head_ids = encode(head)
        tail = steps[len(steps) - kept :]
        start = (tail[0][0].token_start or 0) if tail else len(ids)
        if len(head_ids) + len(ids) - start > compress.limit:
            continue
        shift = len(head_ids) - start
        again = [moved(message, shift).model_copy(update={"reward": None}) for step in tail for message in step]
        return Window([*spanned(head, 0, len(head_ids)), *again], [*head_ids, *ids[start:]], dropped)
    return None


def opening_after(
    opening: Sequence[Message], left_out: Sequence[Sequence[Message]], by: By, summary: str = ""
) -> list[Message]:
    """The opening of a segment: what stands for the steps that were left out comes after the prompt."""
    text = "\n".join(line for step in left_out for line in lines_of(step)) if by == "schema" else summary
    if not text:
        return list(opening)
    opener = opening[-1].model_copy(update={"content": f"{opening[-1].content}\n\nSo far:\n{text}"})
    return [*opening[:-1], opener]


def lines_of(step: Sequence[Message]) -> list[str]:
    """A line for each call of a step, with the beginning of its answer."""
    answers = {answer.tool_call_id: answer.content for answer in step[1:] if answer.role is Role.TOOL}
    return [f"{call.name} {call.arguments} -> {_short(answers.get(call.id, ''))}" for call in step[0].tool_calls]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= RESULT_CHARS else f"{line[: RESULT_CHARS - 3]}..."


def _summary(steps: Sequence[Exchange]) -> str:
    """What stands for a policy's own summary in a row that no policy of this kind sampled: the last answers."""
    answers = [message.content for step in steps for message in step.messages if message.role is Role.TOOL]
    return ", ".join(_short(answer) for answer in answers[-SUMMED_UP:])


def segments(
    row: Trajectory, codec: ChatCodec, tokenizer: str, limit: int, keep_last: int, by: By, ask: str = ASK
) -> list[Trajectory]:
    """A row as segments of at most ``limit`` tokens each, encoded anew: rows of its episode in order, named by their
    number. The ``keep_last`` steps before a segment stand in it again, fewer if they do not fit.

    Raises StepTooLongError if a step does not fit.
    """
    steps, made, done = steps_of(row), list[Trajectory](), 0
    while done < len(steps):
        segment = _segment(row, steps, done, codec, tokenizer, limit, keep_last, by, ask)
        made.append(segment.model_copy(update={"segment": len(made)}))
        done += segment.n_steps
    if made:
        made[-1] = made[-1].model_copy(update={"n_tool_errors": row.n_tool_errors})
    return made


def _segment(
    row: Trajectory,
    steps: list[Exchange],
    done: int,
    codec: ChatCodec,
    tokenizer: str,
    limit: int,
    keep_last: int,
    by: By,
    ask: str,
) -> Trajectory:
    """The longest segment that begins with the step ``done`` and fits."""
    for kept in range(min(keep_last, done), -1, -1):
        longest = None
        for end in range(done + 1, len(steps) + 1):
            candidate = _encoded(row, steps, done - kept, done, end, codec, tokenizer, by, ask)
            if candidate.n_tokens > limit:
                break
            longest = candidate
        if longest is not None:
            return longest
    raise StepTooLongError(
        f"step {done + 1} of {row.trajectory_id} does not fit {limit} tokens after the prompt; raise limit, or leave "
        "the row out"
    )


def _encoded(
    row: Trajectory,
    steps: list[Exchange],
    first: int,
    done: int,
    end: int,
    codec: ChatCodec,
    tokenizer: str,
    by: By,
    ask: str,
) -> Trajectory:
    """The segment that shows the steps from ``first`` on, and is trained on those from ``done`` to ``end``. With
    summaries it is also trained on that of these steps, unless the episode ends with them."""
    shown = [message for step in steps[first:end] for message in step.messages]
    summary = _summary(steps[:done]) if by == "summary" else ""
    opening = opening_after(opening_of(row), [step.messages for step in steps[:first]], by, summary)
    sums_up = by == "summary" and end < len(steps)
    if sums_up:
        asked = Message(role=Role.USER, name=SUMMARY, content=ask)
        shown += [asked, Message(role=Role.ASSISTANT, content=_summary(steps[:end]))]
    bare = [message.model_copy(update={"token_start": None, "token_end": None}) for message in [*opening, *shown]]
    cleared = {
        "messages": bare,
        "input_ids": [],
        "action_mask": [],
        "logprobs": [],
        "spans": [],
        "message_seconds": None,
    }
    made = tokenize(row.model_copy(update=cleared), codec, tokenizer)
    mask = [False] * len(made.input_ids)
    turns = [message for message in made.messages if message.role is Role.ASSISTANT]
    trained = [*steps[done:end], *steps[end - 1 : end] * sums_up]
    for step, turn in zip(trained, turns[done - first :], strict=True):
        if step.trained and turn.token_start is not None and turn.token_end is not None:
            mask[turn.token_start : turn.token_end] = [True] * (turn.token_end - turn.token_start)
    return made.model_copy(
        update={
            "action_mask": mask,
            "n_action_tokens": sum(mask),
            "n_steps": end - done,
            "n_tool_calls": sum(len(step.messages[0].tool_calls) for step in steps[done:end]),
            "n_tool_errors": 0,
            "parent_id": row.trajectory_id,
            "fork_at": 0,
            "source": SOURCE,
        }
    )
