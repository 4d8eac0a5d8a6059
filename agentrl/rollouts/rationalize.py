"""Rationalisation (STaR: Zelikman et al. 2022, section 3.3): solve with the answer as a hint, train without it."""

import json

from agentrl.advantages.turns import acting
from agentrl.chat.codec import ChatCodec, spanned
from schemas.task import Task
from schemas.trajectory import Message, Role, Span, Trajectory

HINT = "({answer})"


def with_hint(opening: list[Message], task: Task, template: str) -> list[Message]:
    """The opening with a hint after its last message; ``{answer}`` in the template stands for the ground truth."""
    hint = template.format(answer=json.loads(task.ground_truth))
    return [*opening[:-1], opening[-1].model_copy(update={"content": f"{opening[-1].content} {hint}"})]


def without_hint(opening: list[Message], task: Task, template: str) -> list[Message]:
    """The opening that :func:`with_hint` made this of."""
    hint = " " + template.format(answer=json.loads(task.ground_truth))
    return [*opening[:-1], opening[-1].model_copy(update={"content": opening[-1].content.removesuffix(hint)})]


def is_grounded(trajectory: Trajectory, task: Task) -> bool:
    """Whether some observation holds the answer. A run without that only repeats its hint, and teaches nothing."""
    answer = str(json.loads(task.ground_truth)).strip()
    return any(message.role is Role.TOOL and message.content.strip() == answer for message in trajectory.messages)


def strip_hint(hinted: Trajectory, task: Task, template: str, codec: ChatCodec, trajectory_id: str) -> Trajectory:
    """The same run after the opening without the hint: only the opening's tokens change.

    Its log-probabilities are NaN, since no policy has sampled these tokens after this opening.
    """
    first = acting(hinted.messages)[0]
    number = next(n for n, message in enumerate(hinted.messages) if message is first)
    start = first.token_start
    assert start is not None  # it was sampled
    opening = without_hint(hinted.messages[:number], task, template)
    ids = codec.opening(opening, hinted.tools)
    mask = [False] * len(ids) + hinted.action_mask[start:]
    shift = len(ids) - start
    spans = [Span(version=one.version, start=one.start + shift, end=one.end + shift) for one in hinted.spans]
    messages = spanned(opening, 0, len(ids)) + [_shifted(message, shift) for message in hinted.messages[number:]]
    return hinted.model_copy(
        update={
            "trajectory_id": trajectory_id,
            "episode_id": trajectory_id,
            "parent_id": hinted.trajectory_id,
            "source": "rationalized",
            "messages": messages,
            "input_ids": ids + hinted.input_ids[start:],
            "action_mask": mask,
            "logprobs": [float("nan")] * len(mask),
            "spans": spans,
            "n_tokens": len(mask),
        }
    )


def _shifted(message: Message, shift: int) -> Message:
    """A message whose tokens lie ``shift`` further on; one without tokens as it is."""
    if message.token_start is None or message.token_end is None:
        return message
    return message.model_copy(
        update={"token_start": message.token_start + shift, "token_end": message.token_end + shift}
    )
