"""A stored row of an agent program that goes on: the program is started anew, and is given the turns of the row until
the one from which the policy speaks again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.advantages.turns import acting
from agentrl.chat.hermes import Parsed
from agentrl.engines.base import EngineError, Sampling, Session, Turn
from agentrl.recorder.sampler import Sampler, Tell
from agentrl.rollouts.attempts import Prefix


class ReplayDivergedError(EngineError):
    """A program said otherwise than when its row was made."""


@dataclass
class ReplayingSampler(Sampler):
    """Says the turns of ``prefix`` in the conversation that asks for them, and samples all others. If the program says
    something else in that conversation than in the row, it raises ReplayDivergedError, or with ``goes_on`` tells
    ``differences`` and says the next turn all the same. ``arrived`` says that the row's turns are over."""

    prefix: Prefix = field(default_factory=lambda: Prefix("", (), ()))
    goes_on: bool = False
    arrived: bool = False
    replayed: list[Turn] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    _said: list[int] = field(default_factory=list)

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
        """See :meth:`agentrl.recorder.sampler.Sampler.turn`."""
        if self.arrived or not self._is_replayed(session.ids, tools):
            return await super().turn(session, sampling, seed, tools, stop, tell, schema)
        assert self.codec is not None
        message = acting(self.prefix.messages)[len(self.replayed)]
        before, ids = list(session.ids), list(self.prefix.ids[message.token_start : message.token_end])
        turn = Turn(ids, [0.0] * len(ids), [], "stop")
        session.act(turn)
        self._said = list(session.ids)
        self.replayed.append(turn)
        parsed = self.codec.parse(ids, before, tools)
        if tell:
            tell(parsed.message.content, parsed.message.reasoning)
        return turn, parsed

    def _is_replayed(self, ids: Sequence[int], tools: str) -> bool:
        """Whether the next turn of the row answers a request with these tokens. The first request after them is
        compared too."""
        turns, number = acting(self.prefix.messages), len(self.replayed)
        start = turns[number].token_start if number < len(turns) else len(self.prefix.ids)
        before = (turns[number - 1].token_end or 0) if number else 0
        if list(ids[: len(self._said)]) != self._said:
            return False  # another conversation, such as a title's
        if list(ids[len(self._said) :]) != list(self.prefix.ids[before:start]):
            if not number and not (self.goes_on and (tools != "[]" or not any(turn.tool_calls for turn in turns))):
                return False
            what = f"what the program sent before turn {number} is not what the row has"
            if not self.goes_on:
                raise ReplayDivergedError(what)
            self.differences.append(what)
        self.arrived = number == len(turns)
        return not self.arrived
