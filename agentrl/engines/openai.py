"""Any OpenAI-compatible endpoint, for teachers, judges and experts. It gives text: rows have no token ids.

Requests that fail for a passing reason are sent again, after what ``Retry-After`` says or an exponential pause with
jitter. Replies are kept in a file, by the content of the request, so that a run that is repeated pays nothing.
"""

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from aiolimiter import AsyncLimiter
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

from agentrl.engines.base import EngineError, Sampling, Session, Turn, TurnError, Usage, Weights
from agentrl.schemas.trajectory import Message, Role, ToolCall

if TYPE_CHECKING:
    from agentrl.engines.configs import OpenAIConfig

_LONGEST_PAUSE_S = 60.0
_SECONDS = "agentrl_seconds"  # how long a reply took, beside what the endpoint says in it
_FAILED_IN_A_ROW = 8  # then it is the endpoint that fails, not a request


class _GarbledError(Exception):
    """A reply of status 200 that is no completion."""


@dataclass
class Spent:
    """Requests that were answered, those that were sent again, replies out of the file, tokens and their price."""

    requests: int = 0
    retries: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class OpenAIEngine:
    """Samples turns from ``config.model`` behind ``config.base_url``."""

    exact = False
    reproducible = False
    version = 0

    def __init__(self, config: "OpenAIConfig", api_key: str) -> None:
        self.config = config
        self.name = config.model
        self.spent = Spent()
        self._failed = 0
        self._api_key = api_key
        self._replies = _Replies(Path(config.cache).expanduser()) if config.cache else None
        self._client: AsyncOpenAI | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, key: tuple[int, ...] = (), root: str = "") -> Session:
        """See :class:`agentrl.engines.base.Engine`."""
        return Session(key=key, root=root)

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
        """See :class:`agentrl.engines.base.Engine`; the turn is a message without token ids. It has reached
        ``max_tokens`` if the endpoint has counted more. Raises TurnError if the endpoint refuses this request or keeps
        failing with it, and EngineError if it refuses others too, or if the spend cap is reached."""
        request = _request(self.config.model, session, sampling, seed)
        try:
            async with asyncio.timeout(time_limit) as clock:
                reply = await self._reply(request)
        except TimeoutError:
            if not clock.expired():
                raise
            return Turn([], [], [], "cut")
        session.usage = session.usage or Usage()
        session.usage.add(self._spent(reply))
        choice = reply["choices"][0]
        limited = choice["finish_reason"] == "length" or sum(_usage(reply)) > sampling.max_tokens
        return Turn([], [], [], "length" if limited else "stop", _message(choice["message"]))

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        """Raises EngineError: an endpoint gives no log-probabilities of given tokens."""
        raise EngineError(f"{self.name}: engine openai cannot score tokens; use transformers or vllm")

    async def load(self, weights: Weights) -> None:
        """Raises EngineError: the weights are another's."""
        raise EngineError(f"{self.name}: engine openai cannot load weights; use transformers or vllm")

    async def close(self) -> None:
        """See :class:`agentrl.engines.base.Engine`."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.close()
        self._client = None
        if self._replies:
            self._replies.close()

    async def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        key = hashlib.sha256(json.dumps([self.config.base_url, request], sort_keys=True).encode()).hexdigest()
        if self._replies and (kept := self._replies.get(key)):
            self.spent.cached += 1
            return kept
        reply = await self._sent(request)
        if self._replies:
            self._replies.put(key, reply)
        return reply

    async def _sent(self, request: dict[str, Any]) -> dict[str, Any]:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(1 + self.config.retries),
            retry=retry_if_exception(_passes),
            wait=_pause,
            before_sleep=self._again,
            reraise=True,
        )
        try:
            reply: dict[str, Any] = await retrying(self._once, request)
        except (OpenAIError, _GarbledError, ValueError) as error:
            reason = str(error) or type(error).__name__
            hint = "; set with.engine.retries higher" if _passes(error) else ""
            what = f"{self.config.model} at {self.config.base_url}: {reason[:500]}{hint}"
            if not _concerns_one_request(error):
                raise EngineError(what) from error
            self._failed += 1
            if self._failed >= _FAILED_IN_A_ROW:
                raise EngineError(f"{self._failed} requests failed one after the other; the last: {what}") from error
            raise TurnError(what, lasting=not _passes(error)) from error
        self._failed = 0
        return reply

    async def _once(self, request: dict[str, Any]) -> dict[str, Any]:
        cap = self.config.max_cost
        if cap is not None and self.spent.cost >= cap:
            raise EngineError(
                f"{self.config.model}: {self.spent.cost:.2f} were spent and max_cost is {cap:g}; "
                "raise max_cost to go on"
            )
        client = self._connected()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._slots)
            if self._pace is not None:
                await stack.enter_async_context(self._pace)
            began = monotonic()
            raw = await client.chat.completions.with_raw_response.create(**request)
            seconds = monotonic() - began
        reply = _checked(raw.text) | {_SECONDS: seconds}
        asked, completion = _usage(reply)
        self.spent.requests += 1
        self.spent.prompt_tokens += asked
        self.spent.completion_tokens += completion
        self.spent.cost += self._price(asked, completion)
        return reply

    def _price(self, asked: int, completion: int) -> float:
        return (asked * self.config.price_prompt + completion * self.config.price_completion) / 1e6

    def _spent(self, reply: dict[str, Any]) -> Usage:
        """What a reply took, as it was fetched."""
        asked, completion = _usage(reply)
        priced = self.config.price_prompt + self.config.price_completion > 0
        return Usage(
            asked, completion, self._price(asked, completion) if priced else None, float(reply.get(_SECONDS) or 0)
        )

    async def _again(self, state: RetryCallState) -> None:
        self.spent.retries += 1

    def _connected(self) -> AsyncOpenAI:
        """The client of this event loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            config = self.config
            self._loop = loop
            self._client = AsyncOpenAI(
                api_key=self._api_key, base_url=config.base_url, max_retries=0, timeout=config.timeout_s
            )
            self._slots = asyncio.Semaphore(config.concurrency)
            # One after the other: a limiter of the whole minute would send a minute's requests at once.
            pause = 60 / config.requests_per_minute if config.requests_per_minute else 0.0
            self._pace = AsyncLimiter(1, pause) if pause else None
        return self._client


