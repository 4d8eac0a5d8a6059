"""The vLLM engine: token ids in and out, no text between.

Its replicas are servers, started by it or given by URL, or vLLM in this process. A turn goes to the replica with the
fewest tokens under way, and sessions of one root to the one that has their prefix in its cache. The engine has an event
loop of its own, so that connections stay open and replicas are watched between rollouts.
"""

import asyncio
import atexit
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from agentrl.engines.base import EngineError, Sampling, SchemaError, Session, Turn, Weights
from agentrl.engines.deltas import Deltas
from agentrl.engines.replicas import Adapter, BadRequestError, Replica, ReplicaError, Request, routes_of
from agentrl.engines.sync import Adapters, Folders, Sync
from agentrl.engines.transfer import Transfer
from agentrl.engines.weights import TOLERANCE, adapter_rank, expected, expected_rounded, probe_ids
from agentrl.placement.launcher import temporary
from agentrl.schemas.trajectory import Span

if TYPE_CHECKING:
    from agentrl.engines.routes import RouteShape
    from agentrl.models.policy import Policy

RESTARTS = 5
PAUSE_S = 2.0
TRIES = 4
_FULLER = 2.0  # a replica this much fuller than another loses its sessions to it
Result = TypeVar("Result")

Way = Literal["folders", "delta", "nccl", "ipc"]
"""How weights come to vLLM."""


class Expectation(NamedTuple):
    """Fixed tokens, the log-probs of all but the first that transformers gives them with the current weights, and how
    far a server's may be from these on average."""

    ids: list[int]
    logprobs: list[float]
    allowed: float


