"""vLLM servers over HTTP: one is a URL, and a process if we started it."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from agentrl.engines.base import EngineError, Turn
from agentrl.engines.replicas import START_S, Adapter, Receiver, ReplicaError, Request, State, in_time, span_of, turn_of
from agentrl.engines.transfer import transfer_option
from schemas.trajectory import Span

STOP_S = 10.0
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

TIED = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):  # it may have died before we asked
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Python that becomes another command, which is told to end if the process that started it ends."""


@dataclass(eq=False)
class Server:
    """See :class:`agentrl.engines.replicas.Replica`. One without ``url`` is started on loopback by ``python``, the
    interpreter of an environment that has vLLM, with ``options``."""

    url: str = ""
    python: str = ""
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
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
            port = free_port()
            self.url, self.log = f"http://127.0.0.1:{port}", folder.parent / f"server-{port}.log"
            self.process = start_process(self.python, folder, port, self.log, self.options)
        await self._until_healthy()
        paths = (await self.call("GET", "/openapi.json"))["paths"]
        for path, remedy in NEEDED.items():
            if path not in paths:
                raise EngineError(f"{self} has no {path}; {remedy}")
        return int((await self.call("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def revive(self, folder: Path) -> None:
        if self.process is not None and self.log is not None:
            self.restarts += 1
            self.state = "starting"
            await asyncio.to_thread(self._end)
            await asyncio.sleep(PAUSE_S)
            port = int(self.url.rpartition(":")[2])
            self.process = start_process(self.python, folder, port, self.log, self.options)
        await self._until_healthy()

    async def _until_healthy(self) -> None:
        """Raises EngineError with the end of its log if its process ends or the time does."""
        for _ in range(int(START_S / 0.5)):
            if await self.healthy():
                return
            if self.process is not None and self.process.poll() is not None:
                raise EngineError(f"{self} ended while it started; its log ends:\n{self.tail()}")
            await asyncio.sleep(0.5)
        raise EngineError(f"{self} did not answer for {START_S:g} s; {self.tail()}")

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
            raise ReplicaError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
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
        ids = [int(one) for one in choice["token_ids"]]
        logprobs = [float(one["logprob"]) for one in (choice["logprobs"]["content"] if ids else [])]
        spans = _spans(choice)
        return turn_of(ids, logprobs, spans, choice["finish_reason"])

    async def score(self, ids: list[int], adapter: Adapter | None) -> list[float]:
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "logprobs": 0, "detokenize": False}
        answer = await self._generate({"token_ids": ids, "sampling_params": params} | _model(adapter))
        given = answer.get("prompt_logprobs")
        for choice in answer["choices"]:
            _spans(choice)
        if given is None:
            raise ReplicaError(f"{self} scored nothing")
        return [float(one[str(token)]["logprob"]) for token, one in zip(ids[1:], given[1:], strict=True)]

    async def _generate(self, body: dict[str, Any]) -> Any:
        return await self.call("POST", "/inference/v1/generate", timeout=None, json=body)

    async def pause(self) -> None:
        await self.call("POST", "/pause", params={"mode": "keep", "clear_cache": "true"})

    async def reload(self, folder: Path) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.call("POST", "/collective_rpc", timeout=START_S, json=body)

    async def label(self, version: int) -> None:
        await self.call("POST", "/update_weight_version", json={"new_version": str(version)})

    async def resume(self) -> None:
        await self.call("POST", "/resume")

    async def version(self) -> str:
        return str((await self.call("GET", "/weight_info", timeout=10.0))["weight_version"])

    async def adapt(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        try:
            await self._asked("POST", ADAPT, timeout=START_S, json=body)
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
        return {str(one["id"]) for one in (await self.call("GET", "/v1/models"))["data"]}

    async def receiver(self) -> Receiver:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        url = httpx.URL(self.url)
        with socket.create_connection((url.host, url.port or 80), timeout=10) as seen:
            address = str(seen.getsockname()[0])
        ranks = int((await self.call("GET", "/get_world_size"))["world_size"])
        return Receiver(HTTPVLLMWeightSyncClient(self.url, START_S), ranks, address)

    async def healthy(self) -> bool:
        try:
            await self.call("GET", "/health", timeout=5.0)
        except ReplicaError:
            return False
        return True

    async def stop(self) -> None:
        await asyncio.to_thread(self._end)
        self.state = "dead"
        await asyncio.gather(*(client.aclose() for client in self.clients))

    def _end(self) -> None:
        """End the process and all of its group: those that it started may outlive it."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:]) if self.log else ""


def _model(adapter: Adapter | None) -> dict[str, str]:
    """How a request names an adapter; without one it is for the model itself."""
    return {} if adapter is None else {"model": adapter.name}


def _spans(choice: dict[str, Any]) -> list[Span]:
    return [span_of(one["version"], one["start"], one["end"]) for one in choice["weight_versions"] or []]


def start_process(python: str, model: Path, port: int, log: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """A vLLM server of the environment of ``python``, on loopback: its control routes have no key. It ends with the
    thread that calls this, also if the process of that is killed (on Linux)."""
    tied = ["-c", TIED, str(os.getpid())] if sys.platform == "linux" else []
    command = [
        python, *tied, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--scheduling-policy", "priority", "--disable-uvicorn-access-log", *options,
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"} | kept
    env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if "--enable-lora" in options else {}
    env |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if transfer_option("ipc")[1] in options else {}
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    # A process group, so that Ctrl-C does not reach it; no session. Linux shares its cores between sessions
    # ("autogroup"), and one that computes all the time can keep a thread of this process waiting for seconds.
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent,
            process_group=0,
        )  # fmt: skip


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
