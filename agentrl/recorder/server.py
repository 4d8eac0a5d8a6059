"""``agentrl serve``: the recorder behind a socket, with routes to open episodes and to reward them. It needs
uvicorn."""

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from agentrl.recorder.app import LOOPBACK, application, body_of, guarded, key_of
from agentrl.recorder.episode import About, PostedReward
from agentrl.recorder.episodes import new_key
from agentrl.recorder.feedback import PostedFeedback
from agentrl.recorder.listening import bound
from agentrl.recorder.recorder import Recorder
from agentrl.recorder.wire import ApiError, read

if TYPE_CHECKING:
    import uvicorn


def server_of(app: ASGIApp) -> "uvicorn.Server":
    """A server for an application. It leaves the process's signals alone."""
    import uvicorn

    from agentrl.recorder.connections import Connection

    class Quiet(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(app, http=Connection, log_level="warning", access_log=False, lifespan="off")
    config.timeout_graceful_shutdown = 2
    config.timeout_keep_alive = 120  # an agent's tools may take a while between two requests on one connection
    return Quiet(config)


def recording(recorder: Recorder, host: str) -> ASGIApp:
    """The application of a recorder that is bound to an address."""
    local = host in LOOPBACK

    async def opened(request: Request) -> Response:
        if recorder.place_of(key_of(request), None) is not None:
            raise ApiError(403, "an episode's key opens no other episode", "invalid_api_key")
        about = read(About, await body_of(request) or b"{}")
        episode = recorder.episodes.open(about, new_key())
        url = f"{request.base_url}episodes/{episode.name}"
        urls = {"base_url": f"{url}/v1", "anthropic_base_url": url}
        opened_episode = {"id": episode.name, **urls, "api_key": episode.key, "model": recorder.model}
        return JSONResponse(opened_episode, 201)

    async def rewarded(request: Request) -> Response:
        episode = recorder.place_of(key_of(request), request.path_params["episode"])
        assert episode is not None
        outcome = read(PostedReward, await body_of(request))
        ids = await recorder.reward(episode, outcome)
        return JSONResponse({"id": episode.name, "rows": ids, "reward": outcome.reward})

    async def told(request: Request) -> Response:
        name = request.path_params["episode"]
        try:
            recorder.place_of(key_of(request), name)
        except ApiError as error:  # people say later, too, what they think of it
            if error.code not in ("episode_closed", "episode_not_found"):
                raise
        posted = read(PostedFeedback, await body_of(request))
        number = await recorder.episodes.feedback(name, posted)
        return JSONResponse({"id": posted.id, "episode": name, "kept": number})

    async def state(request: Request) -> Response:
        name = request.path_params["episode"]
        try:
            episode = recorder.place_of(key_of(request), name)
        except ApiError as error:
            if error.code != "episode_closed":
                raise
            return JSONResponse({"id": name, **recorder.episodes.state(name)})
        assert episode is not None
        return JSONResponse({"id": name, "state": "open", "turns": len(episode.tree.turns)})

    return application(
        recorder,
        [
            Route("/episodes", guarded(opened, local), methods=["POST"]),
            Route("/episodes/{episode}", guarded(state, local)),
            Route("/episodes/{episode}/feedback", guarded(told, local), methods=["POST"]),
            Route("/episodes/{episode}/reward", guarded(rewarded, local), methods=["POST"]),
        ],
        local,
    )


def settle() -> None:
    """Let the collector of garbage look past what is there now, once all is loaded. Otherwise it looks through torch
    and transformers now and then, and nobody is answered for a quarter of a second."""
    gc.collect()
    gc.freeze()


async def serve(recorder: Recorder, host: str, port: int, tell: Callable[..., None]) -> int:
    """Serve until SIGINT or SIGTERM. ``tell`` is given what a user should know, in words and values. Returns the
    number of episodes that are left in their files. Raises OSError if the address is in use."""
    listening = bound(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listening.getsockname()[1]}"
    server = server_of(recording(recorder, host))
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        for line in await recorder.start():
            tell(line)
        settle()
        tell("serving", model=recorder.model, base_url=f"{url}/v1", episodes=f"{url}/episodes")
        await server.serve([listening])
    finally:
        left = await recorder.stop()
        await recorder.sampler.engine.close()
    return left
