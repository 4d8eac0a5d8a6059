"""What acts in an episode: an engine, and the codec between its tokens and messages."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from agentrl.chat.codec import ChatCodec
from agentrl.engines.base import Engine, Sampling, Session, Turn
from agentrl.environments.base import cut
from agentrl.models.policy import Speaker
from agentrl.rollouts.exploring import CLOSES, END_OF_THINKING, ENDED_THINKING, NO_EXPLORATION, OPENS, Explore
from agentrl.rollouts.limits import Limits
from agentrl.schemas.trajectory import Message

_REMEMBERED = 4096  # openings; groups of samples follow each other
_BEGUN = 8  # tokens of a prompt in which reasoning may have begun


@dataclass(frozen=True)
class Act:
    """What acts: an engine, the codec between its tokens and messages (None for an engine without token ids), and how
    it samples. ``teacher`` acts in the turns that attempts have ``advised``, in place of the episode. ``speaker`` is
    the policy's side that needs no weights, whose codec this is."""

    engine: Engine
    codec: ChatCodec | None
    sampling: Sampling
    limits: Limits
    explore: Explore = NO_EXPLORATION
    teacher: Engine | None = None
    speaker: Speaker | None = None
    openings: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    def opening(self, messages: list[Message], tools: str) -> list[int]:
        """The opening's token ids, none without a codec. Samples of one group have the same, so it is remembered."""
        if self.codec is None:
            return []
        key = (tools, *(message.model_dump_json() for message in messages))
        if key not in self.openings:
            if len(self.openings) >= _REMEMBERED:
                self.openings.clear()
            self.openings[key] = self.codec.opening(messages, tools)
        return self.openings[key]

    def shortened(self, text: str) -> str:
        """The beginning of a text that is longer than an observation may be; other texts as they are."""
        text = cut(text, self.limits.observation_chars)
        tokens = self.limits.observation_tokens
        if tokens is None or self.codec is None or self.codec.count(text) <= tokens:
            return text
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.codec.count(cut(text, middle)) <= tokens else (low, middle - 1)
        return cut(text, low)

    async def sampled(
        self,
        engine: Engine,
        session: Session,
        start: int,
        time_limit: float,
        seed: Callable[[int], int],
        deadline: int = 0,
        info: Counter[str] | None = None,
    ) -> Turn:
        """An engine's turn, with its tokens in the session from ``start`` on. A turn that stopped in the middle of a
        closing tag goes on, and so does one whose reasoning is looked at; ``seed`` gives that of each part. ``info``
        counts reasoning that was ended."""
        codec, sampling = self.codec, self.sampling
        look = self.explore.thinking if engine is self.engine and codec else None
        ends = time.monotonic() + time_limit
        for part in count():
            left = sampling.max_turn_tokens - (len(session.ids) - start)
            size = min(left, look.window) if look else left
            turn = await engine.turn(
                session,
                sampling if size == sampling.max_turn_tokens else sampling.model_copy(update={"max_turn_tokens": size}),
                stop=codec.stop_ids if codec else [],
                seed=seed(part),
                deadline=deadline,
                time_limit=max(0.0, ends - time.monotonic()),
            )
            session.act(turn)
            whole = session.ids[start:]
            if look and turn.stop == "length" and len(turn.ids) == size < left:
                if look.wants(session.logprobs[start:]) and self._thinks(session.ids, start):
                    session.observe(self._end_of_thinking)
                    (info if info is not None else Counter())[ENDED_THINKING] += 1
                    look = None
                if len(session.ids) - start < sampling.max_turn_tokens and len(session.ids) < sampling.max_tokens:
                    continue
            if turn.stop != "stop" or codec is None or codec.ended(whole):
                break
            if len(whole) >= sampling.max_turn_tokens:
                turn = replace(turn, stop="length")
                break
        return turn

    def _thinks(self, ids: list[int], start: int) -> bool:
        """Whether the turn that begins at ``start`` is in the middle of its reasoning. Some prompts begin it."""
        assert self.codec is not None
        text = str(self.codec.template.tokenizer.decode(ids[max(0, start - _BEGUN) :]))
        return text.rfind(OPENS) > text.rfind(CLOSES)

    @cached_property
    def _end_of_thinking(self) -> list[int]:
        assert self.codec is not None
        return self.codec.template.encode(END_OF_THINKING)

    def said(self, session: Session, turn: Turn, start: int) -> tuple[Message | None, str]:
        """The message of a turn that begins at ``start`` of a session, and if it is malformed, why."""
        ids = session.ids[start:]
        if self.codec is None or not ids:
            return turn.message, ""
        parsed = self.codec.parse(ids, session.ids[:start], session.tools)
        return parsed.message, parsed.error or ""
