"""What the protocols have in common: a request for a turn, who asks for it, the answer to it, and errors."""

import asyncio
import contextlib
import difflib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.recorder.body import read_body, read_request
from agentrl.schemas.trajectory import Message, Role

Parsed = TypeVar("Parsed", bound=BaseModel)

MOST = 2**31 - 1
"""The greatest integer of a request: columns of rows, and engines, take no greater ones."""

HOTTEST = 2.0
"""The highest temperature."""


class ApiError(Exception):
    """An error that the client is told, in the form of its protocol."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


def openai_refusal(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Status and body of an error, in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return error.status, {"error": told}


COMMENT = b": ping\n\n"
"""A comment in a stream, which clients skip."""


class OverflowingError(ApiError):
    """A conversation of so many ``tokens``, for which there is no room: ``most`` is the context of the model."""

    def __init__(self, model: str, tokens: int, most: int) -> None:
        message = f"the conversation has {tokens} tokens, and the context of {model} is {most}"
        super().__init__(400, message, "context_length_exceeded", "messages")
        self.tokens, self.most = tokens, most


CHANGES_TOKENS = frozenset([
    "allowed_token_ids", "bad_words", "best_of", "chat_template", "chat_template_kwargs", "documents", "echo",
    "frequency_penalty", "functions", "grammar", "guided_choice", "guided_grammar", "guided_json", "guided_regex",
    "ignore_eos", "include_stop_str_in_output", "length_penalty", "logit_bias", "logits_processors", "logprobs",
    "mcp_servers", "min_p", "min_tokens", "modalities", "n", "prediction", "presence_penalty", "prompt",
    "repetition_penalty", "response_format", "stop_token_ids", "structural_tag", "structured_outputs", "suffix",
    "tfs", "top_a", "top_logprobs", "truncate_prompt_tokens", "typical_p", "use_beam_search",
])  # fmt: skip
"""Fields of these and of other servers that change which tokens are sampled, or what an answer holds. A protocol that
does not know one refuses it; other unknown fields say nothing, and a tag of the row counts them."""

_ALIKE = 0.85  # how similar an unknown field is to a known one for which it was probably meant
_NAMED_FIELDS = 16
_LONGEST_FIELD = 64


class ApiRequest(BaseModel):
    """What a request may hold. A field that is not known is ignored and counted, unless it is one of
    :data:`CHANGES_TOKENS`, or the misspelt name of a known one. A value that would change what is sampled in a way that
    the engine does not know is refused."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str

    def ignored(self) -> tuple[str, ...]:
        """The unknown fields that say something, as names that fit a tag."""
        names = sorted(name for name, value in (self.model_extra or {}).items() if value is not None)
        kept = [name for name in names if len(name) <= _LONGEST_FIELD and name.isidentifier()][:_NAMED_FIELDS]
        return (*kept, *["others"] * (len(kept) < len(names)))


