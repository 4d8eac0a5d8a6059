"""A user whom a model plays (tau-bench: Yao et al. 2024): what he says next in a conversation, by any engine.

user = SimulatedUser(UserConfig(engine=OpenAIConfig(model="gpt-5-mini")))
said = await user.says("You are Ann. You want to return a tent. ...", heard, seed)
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.engines import EngineChoice
from agentrl.engines.base import Engine, Sampling
from agentrl.models.policy import Policy
from agentrl.schemas.annotations import External
from agentrl.schemas.trajectory import Message, Role

GREETING = "Hello. How can I help you?"
"""What the user's model reads first if the user begins, since chat templates expect another one to begin."""


class UserConfig(BaseModel):
    """Which model plays the user, and how it samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["engine"] = "engine"
    engine: EngineChoice
    model: Annotated[str, External("model")] | None = Field(
        None, description="folder of the model, for engines that sample from one; an endpoint names its own"
    )
    temperature: float = Field(0.0, ge=0, description="of the user's model; 0 takes the most likely token")
    max_tokens: int = Field(256, ge=1, description="of one thing that the user says")

    @model_validator(mode="after")
    def _one_model(self) -> "UserConfig":
        if self.engine.exact and self.model is None:
            raise ValueError(f"engine {self.engine.type} samples from a model; set model, the folder of the user's")
        if not self.engine.exact and self.model is not None:
            raise ValueError(f"engine {self.engine.type} has a model of its own; leave model out")
        return self


class SimulatedUser:
    """The engine is built when the user first says something, and again after :meth:`close`."""

    def __init__(self, config: UserConfig) -> None:
        self.config = config
        self._policy: Policy | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def says(self, about: str, conversation: Sequence[Message], seed: int) -> str:
        """What the user says after ``talk``, in which the user turns are his. ``about`` tells the model whom it plays.
        Raises EngineError if the engine fails, which is TurnError if others may succeed."""
        engine = await self._built()
        begin = (
            []
            if conversation and conversation[0].role is Role.ASSISTANT
            else [Message(role=Role.USER, content=GREETING)]
        )
        messages = [Message(role=Role.SYSTEM, content=about), *begin, *map(_swapped, conversation)]
        codec = self._policy.codec if self._policy else None
        with engine.open(root=about) as session:
            session.messages += messages
            if codec:
                session.observe(codec.opening(messages))
            room = len(session.ids) + self.config.max_tokens
            sampling = Sampling(
                temperature=self.config.temperature,
                max_turn_tokens=self.config.max_tokens,
                max_tokens=room if codec else 2**31 - 1,
            )
            turn = await engine.turn(session, sampling, stop=codec.stop_ids if codec else [], seed=seed)
            message = codec.parse(turn.ids, session.ids).message if codec and turn.ids else turn.message
        return message.content.strip() if message else ""

    async def close(self) -> None:
        """Close the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def _built(self) -> Engine:
        """The engine, on this event loop."""
        loop = asyncio.get_running_loop()
        if self._engine is None or self._loop is not loop:
            if self.config.model is not None and self._policy is None:
                self._policy = Policy.load(self.config.model)
            self._engine, self._loop = self.config.engine.build(self._policy), loop
        return self._engine


def _swapped(message: Message) -> Message:
    """A turn as the user's model sees it, who is the assistant of his own conversation."""
    role = Role.ASSISTANT if message.role is Role.USER else Role.USER
    return Message(role=role, content=message.content)
