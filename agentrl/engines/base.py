"""The protocol of generation engines. A session is its token ids; an engine samples the next turn of a session."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from agentrl.schemas.trajectory import InfrastructureError, Span

if TYPE_CHECKING:
    import numpy as np

    from agentrl.schemas.trajectory import Message


class Compress(BaseModel):
    """When the context of an episode is compressed, and what stands for what is left out. The episode goes on as a new
    segment, whose prompt is the opening, what stands for the turns before, and the last of these."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: int = Field(
        ge=32, description="tokens of a prompt: before a turn whose prompt would have more, the context is compressed"
    )
    keep_last: int = Field(
        1, ge=0, description="turns, with their answers, that stand in the next segment again; fewer if they do not fit"
    )
    by: Literal["drop", "schema", "summary"] = Field(
        "drop",
        description="what stands for the others: nothing; a line for each of their calls; or a summary, for which the "
        "policy is asked",
    )
    ask: str = Field("Sum up what you know so far.", min_length=1, description="how the policy is asked for a summary")
    segments: int = Field(
        8, ge=2, description="segments of an episode at most; one that needs more ends, and is left out of the loss"
    )


class Sampling(BaseModel):
    """How tokens are drawn. Recorded log-probabilities are those of the distribution that tokens were drawn
    from, after temperature, top-k and top-p. ``temperature`` 0 is greedy, with log-probability 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0 keeps all tokens")
    max_turn_tokens: int = Field(40, ge=1, description="sampled tokens in one turn")
    max_tokens: int = Field(192, ge=1, description="all tokens of a row, prompt and observations included")
    compress: Compress | None = Field(None, description="None: an episode is one row, and ends if that is full")
    diversity: float = Field(0.0, ge=0, description="of the embedded engine: see agentrl.engines.diversity")

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Rows that were not compressed, or kept apart, say nothing of it, as they did before it was possible."""
        dumped: dict[str, Any] = dump(self)
        for name in ("compress", "diversity"):
            if not getattr(self, name):
                dumped.pop(name, None)
        return dumped


@dataclass(frozen=True)
class Turn:
    """What a policy said: sampled token ``ids`` with their ``logprobs``, and ``spans`` over them.

    ``stop`` is ``stop`` if a stop token ended the turn (it is the last of ``ids``), ``length`` if a limit of
    :class:`Sampling` did, and ``cut`` if its time was over. An engine without token ids gives ``message`` alone.

    ``routes`` [tokens, layers, k] are the experts that tokens of the session went to, from the first one on of which it
    had none before the turn. The last token has none: nothing was computed from it yet.
    """

    ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    stop: Literal["stop", "length", "cut"]
    message: "Message | None" = None
    routes: "np.ndarray | None" = field(default=None, compare=False)


