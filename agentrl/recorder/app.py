"""The HTTP side: routes of all protocols, keys, limits, and clients that leave. It needs starlette."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from agentrl.recorder import chat, messages, responses
from agentrl.recorder.body import bytes_of_value
from agentrl.recorder.repeated import made_of
from agentrl.recorder.wire import Answerer, ApiError, Reply, TurnRequest, caller_of, read
from agentrl.schemas.json_text import shown, writer

LARGEST_BODY = 32 * 2**20
"""Bytes of a request."""
BODY_S = 120.0
"""Seconds in which the body of a request arrives."""

PING_S = 5.0
"""Seconds after which a stream that has nothing to tell says that it is alive."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
EPISODE_HEADER = "x-agentrl-episode"

log = logging.getLogger(__name__)
_json = writer(ensure_ascii=False)

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


def application(backend: Answerer, more: Sequence[BaseRoute] = (), local: bool = True) -> Starlette:
    """All protocols in front of ``backend``. ``local`` says that only this machine reaches it: then requests that name
    another host, as pages of a browser could make it send, are refused."""

    async def models(request: HttpRequest) -> Response:
        backend.place_of(key_of(request), request.path_params.get("episode"))
        if "anthropic-version" in request.headers:
            model = {"type": "model", "id": backend.model, "display_name": backend.model}
            model["created_at"] = "1970-01-01T00:00:00Z"
            ends = {"has_more": False, "first_id": backend.model, "last_id": backend.model}
            return JSONResponse({"data": [model], **ends})
        listed = {"id": backend.model, "object": "model", "created": 0, "owned_by": "agentrl"}
        return JSONResponse({"object": "list", "data": [listed]})

    def turns(protocol: ModuleType) -> Endpoint:
        async def answer(request: HttpRequest) -> Response:
            addressed, asked = await _asked(backend, protocol, request)
            again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
            reply = await backend.ask(addressed, asked, _digest(asked), again)
            return _Answer(backend, protocol, asked, reply)

        return guarded(answer, local, protocol)

    async def counted(request: HttpRequest) -> Response:
        addressed, asked = await _asked(backend, messages, request)
        return JSONResponse({"input_tokens": await backend.count(addressed, asked)})

    async def there(request: HttpRequest) -> Response:
        return Response()

    by_chat, by_responses, by_messages = turns(chat), turns(responses), turns(messages)
    routes: list[BaseRoute] = []
    for base in ("", "/episodes/{episode}"):
        routes += [
            Route(base or "/", there, methods=["HEAD"]),
            Route(f"{base}/v1/models", guarded(models, local)),
            Route(f"{base}/v1/chat/completions", by_chat, methods=["POST"]),
            Route(f"{base}/v1/responses", by_responses, methods=["POST"]),
            Route(f"{base}/v1/messages", by_messages, methods=["POST"]),
            Route(f"{base}/v1/messages/count_tokens", guarded(counted, local, messages), methods=["POST"]),
        ]
    return Starlette(routes=[*routes, *more], exception_handlers={404: _not_found, 405: _not_found})


async def _asked(backend: Answerer, protocol: ModuleType, request: HttpRequest) -> tuple[Any, TurnRequest]:
    """Whose turn a request asks for, and what it asks."""
    addressed = backend.place_of(key_of(request), episode_of(request))
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.headers.raw)}
    return addressed, read(protocol.REQUEST, await body_of(request)).asked(caller_of(headers))


def _digest(asked: TurnRequest) -> str:
    """A digest of a request, the same whether its answer is to be streamed or whole. ``echo`` may have ids that are new
    each time."""
    messages = [made_of(message).exact for message in asked.messages]
    return hashlib.sha256(bytes_of_value([repr(_rest(asked)), _tools_digest(asked.tools), messages])).hexdigest()


_rest = attrgetter(
    *(
        field.name
        for field in fields(TurnRequest)
        if field.name not in {"stream", "usage_in_stream", "echo", "messages", "tools"}
    )
)


@lru_cache(64)
def _tools_digest(tools: str) -> bytes:
    return hashlib.sha256(tools.encode()).digest()


def guarded(endpoint: Endpoint, local: bool, protocol: ModuleType = chat) -> Endpoint:
    """The endpoint, with errors in the form of the protocol."""

    async def answer(request: HttpRequest) -> Response:
        try:
            host = _host(request)
            if local and host not in LOOPBACK:
                raise ApiError(403, f"this server is for its own machine, not for {host!r}")
            if request.method == "POST" and not request.headers.get("content-type", "").startswith("application/json"):
                raise ApiError(415, "the body must be application/json")
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            failure = _told(error)
            status, body = protocol.refusal(failure)
            late = {"connection": "close"} if failure.status == 408 else None  # the rest may come at any time
            return JSONResponse(body, status, late)

    return answer


def _host(request: HttpRequest) -> str:
    """The name or address that a request is sent to. Raises ApiError if it is none."""
    try:
        return _named(request.headers.get("host", "")) or request.url.hostname or ""
    except ValueError as error:
        raise ApiError(400, f"the header host is {request.headers.get('host')!r}: {error}") from None


