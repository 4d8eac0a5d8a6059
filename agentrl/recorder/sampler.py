"""Sampling one turn for a client, in pieces if it wants to read along."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from agentrl.chat.codec import ChatCodec
from agentrl.chat.hermes import Parsed
from agentrl.engines.base import Engine, Sampling, SchemaEngine, Session, Turn
from agentrl.engines.seeds import stream
from agentrl.models.policy import Speaker
from agentrl.schemas.trajectory import Message, Role

PIECE = 8
"""Tokens that are sampled before a stream tells of them, or a stop string is looked for. Engine calls cost time."""

_MAY_BEGIN_A_CALL = "<[{`"
_LONG = 20_000  # characters that are encoded in a thread, since others wait meanwhile


Tell = Callable[[str, str | None], None]
"""What a reader is shown: more text, and what was thought before it."""


@dataclass
class Sampler:
    """An engine, the policy's side that needs no weights, and how turns are sampled if a request does not say. Without
    ``policy``, the engine reads and says messages, and no tokens. The smallest ``deadline`` is served first."""

    engine: Engine
    policy: Speaker | None
    sampling: Sampling
    turn_s: float
    seed: int
    deadline: int = 0

    @property
    def codec(self) -> ChatCodec | None:
        return self.policy.codec if self.policy else None

    async def encoded(self, messages: Sequence[Message], encode: Callable[[], list[int]]) -> list[int]:
        """What ``encode`` makes of ``messages``."""
        size = sum(len(message.content) for message in messages)
        return await asyncio.to_thread(encode) if size > _LONG else encode()

    def keeps_schemas(self, before: list[int]) -> bool:
        """Whether a turn after these tokens can be kept to a JSON schema: the engine can, and the dialect reads JSON
        alone as an answer, and as no thought or call."""
        codec = self.codec
        if codec is None or not isinstance(self.engine, SchemaEngine):
            return False
        ids = [*codec.template.encode("{}"), *codec.stop_ids[:1]]
        read = codec.parse(ids, before)
        return codec.ended(ids) and read == Parsed(Message(role=Role.ASSISTANT, content="{}"))

    async def turn(
        self,
        session: Session,
        sampling: Sampling,
        seed: int,
        tools: str,
        stop: Sequence[str] = (),
        tell: Tell | None = None,
        schema: str | None = None,
    ) -> tuple[Turn, Parsed]:
        """The session's next turn, which is appended to it, and its message. ``tell`` is given the text as it comes,
        and what was thought before it; a turn by a ``schema`` comes at once. A turn that says one of ``stop`` ends
        before it.

        Raises EngineError if the engine fails, and SchemaError if it cannot keep to the schema.
        """
        codec = self.codec
        if codec is None or self.policy is None:
            limits = {"seed": seed, "deadline": self.deadline, "time_limit": self.turn_s}
            turn = await self.engine.turn(session, sampling, stop=[], **limits)  # type: ignore[arg-type]
            assert turn.message is not None
            return turn, Parsed(turn.message)
        ask: Callable[..., Awaitable[Turn]] = self.engine.turn
        whole = not (tell or stop)
        if schema is not None and isinstance(self.engine, SchemaEngine):
            ask, whole = partial(self.engine.turn, schema=schema), True
        ends = time.monotonic() + self.turn_s
        before = list(session.ids)
        own = Session()
        shown = ""
        for part in range(sampling.max_tokens):
            room = sampling.max_turn_tokens - len(own.ids)
            size = room if whole else min(room, PIECE)
            turn = await ask(
                session,
                sampling if size == sampling.max_turn_tokens else sampling.model_copy(update={"max_turn_tokens": size}),
                stop=codec.stop_ids,
                seed=stream(seed, "piece", part),
                deadline=self.deadline,
                time_limit=max(0.0, ends - time.monotonic()),
            )
            session.act(turn)
            own.act(turn)
            if stop and (end := _said(own.ids, stop, self.policy)) is not None:
                own, ended = self._cut(own, end), True
                break
            ended = turn.stop == "stop" and codec.ended(own.ids)
            full = len(own.ids) >= sampling.max_turn_tokens or len(session.ids) >= sampling.max_tokens
            if ended or full or turn.stop == "cut" or not turn.ids:
                break
            if tell:
                shown += _told(codec, own.ids, before, tools, shown, max(map(len, stop), default=0), tell)
        parsed = codec.parse(own.ids, before, tools)
        if tell and parsed.message.content.startswith(shown) and (rest := parsed.message.content[len(shown) :]):
            tell(rest, parsed.message.reasoning)
        how: Literal["stop", "length", "cut"] = "stop" if ended else "cut" if turn.stop == "cut" else "length"
        return Turn(own.ids, own.logprobs, own.spans, how), parsed

    def _cut(self, own: Session, end: int) -> Session:
        spans = [span.model_copy(update={"end": min(span.end, end)}) for span in own.spans if span.start < end]
        return Session(own.ids[:end], own.mask[:end], own.logprobs[:end], spans)


def _told(codec: ChatCodec, ids: list[int], before: list[int], tools: str, shown: str, kept: int, tell: Tell) -> str:
    """Tell the text that no later token can turn into something else, and return it. The last ``kept`` characters may
    be the beginning of a stop string."""
    parsed = codec.parse(ids, before, tools)
    text = "" if parsed.error or parsed.message.tool_calls else parsed.message.content
    marks = _MAY_BEGIN_A_CALL if tools != "[]" else "<"
    text = text[: min((index for mark in marks if (index := text.find(mark)) >= 0), default=len(text))]
    text = text[: max(0, len(text) - kept)].rstrip("\ufffd").rstrip()
    new = text[len(shown) :] if text.startswith(shown) else ""
    if new:
        tell(new, parsed.message.reasoning)
    return new


def _said(ids: list[int], stop: Sequence[str], policy: Speaker) -> int | None:
    """The number of tokens before the first one with which the text says a stop string; None if it does not."""
    decode = policy.tokenizer.decode
    if not any(string in decode(ids) for string in stop):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if any(string in decode(ids[:middle]) for string in stop) else (middle + 1, high)
    return low - 1
