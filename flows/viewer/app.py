"""The viewer's routes: questions about a store, the page, and the files that it is made of."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import CapacityLimiter
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.datastore.errors import NoBufferError, StoreError
from agentrl.flows.viewer.files import FrontEnd, asked_first, raw_path
from agentrl.flows.viewer.guard import SESSION, Door, Guard
from agentrl.flows.viewer.questions import ACTIONS, QUESTIONS, answered
from agentrl.flows.viewer.wire import Refusal, RefusedError, StoresShown, Writing
from agentrl.pipelines.secrets import redacted
from agentrl.schemas.json_text import loads, unstorable

if TYPE_CHECKING:
    from agentrl.datastore.annotations.labels import LabelSchema
    from agentrl.flows.viewer.reader import StoreReader

STATIC = Path(__file__).parent / "static"
AT_ONCE = 4
"""Questions that are worked on at once."""
PATIENCE_S = 60.0
"""Seconds after which the client is told that an answer takes too long."""
LONGEST_BODY = 2**16
"""Bytes of a POST."""

log = logging.getLogger(__name__)


def opening(
    store: str, labels: "LabelSchema | None" = None, beside: "Mapping[str, Future[StoreReader]] | None" = None
) -> "Future[StoreReader]":
    """The reader of a store to come: what it imports is loaded in a thread, while the server answers already. People
    may give ``labels``. ``beside`` are the readers of all stores by their names, this one too."""
    future: Future[StoreReader] = Future()

    def open_store() -> None:
        try:
            from agentrl.flows.viewer.reader import StoreReader

            given = {"labels": labels} if labels else {}
            future.set_result(StoreReader(store, beside=beside, **given))
        except BaseException as error:  # raised again by each question
            future.set_exception(error)

    threading.Thread(target=open_store, daemon=True).start()
    return future


def application(
    opened: "Future[StoreReader]",
    door: Door,
    ended: Callable[[], bool] = lambda: False,
    stores: Sequence[str] = (),
    name: str = "",
) -> Guard:
    """The viewer of one store behind a door. Streams of events end when ``ended``. ``stores`` are the names of all that
    are shown below paths beside each other, of which this one has a ``name``."""
    limiter: list[CapacityLimiter] = []  # made in the event loop
    asked = partial(_endpoint, opened, limiter)
    front = FrontEnd(STATIC)

    async def session(request: Request) -> Response:
        return Response(status_code=204)

    async def writing(request: Request) -> Response:
        allowed = Writing(key=door.key) if door.write else Writing(key=None)
        return JSONResponse(allowed.model_dump())

    async def beside(request: Request) -> Response:
        return JSONResponse(StoresShown(name=name, stores=list(stores)).model_dump())

    async def events(request: Request) -> Response:
        try:
            reader = await asyncio.wrap_future(opened)
        except Exception as error:
            refused = explained(error)
            return JSONResponse(refused.body.model_dump(), refused.status)
        from agentrl.flows.viewer.pages.training import events as pulses

        return StreamingResponse(pulses(reader, ended), media_type="text/event-stream")

    async def file(request: Request) -> Response:
        answer = front.answer(request, request.path_params["name"])
        return answer or _not_found(request, f"there is no file {request.url.path[:200]!r}")

    async def page(request: Request) -> Response:
        if request.url.path.startswith("/api"):
            return _not_found(request, f"there is no {request.url.path[:200]!r}")
        page_file = front.page(raw_path(request))
        if page_file is None:
            return _not_found(request, "the front-end is not installed")
        answer = page_file.answer(request)
        if door.knows(request.headers) and (links := asked_first(request)):
            answer.headers["link"] = links
        return answer

    routes = [Route(path, asked(answers, _query)) for path, answers in QUESTIONS.items()]
    routes += [Route(path, asked(does, _body), methods=["POST"]) for path, does in ACTIONS.items()]
    routes += [Route("/api/events", events), Route("/api/writing", writing), Route("/api/stores", beside)]
    routes += [Route(SESSION, session), Route("/static/{name:path}", file), Route("/{path:path}", page)]
    return Guard(Starlette(routes=routes), door)


def _endpoint(
    opened: "Future[StoreReader]",
    limiter: list[CapacityLimiter],
    page: str,
    given: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Any]:
    """What reads a question from a request by ``given``, and has a function of a page answer it in a thread."""

    async def endpoint(request: Request) -> Response:
        if not limiter:
            limiter.append(CapacityLimiter(AT_ONCE))
        try:
            asked = await given(request)
            compressed = "gzip" in request.headers.get("accept-encoding", "")
            work = partial(answered, opened, page, asked, compressed)
            with anyio.fail_after(PATIENCE_S):
                return await anyio.to_thread.run_sync(work, limiter=limiter[0], abandon_on_cancel=True)
        except Exception as error:
            refused = explained(error)
            return JSONResponse(refused.body.model_dump(), refused.status)

    return endpoint


async def _query(request: Request) -> dict[str, str | list[str]]:
    """The query, and what stands in the path: a name that may be given several times is a list."""
    given = request.query_params
    query = {name: given.getlist(name) if name in ("set", "id") else value for name, value in given.items()}
    return query | request.path_params


async def _body(request: Request) -> Any:
    """The JSON of a POST. Raises RefusedError if it is too long or no JSON."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST_BODY:
            raise RefusedError(f"the body has more than {LONGEST_BODY} bytes", following="send less", status=413)
    try:
        given = loads(body)
    except ValueError as error:
        raise RefusedError(f"the body is no JSON: {error}") from None
    if (bad := unstorable(given)) is not None:
        raise RefusedError(f"{bad[0] or 'body'}: {bad[1]}", field=bad[0])
    return given


def _not_found(request: Request, error: str) -> Response:
    return JSONResponse(Refusal(error=error, next="open /").model_dump(), 404)


def explained(error: Exception) -> RefusedError:
    """What a client is told of an error."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        reason = "is not known here" if first["type"] == "extra_forbidden" else first["msg"]
        return RefusedError(f"{name}: {reason}", field=name)
    if isinstance(error, NoBufferError):
        return RefusedError(str(error), following="agentrl run quickstart", status=404)
    if isinstance(error, StoreError):
        return RefusedError(str(error))
    if isinstance(error, TimeoutError):
        return RefusedError(f"the answer takes more than {PATIENCE_S:g} s", following="ask for less", status=503)
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _STORES:
        following = "reload the page; if that does not help, `agentrl buffer check` says what is damaged"
        return RefusedError(f"the store cannot be read: {_first_line(error)}", following=following, status=503)
    log.error("a request failed", exc_info=error)
    return RefusedError(f"{type(error).__name__}: {_first_line(error)}", following="reload the page", status=500)


_STORES = ("deltalake", "obstore", "pyarrow", "polars", "_internal")
"""Packages whose errors describe a fault of a store or a disk: a version whose files were vacuumed, for instance."""


def _first_line(error: Exception) -> str:
    return redacted((str(error).strip().splitlines() or [""])[0][:300])
