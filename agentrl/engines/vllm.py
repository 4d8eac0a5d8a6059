"""The vLLM engine: servers over HTTP, token ids in and out, no text between.

Servers are started by the engine or given by URL. A turn goes to the server with the fewest tokens under way, and
sessions of one root to the one that has their prefix in its cache. The engine has an event loop of its own, so that
connections stay open and servers are watched between rollouts.
"""

import asyncio
import atexit
import shutil
import tempfile
import threading
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agentrl.engines.base import EngineError, Sampling, Session, Turn, Weights
from agentrl.engines.servers import Server, ServerError, free_port, start_process, until_healthy
from agentrl.engines.weights import expected, probe_ids, write_folder
from schemas.trajectory import Span

if TYPE_CHECKING:
    from agentrl.models.policy import Policy

START_S = 600.0
ANSWER_S = 10.0  # for what is left of a request that was cut
ABORT_AGAIN_S = 0.1
PAUSE_S = 2.0
RESTARTS = 5
TRIES = 4
_FULLER = 2.0  # a server this much fuller than another loses its sessions to it
Result = TypeVar("Result")


class VLLMEngine:
    """Samples with vLLM servers that serve ``policy``.

    ``urls`` are servers that run already; without them, ``servers`` are started with ``python``, the interpreter of an
    environment that has vLLM. Folders of weights lie in ``folder``, which servers must be able to read. A load whose
    probe differs from transformers by more than ``tolerance`` (mean absolute difference of log-probs) is an error.

    Raises EngineError if a server does not start, lacks a route, or gives other log-probs than transformers.
    """

    exact = True
    reproducible = False

    def __init__(
        self,
        policy: "Policy",
        *,
        urls: Sequence[str] = (),
        servers: int = 1,
        python: str = "python",
        folder: Path | None = None,
        tolerance: float = 1e-3,
        options: Sequence[str] = (),
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="agentrl-vllm-"))
        self.version = policy.version
        self.tolerance = tolerance
        self.context = 0
        self._tokenizer = policy.tokenizer
        self._vocabulary = policy.model.config.get_text_config().vocab_size
        self._python, self._options = python, list(options)
        self._homes: dict[str, Server] = {}
        self._fixing: dict[Server, asyncio.Task[None]] = {}
        self._ready = asyncio.Event()
        self.loads: list[float] = []
        self._current = self._first = write_folder(policy.model, policy.tokenizer, self.folder / str(self.version))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        self.servers: list[Server] = []
        try:
            self._wait(self._start(Weights(policy.version, policy.model), urls, servers))
        except BaseException:
            self._end()
            raise

    # --- the protocol

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
        """See :class:`agentrl.engines.base.Engine`. Raises EngineError if no server can answer."""
        limit = min(sampling.max_turn_tokens, sampling.max_tokens - len(session.ids))
        if limit < 1:
            return Turn([], [], [], "length")
        if len(session.ids) + limit > self.context:  # a server would cut the turn without a word
            raise EngineError(
                f"sampling.max_tokens is {sampling.max_tokens}, and the servers' context is {self.context}; lower it, "
                "or serve a longer context"
            )
        body = {
            "token_ids": session.ids,
            "priority": deadline,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": limit,
                "logprobs": 0,
                "stop_token_ids": list(stop),
                "ignore_eos": True,
                "seed": seed % 2**63,
            },
        }
        answer = await self._outside(self._generate(body, session.root, len(session.ids) + limit, time_limit))
        return _turn(answer, sampling) if answer else Turn([], [], [], "cut")

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        """See :class:`agentrl.engines.base.Engine`."""
        return await self._outside(self._score(list(ids), start))

    async def load(self, weights: Weights) -> None:
        """See :class:`agentrl.engines.base.Engine`. Raises EngineError if a server does not load them, or gives other
        log-probs with them than transformers does."""
        await self._outside(self._load(weights))

    async def close(self) -> None:
        """Stop the servers that this engine started, and remove its folder if it made one."""
        await asyncio.to_thread(self._end)

    # --- requests

    async def _generate(
        self, body: dict[str, Any], root: str, cost: int, time_limit: float | None
    ) -> dict[str, Any] | None:
        """The answer of a server; None if time was over before one began. A server that fails is asked no more until
        it is well again, and another one is asked the same."""
        ends = None if time_limit is None else self._loop.time() + time_limit
        problem: Exception | None = None
        for _ in range(TRIES):
            try:
                left = None if ends is None else ends - self._loop.time()
                server = await asyncio.wait_for(self._pick(root, cost), left)
            except TimeoutError:
                return None
            server.load += cost
            try:
                return await self._ask(server, body, ends)
            except ServerError as error:
                problem = error
                self._suspect(server)
            finally:
                server.load -= cost
        raise EngineError(f"{TRIES} requests failed one after the other; the last: {problem}") from problem

    async def _ask(self, server: Server, body: dict[str, Any], ends: float | None) -> dict[str, Any] | None:
        name = uuid.uuid4().hex
        request = server.call("POST", "/inference/v1/generate", timeout=None, json=body | {"request_id": name})
        task = asyncio.create_task(request)
        try:
            await asyncio.wait([task], timeout=None if ends is None else max(0.0, ends - self._loop.time()))
            # The server answers an aborted request with what there is. One that it has not taken in yet it does not
            # know, and says nothing of that: so it is told again.
            abort = {"request_ids": [f"generate-tokens-{name}"]}
            over = self._loop.time() + ANSWER_S
            while not task.done() and self._loop.time() < over:
                await server.call("POST", "/inference/v1/abort_requests", json=abort)
                await asyncio.wait([task], timeout=ABORT_AGAIN_S)
            return (await task) if task.done() else None
        finally:
            task.cancel()

    async def _pick(self, root: str, cost: int) -> Server:
        """The server with the fewest tokens under way, or the one of this root if it is not much fuller."""
        while True:
            serving = [server for server in self.servers if server.state == "serving"]
            if serving:
                break
            if all(server.state == "dead" for server in self.servers):
                raise EngineError(f"no vLLM server is left; the log of the last ends:\n{self.servers[-1].tail()}")
            self._ready.clear()
            await self._ready.wait()
        least = min(serving, key=lambda server: server.load)
        home = self._homes.get(root)
        if home in serving and home is not None and home.load <= _FULLER * (least.load + cost):
            return home
        if root:
            self._homes[root] = least
        return least

    async def _score(self, ids: list[int], start: int, server: Server | None = None) -> list[float]:
        if len(ids) + 1 > self.context:
            raise EngineError(f"{len(ids)} tokens do not fit the servers' context of {self.context}, less one")
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0}
        body = {"token_ids": ids, "sampling_params": params}
        found = await self._ask(server, body, None) if server else await self._generate(body, "", len(ids), None)
        if found is None or found.get("prompt_logprobs") is None:
            raise EngineError("a vLLM server scored nothing")
        return [
            float(given[str(token)]["logprob"])
            for token, given in zip(ids[start:], found["prompt_logprobs"][start:], strict=True)
        ]

    # --- weights

    async def _load(self, weights: Weights) -> None:
        folder = await asyncio.to_thread(
            write_folder, weights.source, self._tokenizer, self.folder / str(weights.version), self._first
        )
        ids, wanted = await self._expectation(weights, folder)
        before, self._current, self.version = (self._current, self.version), folder, weights.version
        serving = [server for server in self.servers if server.state == "serving"]
        for server in serving:
            server.state = "stale"
        tries = (self._take_up(server, before[0], ids, wanted) for server in serving)
        problems = [one for one in await asyncio.gather(*tries, return_exceptions=True) if one is not None]
        if problems:
            self._current, self.version = before
            for server in serving:
                self._suspect(server)
            raise problems[0]
        for old in self.folder.iterdir():
            if old not in (self._first, self._current):
                shutil.rmtree(old, ignore_errors=True)

    async def _take_up(self, server: Server, before: Path, ids: list[int], wanted: list[float]) -> None:
        """Give a server the current weights, and see that it has them. One that ends meanwhile gets them later."""
        try:
            await self._renew(server, before)
            await self._probe(server, ids, wanted)
        except ServerError:
            self._suspect(server)

    async def _renew(self, server: Server, before: Path | None = None) -> None:
        """Give a server the current weights, between two tokens of what it samples. It computes its cache again, so
        that later tokens see the new weights alone. If it cannot load them, it goes back to those of ``before``: it
        would end with the next request."""
        started = self._loop.time()
        await server.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})
        try:
            await self._reload(server, self._current)
        except ServerError as error:
            if before is None or not await server.healthy():
                raise
            await self._reload(server, before)
            await server.call("POST", "/resume")
            raise EngineError(f"a vLLM server did not load version {self.version}: {error}") from error
        await server.call("POST", "/update_weight_version", json={"new_version": str(self.version)})
        await server.call("POST", "/resume")
        self.loads.append(self._loop.time() - started)

    async def _reload(self, server: Server, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await server.call("POST", "/collective_rpc", timeout=START_S, json=body)

    async def _expectation(self, weights: Weights, folder: Path) -> tuple[list[int], list[float]]:
        ids = probe_ids(self._vocabulary, self.context - 1)
        return ids, await asyncio.to_thread(expected, weights, folder, ids)

    async def _probe(self, server: Server, ids: list[int], wanted: list[float]) -> None:
        """Serving is whoever gives the log-probs of transformers; raises EngineError for others."""
        found = await self._score(ids, 1, server)
        gap = sum(abs(one - other) for one, other in zip(found, wanted, strict=True)) / len(wanted)
        if not gap <= self.tolerance:
            server.state = "dead"
            raise EngineError(
                f"the vLLM server {server.url} gives other log-probs than transformers with version {self.version} "
                f"(mean difference {gap:.2g}, allowed {self.tolerance:g}); its weights are wrong"
            )
        server.state = "serving"
        self._ready.set()

    # --- servers

    async def _start(self, weights: Weights, urls: Sequence[str], servers: int) -> None:
        self._ready = asyncio.Event()
        for url in urls:
            self.servers.append(Server(url.rstrip("/")))
        for number in range(0 if urls else servers):
            port, log = free_port(), self.folder / f"server-{number}.log"
            process = start_process(self._python, self._current, port, log, self._options)
            self.servers.append(Server(f"http://127.0.0.1:{port}", process, log))
        await asyncio.gather(*(until_healthy(server, START_S) for server in self.servers))
        self.context = min(await asyncio.gather(*(server.check_routes() for server in self.servers)))
        await asyncio.gather(*(self._renew(server) for server in self.servers))
        ids, wanted = await self._expectation(weights, self._current)
        await asyncio.gather(*(self._probe(server, ids, wanted) for server in self.servers))

    def _suspect(self, server: Server) -> None:
        """Ask this server no more until it is seen to be well."""
        if server.state == "serving":
            server.state = "suspect"
        if server not in self._fixing and server.state != "dead":
            self._fixing[server] = asyncio.create_task(self._fix(server))

    async def _fix(self, server: Server) -> None:
        """Wait for a server, start it again if it is ours and has ended, and give it the current weights: one that was
        started again answers with those of its start."""
        try:
            if not await server.healthy() and server.process is not None:
                await self._restart(server)
            await until_healthy(server, START_S)
            if await server.version() != str(self.version):
                server.state = "stale"
                await self._renew(server)
            weights = Weights(self.version, self._current)
            await self._probe(server, *await self._expectation(weights, self._current))
        except EngineError:
            server.state = "dead"
            self._ready.set()
        finally:
            del self._fixing[server]

    async def _restart(self, server: Server) -> None:
        if server.restarts == RESTARTS:
            raise EngineError(f"the vLLM server {server.url} ended {RESTARTS} times; its log ends:\n{server.tail()}")
        server.restarts += 1
        server.state = "starting"
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(PAUSE_S)
        port = int(server.url.rpartition(":")[2])
        assert server.log is not None
        server.process = start_process(self._python, self._current, port, server.log, self._options)

    async def _stop(self) -> None:
        for task in list(self._fixing.values()):
            task.cancel()
        await asyncio.gather(*self._fixing.values(), return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self.servers))
        for server in self.servers:
            server.state = "dead"
            await server.client.aclose()

    # --- the engine's own event loop

    async def _outside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What work on the engine's loop gives; cancelling the wait cancels the work, and closes its connection."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _end(self) -> None:
        if not self._thread.is_alive():
            return
        atexit.unregister(self._end)
        self._wait(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _turn(answer: dict[str, Any], sampling: Sampling) -> Turn:
    """A turn from a server's answer. Raises EngineError if its parts do not fit together."""
    [choice] = answer["choices"]
    ids = [int(one) for one in choice["token_ids"]]
    given = choice["logprobs"]["content"] if ids else []
    logprobs = [0.0 if sampling.temperature == 0 else float(one["logprob"]) for one in given]
    versions = choice["weight_versions"] or []
    spans = [Span(version=int(one["version"]), start=one["start"], end=one["end"]) for one in versions]
    if len(logprobs) != len(ids) or sum(span.end - span.start for span in spans) != len(ids):
        raise EngineError(f"a vLLM server gave {len(ids)} tokens, {len(logprobs)} log-probs and the spans {spans}")
    reason = choice["finish_reason"]
    return Turn(ids, logprobs, spans, "cut" if reason == "abort" else "stop" if reason == "stop" else "length")