class OpenAIRequest(ApiRequest):
    """What both of OpenAI's protocols know. ``user``, ``metadata``, ``store`` and the like change nothing."""

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
        given, bad = read_request(body) if issubclass(kind, ApiRequest) else read_body(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if bad is not None:
        raise ApiError(400, f"{bad[0] or 'body'}: {bad[1]}", "unsupported_or_invalid", bad[0] or "body")
    problems = _unknown(kind, given) if issubclass(kind, ApiRequest) and isinstance(given, dict) else []
    try:
        request = kind.model_validate(given)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = ".".join(map(str, problem["loc"])) or "body"
            unknown = problem["type"] == "extra_forbidden" and name in given
            problems.append((name, _not_supported(kind) if unknown else problem["msg"]))
    if problems:
        raise ApiError(400, "; ".join(map(": ".join, problems)), "unsupported_or_invalid", problems[0][0])
    return request


def _not_supported(kind: type[BaseModel]) -> str:
    return f"is not supported here; supported are {', '.join(kind.model_fields)}"


def _unknown(kind: type[BaseModel], given: dict[str, Any]) -> list[tuple[str, str]]:
    """The fields of a request that are not known and cannot be ignored, each with the reason."""
    problems = []
    for name in given:
        if name in kind.model_fields or given[name] is None:
            continue
        if name in CHANGES_TOKENS:
            problems.append((name, _not_supported(kind)))
        elif near := difflib.get_close_matches(name, kind.model_fields, n=1, cutoff=_ALIKE):
            problems.append((name, f"is not known here; did you mean {near[0]!r}?"))
    return problems


@dataclass(frozen=True)
class Caller:
    """What the headers of a request say of the program that asks. ``session`` is its own id of what it works at,
    ``agent`` the one of its agents that asks, empty for the first, and ``kind`` what the request is for: ``turn``,
    ``side`` or ``compaction``, empty if it does not say."""

    session: str = ""
    agent: str = ""
    kind: str = ""


NOBODY = Caller()
"""Who says nothing of itself."""


def caller_of(headers: Mapping[str, str]) -> Caller:
    """Who asks, by the headers of Claude Code, Codex and OpenCode. ``headers`` are looked up in lower case."""
    told = {}
    if "x-codex-turn-metadata" in headers:
        with contextlib.suppress(ValueError):
            told = json.loads(headers["x-codex-turn-metadata"])
    told = told if isinstance(told, dict) else {}
    sessions = ("x-claude-code-session-id", "x-session-id", "session-id")
    session = next((headers[name] for name in sessions if headers.get(name)), "")
    name = told.get("agent_name")
    agent = headers.get("x-claude-code-agent-id") or (str(name) if name and name != "/root" else "")
    kind = str(told.get("request_kind") or "")
    return Caller(session, agent, kind if kind in ("", "turn", "compaction") else "side")


@dataclass(frozen=True)
class AnswerSchema:
    """The JSON schema, as JSON, by which a client would like to be answered, and the field of its request that says
    so."""

    text: str
    field: str


@dataclass(frozen=True)
class TurnRequest:
    """A turn that a client asks for. What is None is left to the server. ``previous`` is the id of the response that
    ``messages`` follow, and ``instructions`` come before all of them. ``tools`` is JSON, as in a trajectory.

    ``named`` is the id of the last sampled turn that the messages repeat, if they name it. ``schema`` says that the
    client would like the answer to be JSON. ``ignored`` are fields that say nothing here, and ``dropped_tools`` counts
    tools that a policy cannot call."""

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
    named: str | None = None
    schema: AnswerSchema | None = None
    ignored: tuple[str, ...] = ()
    dropped_tools: int = 0
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and name of each tool that the policy knows by a flat name."""
    caller: Caller = NOBODY
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
    prefix of a protocol. ``stopped_by`` is the stop string that ended it."""

    name: str
    model: str
    message: Message
    finish: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    sampled_tokens: int
    created: int
    stopped_by: str | None = None


class Reply:
    """A turn under way, which several requests may wait for: those that were sent again join it.

    ``pieces`` is the text so far, and ``reasoning`` what was thought before it. The task that samples it ends in
    :class:`Answered` or an error. ``name`` is the id of the answer without the prefix of a protocol. ``prompt_tokens``
    is None until the conversation has been encoded.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.created = int(time.time())
        self.pieces: list[str] = []
        self.reasoning: str | None = None
        self.prompt_tokens: int | None = None
        self.task: asyncio.Task[Answered] | None = None
        self.waiting = 0
        self._news = asyncio.Event()

    def add(self, text: str, reasoning: str | None = None) -> None:
        self.pieces.append(text)
        self.reasoning = reasoning
        self._wake()

    def encoded(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._wake()

    def begin(self, task: "asyncio.Task[Answered]") -> None:
        self.task = task
        task.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def begun(self) -> int:
        """The number of tokens before the turn, as soon as it is known. Raises the turn's error if it fails before."""
        assert self.task is not None
        while self.prompt_tokens is None:
            news = self._news
            if self.task.done():
                return (await asyncio.shield(self.task)).prompt_tokens
            await news.wait()
        return self.prompt_tokens

    async def deltas(self) -> AsyncIterator[str]:
        """The text, piece by piece, until the turn is done. One that was asked for whole is one piece."""
        assert self.task is not None
        sent = 0
        while True:
            news = self._news
            while sent < len(self.pieces):
                sent += 1
                yield self.pieces[sent - 1]
            if self.task.done():
                answer = await asyncio.shield(self.task)
                if not self.pieces and answer.message.content:
                    self.reasoning = answer.message.reasoning
                    yield answer.message.content
                return
            await news.wait()

    async def answered(self) -> Answered:
        """The whole turn. A waiter that is cancelled does not cancel it."""
        assert self.task is not None
        return await asyncio.shield(self.task)


class Answerer(Protocol):
    """Who answers requests. ``addressed`` is what its ``place_of`` found."""

    model: str

    def place_of(self, key: str | None, episode: str | None) -> Any:
        """Whose request it is, by its key and by the episode that path or header name. Raises ApiError."""
        ...

    async def ask(self, addressed: Any, asked: TurnRequest, digest: str, again: bool) -> Reply:
        """The turn under way. ``digest`` is that of the request, streamed or whole; ``again`` says that the client sent
        it before."""
        ...

    async def count(self, addressed: Any, asked: TurnRequest) -> int:
        """The number of tokens of a conversation up to the turn that it asks for."""
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
