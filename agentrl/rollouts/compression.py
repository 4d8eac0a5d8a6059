"""Long episodes as segments: each begins with the prompt, what stands for the turns before it, and the last of these.

A token that was sampled is trained on in one segment, and is context in those after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.chat.codec import ChatCodec, tokenize
from agentrl.rollouts.reopen import opening_of
from schemas.trajectory import Message, Role, Trajectory

By = Literal["drop", "schema"]
"""What stands for turns that are left out: nothing, or a line for each of their calls."""

RESULT_CHARS = 80
"""Of a tool's answer in a line of ``schema``."""

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
    steps: list[list[Message]] = []
    for message in row.messages[len(opening_of(row)) :]:
        if message.role is Role.ASSISTANT:
            steps.append([])
        steps[-1].append(message)
    return [Exchange(step, _is_trained(row, step[0])) for step in steps]


def _is_trained(row: Trajectory, turn: Message) -> bool:
    if not row.input_ids:
        return True
    return turn.token_start is not None and any(row.action_mask[turn.token_start : turn.token_end])


def opening_after(opening: Sequence[Message], left_out: Sequence[Exchange], by: By) -> list[Message]:
    """The opening of a segment: what stands for the steps that were left out comes after the prompt."""
    lines = [line for step in left_out for line in _lines(step)] if by == "schema" else []
    if not lines:
        return list(opening)
    text = "\n".join([f"{opening[-1].content}\n\nSo far:", *lines])
    return [*opening[:-1], opening[-1].model_copy(update={"content": text})]


def _lines(step: Exchange) -> list[str]:
    answers = {one.tool_call_id: one.content for one in step.messages[1:] if one.role is Role.TOOL}
    return [
        f"{call.name} {call.arguments} -> {_short(answers.get(call.id, ''))}" for call in step.messages[0].tool_calls
    ]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= RESULT_CHARS else f"{line[: RESULT_CHARS - 3]}..."


def segments(row: Trajectory, codec: ChatCodec, tokenizer: str, limit: int, keep_last: int, by: By) -> list[Trajectory]:
    """A row as segments of at most ``limit`` tokens each, encoded anew: rows of its episode in order, named by their
    number. The ``keep_last`` steps before a segment stand in it again, fewer if they do not fit.

    Raises StepTooLongError if a step does not fit.
    """
    steps, made, done = steps_of(row), list[Trajectory](), 0
    while done < len(steps):
        one = _segment(row, steps, done, codec, tokenizer, limit, keep_last, by)
        made.append(one.model_copy(update={"segment": len(made)}))
        done += one.n_steps
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
) -> Trajectory:
    """The longest segment that begins with the step ``done`` and fits."""
    for kept in range(min(keep_last, done), -1, -1):
        found = None
        for end in range(done + 1, len(steps) + 1):
            one = _encoded(row, steps, done - kept, done, end, codec, tokenizer, by)
            if one.n_tokens > limit:
                break
            found = one
        if found is not None:
            return found
    raise StepTooLongError(
        f"step {done + 1} of {row.trajectory_id} does not fit {limit} tokens after the prompt; raise limit, or leave "
        "the row out"
    )


def _encoded(
    row: Trajectory, steps: list[Exchange], first: int, done: int, end: int, codec: ChatCodec, tokenizer: str, by: By
) -> Trajectory:
    """The segment that shows the steps from ``first`` on, and is trained on those from ``done`` to ``end``."""
    shown = [message for step in steps[first:end] for message in step.messages]
    opening = opening_after(opening_of(row), steps[:first], by)
    bare = [one.model_copy(update={"token_start": None, "token_end": None}) for one in [*opening, *shown]]
    cleared = {"messages": bare, "input_ids": [], "action_mask": [], "logprobs": [], "spans": []}
    made = tokenize(row.model_copy(update=cleared), codec, tokenizer)
    mask = [False] * len(made.input_ids)
    turns = [one for one in made.messages if one.role is Role.ASSISTANT]
    for step, turn in zip(steps[done:end], turns[done - first :], strict=True):
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
