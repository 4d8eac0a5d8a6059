"""Models that are asked for a verdict on a rollout, which comes as a JSON object.

What they judge is shown to them as JSON, since a policy may write what looks like instructions.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator

from agentrl.engines import EngineChoice
from agentrl.engines.base import Sampling
from agentrl.engines.configs import EngineConfig
from agentrl.schemas.trajectory import Message, Role, Trajectory

if TYPE_CHECKING:
    from agentrl.engines.base import Engine


class Asking(BaseModel):
    """Asks models for a JSON object, and asks again if a reply holds none that fits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: list[EngineChoice] = Field(min_length=1, description="the models that judge; they give text")
    temperature: float = Field(0.0, ge=0, description="of the model that is asked; 0 takes the most likely token")
    max_tokens: int = Field(1024, ge=1, description="of one reply")
    retries: int = Field(2, ge=0, description="how often a model is asked again if its reply holds no verdict")
    transcript_chars: int = Field(40_000, ge=100, description="of a rollout; of a longer one the middle is left out")

    _built: "list[Engine]" = PrivateAttr(default_factory=list)

    @field_validator("engines")
    @classmethod
    def _give_text(cls, engines: list[EngineConfig]) -> list[EngineConfig]:
        for engine in engines:
            if engine.exact:
                raise ValueError(f"engine {engine.type} samples from the model that is trained; a judge is an endpoint")
        return engines

    async def close(self) -> None:
        """Close the engines. They are built again if they are asked."""
        while self._built:
            await self._built.pop().close()

    async def ask(self, judge: int, prompt: str, number: int) -> dict[str, Any] | None:
        """The JSON object of a reply of the model at ``place``; None if no reply holds one."""
        if not self._built:
            self._built += [config.build(None) for config in self.engines]
        engine = self._built[judge]
        sampling = Sampling(temperature=self.temperature, max_turn_tokens=self.max_tokens, max_tokens=2**31 - 1)
        for attempt in range(1 + self.retries):
            with engine.open() as session:
                session.messages.append(Message(role=Role.USER, content=prompt))
                turn = await engine.turn(session, sampling, stop=[], seed=_seed(prompt, number, attempt))
            verdict = _verdict(turn.message.content if turn.message else "")
            if verdict is not None and self._fits(verdict):
                return verdict
        return None

    def _fits(self, verdict: dict[str, Any]) -> bool:
        """Whether a verdict says what was asked for."""
        raise NotImplementedError


def transcript(rollout: Trajectory, chars: int) -> list[dict[str, Any]] | str:
    """What was said and called in a rollout after its opening, for a judge; text with its middle left out if it is
    longer than ``chars``."""
    begun = next(
        (n for n, message in enumerate(rollout.messages) if message.role is Role.ASSISTANT), len(rollout.messages)
    )
    turns: list[dict[str, Any]] = []
    for message in rollout.messages[begun:]:
        turn: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.tool_calls:
            turn["calls"] = [{"tool": call.name, "arguments": call.arguments} for call in message.tool_calls]
        turns.append(turn)
    text = json.dumps(turns, ensure_ascii=False)
    if len(text) <= chars:
        return turns
    return f"{text[: chars // 2]} [{len(text) - chars} characters are left out] {text[-(chars // 2) :]}"


def _verdict(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text that is in no other."""
    decoder, position, verdict = json.JSONDecoder(), 0, None
    while (start := text.find("{", position)) >= 0:
        try:
            verdict, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            position = start + 1
    return verdict


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())