@dataclass
class Usage:
    """What an endpoint counted for the turns of a session: tokens, their price as the engine's settings say it (None:
    they say none), and the seconds that its answers took. A reply out of a cache counts as it did when it was
    fetched."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    seconds: float = 0.0

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.seconds += other.seconds
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + other.cost


@dataclass(eq=False)
class Session:
    """One contiguous token sequence: ``logprobs[t]`` belongs to ``ids[t]`` and is NaN if ``mask[t]`` is false (prompt
    and observations). ``spans`` say which weights sampled what, as those of a trajectory do.

    ``key`` orders sessions. Sessions with the same ``root`` are likely to share a prefix: samples of one group, forks
    of one parent. ``messages`` and ``tools`` (JSON) are the same conversation as text, for engines without token ids;
    ``seconds`` says how long messages took, by their numbers, as the column ``message_seconds`` of a trajectory does.
    Use a session as a context manager: an engine may keep a cache for it until :meth:`end`.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    key: tuple[int, ...] = ()
    root: str = ""
    messages: "list[Message]" = field(default_factory=list)
    tools: str = "[]"
    seconds: dict[int, float] = field(default_factory=dict)
    on_end: "Callable[[Session], None] | None" = None
    on_fork: "Callable[[Session, Session], None] | None" = None
    usage: Usage | None = None
    """What the turns took, of an engine without token ids. A fork counts its own turns."""
    routes: "list[np.ndarray]" = field(default_factory=list)
    """Those of turns, one after the other, of an engine that records them."""

    @property
    def routed(self) -> int:
        """How many of the first tokens have routes."""
        return sum(map(len, self.routes))

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not choose."""
        self.ids += ids
        self.mask += [False] * len(ids)
        self.logprobs += [float("nan")] * len(ids)

    def act(self, turn: Turn) -> None:
        """Append a turn that an engine sampled."""
        here = len(self.ids)
        for span in turn.spans:
            start = (
                self.spans.pop().start if self.spans and self.spans[-1].version == span.version else here + span.start
            )
            self.spans.append(Span(version=span.version, start=start, end=here + span.end))
        self.ids += turn.ids
        self.mask += [True] * len(turn.ids)
        self.logprobs += turn.logprobs
        if turn.routes is not None:
            self.routes.append(turn.routes)

    def forget(self, start: int) -> None:
        """Take out all tokens from ``start`` on, which the next turn is sampled in place of."""
        for column in (self.ids, self.mask, self.logprobs):
            del column[start:]
        kept = [span.model_copy(update={"end": min(span.end, start)}) for span in self.spans if span.start < start]
        self.spans[:] = kept
        left = [max(0, start - sum(map(len, self.routes[:number]))) for number in range(len(self.routes))]
        self.routes[:] = [routes[:size] for routes, size in zip(self.routes, left, strict=True) if size]

    def fork(self, key: tuple[int, ...] = ()) -> "Session":
        """A session that begins as a copy of this one, and goes its own way."""
        child = Session(
            list(self.ids), list(self.mask), list(self.logprobs), list(self.spans), key or self.key, self.root,
            list(self.messages), self.tools, dict(self.seconds), self.on_end, self.on_fork, routes=list(self.routes),
        )  # fmt: skip
        if self.on_fork:
            self.on_fork(self, child)
        return child

    def end(self) -> None:
        """Tell the engine that no further turn follows."""
        if self.on_end:
            self.on_end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class TurnClock:
    """How long the next turn of a session takes. Of an engine that says what its answers took, it is that: without the
    time in which a request waited for others, and of a reply out of a cache the time when it was fetched. Of others it
    is the wall time since this was made; if turns are sampled in batches, waiting for a batch is part of it."""

    def __init__(self, session: Session) -> None:
        self._session, self._began = session, monotonic()
        self._before = session.usage.seconds if session.usage else 0.0

    def seconds(self) -> float:
        usage = self._session.usage
        return usage.seconds - self._before if usage else monotonic() - self._began


@dataclass(frozen=True)
class Weights:
    """Weights for an engine: a folder with safetensors, or a module of the same shape in this process."""

    version: int
    source: Path | Any


class Engine(Protocol):
    """Samples turns of many sessions at once.

    ``exact`` says that turns have token ids and log-probabilities; ``version`` is that of the weights.
    ``reproducible`` says that equal seeds give equal tokens, to the bit.
    """

    exact: bool
    reproducible: bool
    version: int

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        """A new session without tokens."""
        ...

    async def turn(
        self,
        session: Session,
        sampling: Sampling,
        *,
        stop: Sequence[int],
        seed: int,
        deadline: int = 0,
        time_limit: float | None = None,
    ) -> Turn:
        """The session's next turn; the caller appends it. ``deadline`` orders requests, the smallest first.
        ``time_limit`` in seconds cuts the turn. A turn that is cancelled or fails has changed nothing."""
        ...

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        """Log-probabilities of ``ids[start:]``, each given all tokens before it, at temperature 1. ``start`` is at
        least 1."""
        ...

    async def load(self, weights: Weights) -> None:
        """Continue with other weights. Turns under way go on with them, and their spans say from which token on."""
        ...

    async def close(self) -> None:
        """Free what the engine holds."""
        ...


@runtime_checkable
class SchemaEngine(Engine, Protocol):
    """An engine that can keep a turn to a JSON schema. What is sampled so is not drawn from the policy's own
    distribution, and neither are its log-probabilities."""

    keeps_schemas: bool

    async def turn(
        self,
        session: Session,
        sampling: Sampling,
        *,
        stop: Sequence[int],
        seed: int,
        deadline: int = 0,
        time_limit: float | None = None,
        schema: str | None = None,
    ) -> Turn:
        """See :class:`Engine`. The turn is JSON by ``schema``, JSON itself, and then a stop token. Raises SchemaError
        if the engine cannot keep to it."""
        ...


class EngineError(InfrastructureError):
    """An engine failed, which says nothing about an agent or its environment."""


class SchemaError(EngineError):
    """A JSON schema that an engine cannot keep to."""


class TurnError(EngineError):
    """One request failed, and others do not: it ends its own episode, as ``infra_error``. ``lasting`` says that the
    same request would fail again."""

    def __init__(self, message: str, lasting: bool = False) -> None:
        super().__init__(message)
        self.lasting = lasting