@lru_cache(64)
def _named(host: str) -> str | None:
    """The name or address in the header ``host``. Requests repeat it, and a URL is slow to make."""
    return URL(scope={"path": "/", "headers": [(b"host", host.encode("latin-1"))]}).hostname


def _told(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OSError):
        return ApiError(500, f"the disk of the recorder fails: {error}", "not_recorded")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {shown(str(error))[:300]}; a bug of agentrl's", "internal_error")


def key_of(request: HttpRequest) -> str | None:
    """The key that the client gives, as OpenAI's clients do or as Anthropic's do."""
    given = request.headers.get("authorization", "")
    return given[7:].strip() if given[:7].lower() == "bearer " else request.headers.get("x-api-key")


def episode_of(request: HttpRequest) -> str | None:
    """The episode that the path or a header names."""
    return request.path_params.get("episode") or request.headers.get(EPISODE_HEADER)


async def body_of(request: HttpRequest) -> bytes:
    """The body. Raises ApiError if it is too large, without reading the rest, or does not arrive in time."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_BODY:
                    raise ApiError(413, f"the body is larger than {LARGEST_BODY:,} bytes", "body_too_large")
                parts.append(part)
    except TimeoutError:
        reason = f"{size:,} bytes of the body came within {BODY_S:g} s, without its end; send the whole body at once"
        raise ApiError(408, reason, "body_timeout") from None
    return b"".join(parts)


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    routes = "/v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, /v1/models"
    message = f"there is no {request.method} {request.url.path}; there are {routes}"
    return JSONResponse(chat.refusal(ApiError(status, message))[1], status)


class _Answer(Response):
    """Sends a reply, and tells the backend whether the client has got all of it."""

    def __init__(self, backend: Answerer, protocol: ModuleType, asked: TurnRequest, reply: Reply) -> None:
        super().__init__()
        self.backend, self.protocol, self.asked, self.reply = backend, protocol, asked, reply
        self.is_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(self._gone(receive))
        work = asyncio.create_task(self._streamed(scope, send)) if self.asked.stream else self.reply.task
        assert work is not None
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if not self.asked.stream and work.done():
                await self._whole(scope, send)
        finally:
            gone.cancel()
            if self.asked.stream:
                work.cancel()
                await asyncio.wait((work,))
            await self.backend.left(self.reply)
        if self.asked.stream and not work.cancelled() and (error := work.exception()):
            raise error

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True

    async def _whole(self, scope: Scope, send: Send) -> None:
        """Send the reply, which is done."""
        try:
            answer = self.protocol.whole(self.asked, await _unless_closed(self.reply, self.reply.answered()))
        except Exception as error:
            await self._refused(error, scope, send)
            return
        body = _json(answer).encode()
        headers = {"content-length": str(len(body)), "content-type": "application/json", **self._about()}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await self._end(send)

    async def _refused(self, error: Exception, scope: Scope, send: Send) -> None:
        status, body = self.protocol.refusal(_told(error))
        await JSONResponse(body, status, self._about())(scope, _nothing, send)

    async def _streamed(self, scope: Scope, send: Send) -> None:
        try:
            await _unless_closed(self.reply, self.reply.begun())
        except Exception as error:
            await self._refused(error, scope, send)
            return
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", **self._about()}
        await send({"type": "http.response.start", "status": 200, "headers": _raw(headers)})
        try:
            async for event in _alive(self.protocol.events(self.asked, self.reply), self.reply, self.protocol.PING):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            failed = self.protocol.failed(_told(error))
            await send({"type": "http.response.body", "body": failed, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._end(send)

    async def _end(self, send: Send) -> None:
        """End an answer. What was sent before has left this process when the last ``send`` returns, so that the client
        gets it even if this process is killed. Unless the client reads slowly, all happens in one step of the event
        loop: nobody who has the answer comes before it counts as received."""
        await send({"type": "http.response.body", "body": b""})
        if not self.is_gone:
            self.backend.received(self.reply)

    def _about(self) -> dict[str, str]:
        return {EPISODE_HEADER: self.reply.name.rpartition("-")[0]}


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


async def _unless_closed(reply: Reply, work: Awaitable[Any]) -> Any:
    """What ``work`` at a reply returns. Raises ApiError if its episode was closed before it was done."""
    try:
        return await work
    except asyncio.CancelledError:
        if reply.task is not None and reply.task.cancelled():
            raise ApiError(409, "the episode was closed before this turn was done", "episode_closed") from None
        raise


async def _alive(events: AsyncIterator[bytes], reply: Reply, ping: bytes) -> AsyncIterator[bytes]:
    """Events of a stream, and a ping whenever there is none for a while."""
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            if not (await asyncio.wait({following}, timeout=PING_S))[0]:
                yield ping
                continue
            try:
                event = await _unless_closed(reply, following)
            except StopAsyncIteration:
                return
            yield event
            following = asyncio.ensure_future(anext(events))
    finally:
        following.cancel()
        with contextlib.suppress(BaseException):
            await following


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