class _Replies:
    """Replies by the digest of their request, in an SQLite file that several processes may use at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(path, timeout=30, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)")

    def get(self, key: str) -> dict[str, Any] | None:
        cached = self._file.execute("SELECT reply FROM replies WHERE request = ?", [key]).fetchone()
        return json.loads(cached[0]) if cached else None

    def put(self, key: str, reply: dict[str, Any]) -> None:
        self._file.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", [key, json.dumps(reply)])

    def close(self) -> None:
        self._file.close()


def _request(model: str, session: Session, sampling: Sampling, seed: int) -> dict[str, Any]:
    tools = json.loads(session.tools)
    return {
        "model": model,
        "messages": [_written(message) for message in session.messages],
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_completion_tokens": sampling.max_turn_tokens,
        "seed": seed % 2**31,
        **({"tools": tools} if tools else {}),
        **({"extra_body": {"top_k": sampling.top_k}} if sampling.top_k else {}),
    }


def _written(message: Message) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role is Role.TOOL:
        out["tool_call_id"] = message.tool_call_id or ""
    return out


def _checked(text: str) -> dict[str, Any]:
    """A completion. Raises _GarbledError if the text is none."""
    try:
        reply = json.loads(text)
        message = reply["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if not isinstance(message.get("content") or "", str) or not all(call["function"]["name"] for call in calls):
            raise ValueError("content or tool calls of another type")
        reply["choices"][0].setdefault("finish_reason", "stop")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _GarbledError(f"the reply is no completion: {text[:200]!r} ({error})") from error
    return dict(reply)


def _usage(reply: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt and of the completion, as the endpoint counts them."""
    usage = reply.get("usage") or {}
    return int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)


def _message(message: dict[str, Any]) -> Message:
    calls = [
        ToolCall(id=call.get("id") or f"call_{number}", name=call["function"]["name"], arguments=_arguments(call))
        for number, call in enumerate(message.get("tool_calls") or [])
    ]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return Message(role=Role.ASSISTANT, content=message.get("content") or "", reasoning=reasoning, tool_calls=calls)


def _arguments(call: dict[str, Any]) -> str:
    """JSON of a call's arguments; text that is no JSON becomes a JSON string, which the tool refuses."""
    given = call["function"].get("arguments") or "{}"
    if not isinstance(given, str):
        return json.dumps(given)
    try:
        json.loads(given)
    except ValueError:
        return json.dumps(given)
    return given


def _passes(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, APIConnectionError | _GarbledError)


def _concerns_one_request(error: BaseException) -> bool:
    """Whether others may succeed: a prompt may be too long, refused by a filter, or answered with what a server cannot
    parse."""
    return _passes(error) or (isinstance(error, APIStatusError) and error.status_code in (400, 413, 422))


def _pause(state: RetryCallState) -> float:
    """Seconds before the next attempt."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.response.headers.get("retry-after") if isinstance(error, APIStatusError) else None
    if asked:
        try:
            return min(float(asked), _LONGEST_PAUSE_S)
        except ValueError:
            return min(max(parsedate_to_datetime(asked).timestamp() - time(), 0.0), _LONGEST_PAUSE_S)
    return float(wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S)(state))
