"""vLLM servers over HTTP: one is a URL, and a process if we started it."""

import asyncio
import base64
import io
import os
import shutil
import socket
import ssl
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from agentrl.engines.base import EngineError, Turn
from agentrl.engines.blocking import in_thread
from agentrl.engines.replicas import (
    EXTENSION,
    FORGET,
    ROUTES,
    RUNNER,
    WORKER,
    Adapter,
    BadRequestError,
    Receiver,
    ReplicaError,
    Request,
    State,
    in_time,
    span_of,
    start_s,
    turn_of,
)
from agentrl.engines.transfer import transfer_option
from agentrl.placement.base import LaunchError, Process
from agentrl.placement.launcher import here
from agentrl.schemas.trajectory import Span

PAUSE_S = 2.0
KEPT_S = 2.0
"""How long a connection is kept that nothing uses; a server closes it after 5 s, maybe as a request is on its way."""

TAIL = 30
NEEDED = {
    "/inference/v1/generate": "start it with --enable-scale-out",
    "/pause": "start it with VLLM_SERVER_DEV_MODE=1",
    "/collective_rpc": "start it with VLLM_SERVER_DEV_MODE=1",
    "/update_weight_version": "start it with VLLM_SERVER_DEV_MODE=1",
}
"""Routes that the engine calls, and what a server that lacks them needs."""

ADAPT = "/v1/load_lora_adapter"


@dataclass(eq=False)
class Server:
    """See :class:`agentrl.engines.replicas.Replica`. One without ``url`` is started by the stage's launcher on
    ``gpus`` GPUs, with ``python``, the interpreter of an environment that has vLLM, and ``options``."""

    url: str = ""
    python: str = ""
    options: Sequence[str] = ()
    gpus: int = 0
    process: Process | None = None
    log: Path | None = None
    state: State = "starting"
    load: int = 0
    restarts: int = 0
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    """One for each request under way: a client's pool looks at all pairs of its connections for each request, which
    takes 30 ms for 256 of them."""
    idle: list[httpx.AsyncClient] = field(default_factory=list)
    verify: ssl.SSLContext = field(default_factory=httpx.create_ssl_context)

    def __str__(self) -> str:
        return f"the vLLM server {self.url}"

    async def start(self, folder: Path) -> int:
        if not self.url:
            self.log = folder.parent / f"server-{uuid.uuid4().hex[:8]}.log"
            self._launch(folder)
        await self._until_healthy(start_s(folder))
        paths = (await self.call("GET", "/openapi.json"))["paths"]
        for path, remedy in NEEDED.items():
            if path not in paths:
                raise EngineError(f"{self} has no {path}; {remedy}")
        return int((await self.call("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def revive(self, folder: Path) -> None:
        if self.process is not None and self.log is not None:
            self.restarts += 1
            self.state = "starting"
            await asyncio.to_thread(self.process.stop)
            await asyncio.sleep(PAUSE_S)
            self._launch(folder)
        await self._until_healthy(start_s(folder))

    def _launch(self, folder: Path) -> None:
        """Raises EngineError if it cannot be started."""
        assert self.log is not None
        command = server_command(self.python, folder, self.options)
        env = serving(self.options)
        if EXTENSION in self.options:
            modules = self.log.with_suffix(".modules")
            modules.mkdir(exist_ok=True)
            shutil.copytree(Path(__file__).with_name("worker"), modules / WORKER, dirs_exist_ok=True)
            env["PYTHONPATH"] = str(modules)
        try:
            self.process = here().start("vLLM server", command, log=self.log, gpus=self.gpus, env=env)
        except LaunchError as error:
            raise EngineError(str(error)) from error
        self.url = f"http://{self.process.address}"

    async def _until_healthy(self, limit_s: float) -> None:
        """Raises EngineError with the end of its log if its process ends or the time does."""
        ends = time.monotonic() + limit_s
        while time.monotonic() < ends:
            if await self.healthy():
                return
            if self.process is not None and self.process.poll() is not None:
                raise EngineError(f"{self} ended while it started; its log ends:\n{self.tail()}")
            await asyncio.sleep(0.5)
        raise EngineError(f"{self} did not answer for {limit_s:g} s (execution.limits.server_start_s); {self.tail()}")

    async def call(self, method: str, path: str, timeout: float | None = 60.0, **request: Any) -> Any:
        """The JSON that a route answers, or None. Raises ReplicaError if it fails or does not answer in time."""
        answer = await self._asked(method, path, timeout, **request)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise ReplicaError(f"{self.url}{path} answered what is not JSON: {answer.text[:100]!r}") from error

    async def _asked(self, method: str, path: str, timeout: float | None = 60.0, **request: Any) -> httpx.Response:
        client = self._client()
        try:
            answer = await client.request(method, self.url + path, timeout=timeout, **request)
        except httpx.HTTPError as error:
            raise ReplicaError(f"{self.url}{path}: {error or type(error).__name__}") from error
        finally:
            self.idle.append(client)
        if answer.status_code != 200:
            problem = f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}"
            if answer.status_code == 400 and (reason := _reason(answer)):
                raise BadRequestError(problem, reason)
            raise ReplicaError(problem)
        return answer

    def _client(self) -> httpx.AsyncClient:
        if self.idle:
            return self.idle.pop()
        limits = httpx.Limits(keepalive_expiry=KEPT_S)
        self.clients.append(httpx.AsyncClient(trust_env=False, verify=self.verify, limits=limits))
        return self.clients[-1]

    async def sample(self, request: Request, ends: float | None) -> Turn | None:
        name = uuid.uuid4().hex
        body = {"token_ids": request.ids, "priority": request.priority, "sampling_params": request.params}
        body |= _model(request.adapter)
        abort = {"request_ids": [f"generate-tokens-{name}"]}
        answer = await in_time(
            self._generate(body | {"request_id": name}),
            ends,
            lambda: self.call("POST", "/inference/v1/abort_requests", json=abort),
        )
        if answer is None:
            return None
        [choice] = answer["choices"]
        ids = [int(token) for token in choice["token_ids"]]
        logprobs = [float(entry["logprob"]) for entry in (choice["logprobs"]["content"] if ids else [])]
        spans = _spans(choice)
        return turn_of(ids, logprobs, spans, choice["finish_reason"], _routes(choice))

    async def score(self, ids: list[int], adapter: Adapter | None) -> list[float]:
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0, "detokenize": False}
        params |= {"routed_experts_prompt_start": len(ids)} if ROUTES in self.options else {}
        answer = await self._generate({"token_ids": ids, "sampling_params": params} | _model(adapter))
        given = answer.get("prompt_logprobs")
        for choice in answer["choices"]:
            _spans(choice)
        if given is None:
            raise ReplicaError(f"{self} scored nothing")
        return [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], given[1:], strict=True)]

    async def _generate(self, body: dict[str, Any]) -> Any:
        return await self.call("POST", "/inference/v1/generate", timeout=None, json=body)

    async def pause(self) -> None:
        await self.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    async def reload(self, folder: Path) -> None:
        if EXTENSION in self.options:
            await self.told(FORGET, start_s(folder))
        await self.told("reload_weights", start_s(folder), weights_path=str(folder))

    async def told(self, method: str, limit_s: float, **arguments: Any) -> list[Any]:
        body = {"method": method, "kwargs": arguments}
        answer = await self.call("POST", "/collective_rpc", timeout=limit_s, json=body)
        results: list[Any] = (answer or {}).get("results", [])
        return results

    async def label(self, version: int) -> None:
        await self.call("POST", "/update_weight_version", json={"new_version": str(version)})

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def version(self) -> str:
        return str((await self.call("GET", "/weight_info", timeout=10.0))["weight_version"])

    async def adapt(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        try:
            await self._asked("POST", ADAPT, timeout=start_s(adapter.folder), json=body)
        except ReplicaError as error:
            if ADAPT in (await self.call("GET", "/openapi.json"))["paths"]:
                raise
            raise EngineError(
                f"{self} has no {ADAPT}; start it with --enable-lora --max-lora-rank RANK and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            ) from error

    async def drop(self, adapter: Adapter) -> None:
        await self._asked("POST", "/v1/unload_lora_adapter", json={"lora_name": adapter.name})

    async def adapters(self) -> set[str]:
        return {str(model["id"]) for model in (await self.call("GET", "/v1/models"))["data"]}

    async def receiver(self, limit_s: float) -> Receiver:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        url = httpx.URL(self.url)
        with socket.create_connection((url.host, url.port or 80), timeout=10) as seen:
            address = str(seen.getsockname()[0])
        ranks = int((await self.call("GET", "/get_world_size"))["world_size"])
        return Receiver(HTTPVLLMWeightSyncClient(self.url, limit_s), ranks, address)

    async def healthy(self) -> bool:
        try:
            await self.call("GET", "/health", timeout=5.0)
        except ReplicaError:
            return False
        return True

    async def stop(self) -> None:
        if self.process is not None:
            await in_thread(self.process.stop)
        self.state = "dead"
        await asyncio.gather(*(client.aclose() for client in self.clients))

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:]) if self.log else ""


