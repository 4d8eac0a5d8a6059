"""What OpenAI's two protocols have in common: a request for a turn, the answer to it, and errors."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.schemas.json_text import loads, unstorable
from agentrl.schemas.trajectory import Message, Role

Parsed = TypeVar("Parsed", bound=BaseModel)

MOST = 2**31 - 1
"""The greatest integer of a request: columns of rows, and engines, take no greater ones."""

HOTTEST = 2.0
"""The highest temperature."""


class ApiError(Exception):
    """An error that the client is told, in the form of OpenAI's API."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ApiRequest(BaseModel):
    """What a request may hold. Everything else is refused, and so is a value that would change what is sampled in a way
    that the engine does not know. ``user``, ``metadata``, ``store`` and the like do not change what is sampled."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = Field(None, ge=0, le=HOTTEST)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


def read(kind: type[Parsed], body: bytes) -> Parsed:
    """A request. Raises ApiError that lists all that is wrong with it."""
    try:
        given = loads(body.decode())
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if (bad := unstorable(given)) is not None:
        raise ApiError(400, f"{bad[0] or 'body'}: {bad[1]}", "unsupported_or_invalid", bad[0] or "body")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        names = [".".join(map(str, error_at["loc"])) or "body" for error_at in errors]
        allowed = ", ".join(kind.model_fields)
        reasons = [
            f"{name}: is not supported here; supported are {allowed}"
            if problem["type"] == "extra_forbidden" and name in given
            else f"{name}: {problem['msg']}"
            for name, problem in zip(names, errors, strict=True)
        ]
        raise ApiError(400, "; ".join(reasons), "unsupported_or_invalid", names[0]) from None


@dataclass(frozen=True)
class TurnRequest:
    """A turn that a client asks for. What is None is left to the server. ``previous`` is the id of the response that
    ``messages`` follow, and ``instructions`` come before all of them. ``tools`` is JSON, as in a trajectory."""

    model: str
    messages: list[Message]
    tools: str = "[]"
    tool_choice: str = "auto"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    previous: str | None = None
    instructions: str | None = None
    echo: dict[str, Any] = field(default_factory=dict)
    """Fields of the request that its answer repeats."""

    def conversation(self, before: Sequence[Message] = ()) -> list[Message]:
        """All messages, those ``before`` included. Raises ApiError if they do not end where a policy speaks."""
        first = [Message(role=Role.SYSTEM, content=self.instructions)] if self.instructions else []
        messages = [*first, *before, *self.messages]
        if not messages or messages[-1].role is Role.ASSISTANT:
            raise ApiError(400, "the last message must be one that the assistant answers", param="messages")
        return messages


@dataclass(frozen=True)
class Answered:
    """A turn as the client sees it: ``message`` with calls whose ids no other turn has. ``name`` is its id without the
    prefix of a protocol."""

    name: str
    model: str
    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    sampled_tokens: int
    created: int


class Reply:
    """A turn under way, which several requests may wait for: those that were sent again join it.

    ``pieces`` is the text so far. The task that samples it ends in :class:`Answered` or an error. ``name`` is the id of
    the answer without the prefix of a protocol.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.created = int(time.time())
        self.pieces: list[str] = []
        self.task: asyncio.Task[Answered] | None = None
        self.waiting = 0
        self._news = asyncio.Event()

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self._wake()

    def begin(self, task: "asyncio.Task[Answered]") -> None:
        self.task = task
        task.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def deltas(self) -> AsyncIterator[str]:
        """The text, piece by piece, until the turn is done."""
        assert self.task is not None
        sent = 0
        while True:
            news = self._news
            while sent < len(self.pieces):
                sent += 1
                yield self.pieces[sent - 1]
            if self.task.done():
                return
            await news.wait()

    async def answered(self) -> Answered:
        """The whole turn. A waiter that is cancelled does not cancel it."""
        assert self.task is not None
        return await asyncio.shield(self.task)


class Answerer(Protocol):
    """Who answers requests. ``place`` is what its ``place_of`` found."""

    model: str

    def place_of(self, key: str | None, episode: str | None) -> Any:
        """Whose request it is, by its key and by the episode that path or header name. Raises ApiError."""
        ...

    async def ask(self, addressed: Any, asked: TurnRequest, digest: str, again: bool) -> Reply:
        """The turn under way. ``digest`` is that of the body, ``again`` says that the client sent it before."""
        ...

    def received(self, reply: Reply) -> None:
        """A client has got all of a reply."""
        ...

    async def left(self, reply: Reply) -> None:
        """A client waits no longer for a reply."""
        ...


def check_model(asked: str, served: str) -> None:
    """Raises ApiError if another model is asked for."""
    if asked != served:
        raise ApiError(
            404, f"there is no model {asked!r} here; this server serves {served!r}", "model_not_found", "model"
        )
