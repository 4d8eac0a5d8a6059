"""A turn of a recorded episode: under way, as it is kept, and as its client is told of it."""

import secrets
from dataclasses import dataclass
from functools import lru_cache

from agentrl.engines.base import Sampling, Turn
from agentrl.recorder.episode import RecordedEpisode
from agentrl.recorder.tree import SampledTurn, digests
from agentrl.recorder.wire import Answered, Reply, TurnRequest
from agentrl.schemas.json_text import is_json
from agentrl.schemas.trajectory import Message, Role


class Turning(Reply):
    """A turn of an episode, under way or done."""

    def __init__(self, episode: RecordedEpisode, number: int) -> None:
        super().__init__(f"{episode.name}-{number}")
        self.episode, self.number = episode, number
        self.turn: SampledTurn | None = None


@dataclass
class Following:
    """What a turn follows: a sampled turn, messages after it, and the whole conversation with its digest."""

    before: SampledTurn | None
    rest: list[Message]
    conversation: list[Message]
    reached: bytes


def sampled_turn(
    reply: Turning,
    asked: TurnRequest,
    reached: bytes,
    before: SampledTurn | None,
    heard: tuple[list[Message], list[int]],
    sampled: tuple[Turn, Message],
    sampling: str,
) -> SampledTurn:
    """A turn as it is kept: after ``before``, messages and tokens were heard, and a turn was sampled, with its message.
    ``reached`` is the digest of the conversation before it."""
    turn, message = sampled
    return SampledTurn(
        number=reply.number,
        parent=before,
        heard=heard[0],
        heard_ids=heard[1],
        turn=turn,
        message=message,
        call_ids=[f"call_{secrets.token_hex(6)}" for _ in message.tool_calls],
        digest=digests([message], reached)[0],
        tools=asked.tools,
        sampling=sampling,
        instructed=before is None and asked.instructions is not None,
        agent=asked.caller.agent,
        kind=asked.caller.kind or ("side" if asked.schema else ""),
    )


def differences(asked: TurnRequest, message: Message, unreadable: str | None, model: str) -> dict[str, int]:
    """Counts of what is not as the client wished."""
    names = [call.name for call in message.tool_calls]
    unmet = {
        "auto": False,
        "none": bool(names),
        "required": not names,
        "single": len(names) > 1,
    }.get(asked.tool_choice, asked.tool_choice.removeprefix("function:") not in names)
    return {
        "tool_choice_unmet": int(unmet),
        "format_errors": int(unreadable is not None),
        "not_json": int(asked.schema is not None and not is_json(message.content)),
        "tools_dropped": asked.dropped_tools,
        "other_model": int(asked.model != model),
        **{f"ignored_{name}": 1 for name in asked.ignored},
    }


@lru_cache(maxsize=256)
def sampling_json(sampling: Sampling, turn_tokens: int) -> str:
    """How a turn was sampled, as JSON, with the server's own limit of a turn: that of a request is its client's."""
    return sampling.model_copy(update={"max_turn_tokens": turn_tokens}).model_dump_json()


def answered(reply: Turning, asked: TurnRequest, made: SampledTurn, prompt: int, stopped_by: str | None) -> Answered:
    """A turn as its client is told of it, after ``prompt`` tokens."""
    calls = [
        call.model_copy(update={"id": told}) for call, told in zip(made.message.tool_calls, made.call_ids, strict=True)
    ]
    limited = made.turn.stop != "stop"
    return Answered(
        name=reply.name,
        model=asked.model,
        message=made.message.model_copy(update={"role": Role.ASSISTANT, "tool_calls": calls}),
        finish="length" if limited else "tool_calls" if calls else "stop",
        prompt_tokens=prompt,
        sampled_tokens=len(made.turn.ids),
        created=reply.created,
        stopped_by=stopped_by,
    )