class VLLMEngine:
    """Samples with ``replicas`` of vLLM that serve ``policy``. If this has an adapter, they are given that alone.

    Folders of weights lie in ``folder``, which replicas must be able to read, and have ``dtype``, or the model's. A
    load whose probe differs from transformers by more than ``tolerance`` (mean absolute difference of log-probs) is an
    error. Without one it is 1e-3, or some times what rounding costs the model if ``dtype`` is not float32. With the
    ``shape`` of the model's routes, turns have those that replicas return.

    Raises EngineError if a replica does not start, lacks a route, or gives other log-probs than transformers.
    """

    exact = True
    reproducible = False
    keeps_schemas = True

    def __init__(
        self,
        policy: "Policy",
        replicas: Sequence[Replica],
        folder: Path | None = None,
        tolerance: float | None = None,
        sync: Way = "folders",
        dtype: str | None = None,
        shape: "RouteShape | None" = None,
    ) -> None:
        self._own_folder = folder is None
        self.folder = folder or temporary("vllm")
        self.version = policy.version
        self.tolerance, self.shape = tolerance or TOLERANCE, shape
        self.context = 0
        self.replicas = list(replicas)
        self._vocabulary = policy.model.config.get_text_config().vocab_size
        self._homes: dict[str, Replica] = {}
        self._using: Counter[Adapter | None] = Counter()
        self._fixing: dict[Replica, asyncio.Task[None]] = {}
        self._ready = asyncio.Event()
        self.loads: list[float] = []
        if sync == "delta":
            self._sync: Sync = Deltas(policy, self.folder, dtype)
        elif sync != "folders":
            self._sync = Transfer(policy, self.folder, dtype, sync)
        else:
            self._sync = (Folders if adapter_rank(policy.model) is None else Adapters)(policy, self.folder, dtype)
        self._rounds = tolerance is None and dtype != "float32"
        self._probe = Expectation([], [], 0.0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        try:
            self._wait(self._start(Weights(policy.version, policy.source)))
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
        schema: str | None = None,
    ) -> Turn:
        """See :class:`agentrl.engines.base.SchemaEngine`. Raises EngineError if no replica can answer."""
        limit = min(sampling.max_turn_tokens, sampling.max_tokens - len(session.ids))
        if limit < 1:
            return Turn([], [], [], "length")
        if len(session.ids) + limit > self.context:  # vLLM would cut the turn without a word
            raise EngineError(
                f"sampling.max_tokens is {sampling.max_tokens}, and vLLM's context is {self.context}; lower it, or "
                "serve a longer context"
            )
        params = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": limit,
            "logprobs": 0,
            "stop_token_ids": list(stop),
            "ignore_eos": True,
            "seed": seed % 2**63,
            "detokenize": False,
        }
        if schema is not None:
            params["structured_outputs"] = {"json": schema}
        if self.shape:
            params["routed_experts_prompt_start"] = session.routed
        request = Request(list(session.ids), params, deadline)
        ends = None if time_limit is None else self._loop.time() + time_limit
        cost = len(session.ids) + limit
        made = await self._outside(
            self._asked(lambda replica: self._sample(replica, request, ends), cost, session.root, ends)
        )
        if made is None:
            return Turn([], [], [], "cut")
        return replace(made, logprobs=[0.0] * len(made.ids)) if sampling.temperature == 0 else made

    async def score(self, ids: Sequence[int], start: int = 1) -> list[float]:
        """See :class:`agentrl.engines.base.Engine`."""
        if len(ids) + 1 > self.context:
            raise EngineError(
                f"{len(ids)} tokens do not fit vLLM's context of {self.context}, which keeps one for the next token"
            )
        logprobs = await self._outside(
            self._asked(lambda replica: replica.score(list(ids), self._sync.adapter), len(ids))
        )
        assert logprobs is not None  # there is no limit of time
        return logprobs[start - 1 :]

    async def load(self, weights: Weights) -> None:
        """See :class:`agentrl.engines.base.Engine`. Raises EngineError if a replica does not load them, or gives other
        log-probs with them than transformers does."""
        await self._outside(self._load(weights))

    async def close(self) -> None:
        """Stop what this engine started, and remove its folder if it made one."""
        await asyncio.to_thread(self._end)

    # --- requests

    async def _sample(self, replica: Replica, request: Request, ends: float | None) -> Turn | None:
        """A turn by the current adapter, if there is one. vLLM's own spans do not tell adapters apart."""
        adapter = self._sync.adapter
        self._using[adapter] += 1
        try:
            made = await replica.sample(replace(request, adapter=adapter), ends)
        except BadRequestError as error:
            if "structured_outputs" in request.params:
                raise SchemaError(error.reason) from error
            raise
        finally:
            self._using[adapter] -= 1
        if made is not None and self.shape:
            given = len(request.ids) + len(made.ids) - 1 - request.params["routed_experts_prompt_start"]
            made = replace(made, routes=routes_of(made, self.shape, given))
        if made is None or adapter is None or not made.ids:
            return made
        return replace(made, spans=[Span(version=adapter.version, start=0, end=len(made.ids))])

    async def _asked(
        self,
        ask: Callable[[Replica], Awaitable[Result]],
        cost: int,
        root: str = "",
        ends: float | None = None,
    ) -> Result | None:
        """What a replica answers; None if time was over before one was asked. A replica that fails is asked no more
        until it is well again, and another one is asked the same."""
        problem: Exception | None = None
        log = ""
        for _ in range(TRIES):
            try:
                left = None if ends is None else ends - self._loop.time()
                replica = await asyncio.wait_for(self._pick(root, cost), left)
            except TimeoutError:
                return None
            replica.load += cost
            try:
                return await ask(replica)
            except ReplicaError as error:
                problem = error
                if replica.state == "serving":
                    warnings.warn(
                        f"{replica} failed, and gets no requests until it answers again: {error}", stacklevel=2
                    )
                self._suspect(replica)
                log = replica.tail()
            finally:
                replica.load -= cost
        shown = f"; its log ends:\n{log}" if log else ""
        raise EngineError(f"{TRIES} requests failed one after the other; the last: {problem}{shown}") from problem

    async def _pick(self, root: str, cost: int) -> Replica:
        """The replica with the fewest tokens under way, or the one of this root if it is not much fuller."""
        while True:
            serving = [replica for replica in self.replicas if replica.state == "serving"]
            if serving:
                break
            if all(replica.state == "dead" for replica in self.replicas):
                raise EngineError(f"no vLLM is left; the log of the last ends:\n{self.replicas[-1].tail()}")
            self._ready.clear()
            await self._ready.wait()
        least = min(serving, key=lambda replica: replica.load)
        home = self._homes.get(root)
        if home in serving and home is not None and home.load <= _FULLER * (least.load + cost):
            return home
        if root:
            self._homes[root] = least
        return least

    # --- weights

    async def _load(self, weights: Weights) -> None:
        started = self._loop.time()
        prepared = await asyncio.to_thread(self._sync.prepare, weights)
        serving = [replica for replica in self.replicas if replica.state == "serving"]
        probe, _ = await asyncio.gather(self._expected(weights), self._sync.offer(serving, prepared))
        before = (self.version, self._probe)
        self._sync.use(weights.version, prepared)
        self.version, self._probe = weights.version, probe
        serving = [replica for replica in self.replicas if replica.state == "serving"]
        for replica in serving:
            replica.state = "stale"
        results = await self._sync.give(serving)
        tries = (self._taken_up(replica, problem) for replica, problem in zip(serving, results, strict=True))
        problems = [problem for problem in await asyncio.gather(*tries, return_exceptions=True) if problem is not None]
        if problems:
            self._sync.back()
            self.version, self._probe = before
            for replica in serving:
                self._suspect(replica)
            raise problems[0]
        if not self._fixing:  # else one may be starting from what was current before
            await self._sync.tidy(serving, +self._using)
        self.loads.append(self._loop.time() - started)

    async def _taken_up(self, replica: Replica, problem: BaseException | None) -> None:
        """See that a replica has the weights that it was given. One that failed meanwhile gets them later."""
        try:
            if problem is not None:
                raise problem
            await self._prove(replica)
        except ReplicaError:
            self._suspect(replica)

    async def _expected(self, weights: Weights) -> Expectation:
        ids = probe_ids(self._vocabulary, self.context - 1)
        if self._rounds:
            logprobs, cost = await asyncio.to_thread(expected_rounded, weights, ids)
            return Expectation(ids, logprobs, max(TOLERANCE, cost))
        return Expectation(ids, await asyncio.to_thread(expected, weights, ids), self.tolerance)

    async def _prove(self, replica: Replica) -> None:
        """A replica that gives the log-probs of transformers serves from now on. Raises EngineError if it gives
        others."""
        ids, wanted, allowed = self._probe
        logprobs = await replica.score(ids, self._sync.adapter)
        gap = sum(abs(logprob - other) for logprob, other in zip(logprobs, wanted, strict=True)) / len(wanted)
        if not gap <= allowed:
            replica.state = "dead"
            raise EngineError(
                f"{replica} gives other log-probs than transformers with version {self.version} "
                f"(mean difference {gap:.2g}, allowed {allowed:.2g}); its weights are wrong"
            )
        replica.state = "serving"
        self._ready.set()

    # --- replicas

    async def _start(self, weights: Weights) -> None:
        self._ready = asyncio.Event()
        self.context = min(await asyncio.gather(*(replica.start(self._sync.start) for replica in self.replicas)))
        for problem in await self._sync.give(self.replicas):
            if problem is not None:
                raise problem
        self._probe = await self._expected(weights)
        await asyncio.gather(*(self._prove(replica) for replica in self.replicas))

    def _suspect(self, replica: Replica) -> None:
        """Ask this replica no more until it is seen to be well."""
        if replica.state == "serving":
            replica.state = "suspect"
        if replica not in self._fixing and replica.state != "dead":
            self._fixing[replica] = asyncio.create_task(self._fix(replica))

    async def _fix(self, replica: Replica) -> None:
        """See that a replica answers again, and has the current weights. It may fail again meanwhile."""
        try:
            for last in [False] * (RESTARTS - 1) + [True]:
                try:
                    return await self._restored(replica)
                except EngineError:
                    if last or replica.state == "dead":
                        raise
                    await asyncio.sleep(PAUSE_S)
        except EngineError:
            replica.state = "dead"
            self._ready.set()
        finally:
            del self._fixing[replica]

    async def _restored(self, replica: Replica) -> None:
        if not await replica.healthy():
            if replica.restarts == RESTARTS:
                replica.state = "dead"
                raise EngineError(f"{replica} ended {RESTARTS} times; its log ends:\n{replica.tail()}")
            await replica.revive(self._sync.start)
        version = None
        while version != self.version:  # it may change meanwhile
            version = self.version
            replica.state = "stale"
            await self._sync.restore(replica)
            if version == self.version:
                await self._prove(replica)

    async def _stop(self) -> None:
        for task in list(self._fixing.values()):
            task.cancel()
        await asyncio.gather(*self._fixing.values(), return_exceptions=True)
        await self._sync.end([replica for replica in self.replicas if replica.state == "serving"])
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

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