def _reason(answer: httpx.Response) -> str:
    """Why vLLM refuses a request; empty if it does not say so in its own form."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _model(adapter: Adapter | None) -> dict[str, str]:
    """How a request names an adapter; without one it is for the model itself."""
    return {} if adapter is None else {"model": adapter.name}


def _routes(choice: dict[str, Any]) -> np.ndarray | None:
    """Experts [tokens, layers, k], which are bytes of numpy's own format in base64."""
    given = choice.get("routed_experts")
    return None if given is None else np.load(io.BytesIO(base64.b64decode(given)), allow_pickle=False)


def _spans(choice: dict[str, Any]) -> list[Span]:
    return [span_of(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]


SERVING: Mapping[str, str | None] = {
    "PYTHONPATH": None,
    "PYTHONSAFEPATH": "1",  # no module of the stage's folder is taken for one of vLLM's
    "VIRTUAL_ENV": None,
    "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What every server finds in its environment."""


def serving(options: Sequence[str]) -> dict[str, str | None]:
    """The changes to the environment of a server with these options."""
    env = dict(SERVING)
    if ROUTES in options:
        env[RUNNER] = "1"
    if "--enable-lora" in options:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if transfer_option("ipc")[1] in options:
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return env


def server_command(python: str, model: Path, options: Sequence[str]) -> list[str]:
    """A vLLM server of the environment of ``python``. It listens at its own address alone: its control routes have no
    key, so that of another machine must be on a private network."""
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "{host}",
        "--port", "{port}", "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--scheduling-policy", "priority", "--disable-uvicorn-access-log", *options,
    ]  # fmt: skip
