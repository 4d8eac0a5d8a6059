"""vLLM servers: one is a URL, and a process if we started it."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from agentrl.engines.base import EngineError

State = Literal["starting", "stale", "serving", "suspect", "dead"]
"""``serving`` needs health, the version of the engine, and a probe that the weights passed. ``stale`` answers, with
weights of another version."""

STOP_S = 10.0
TAIL = 30
NEEDED = {
    "/inference/v1/generate": "start it with --enable-scale-out",
    "/pause": "start it with VLLM_SERVER_DEV_MODE=1",
    "/collective_rpc": "start it with VLLM_SERVER_DEV_MODE=1",
    "/update_weight_version": "start it with VLLM_SERVER_DEV_MODE=1",
}
"""Routes that the engine calls, and what a server that lacks them needs."""


class ServerError(EngineError):
    """A server answered that it failed, or did not answer."""


@dataclass(eq=False)
class Server:
    """``load`` counts the tokens of requests under way. ``process`` is None for a server that somebody else runs."""

    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    state: State = "starting"
    load: int = 0
    restarts: int = 0
    client: httpx.AsyncClient = field(
        default_factory=lambda: httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=256))
    )

    async def call(self, method: str, path: str, timeout: float | None = 60.0, **request: Any) -> Any:
        """The JSON that a route answers, or None. Raises ServerError if it fails or does not answer in time."""
        try:
            answer = await self.client.request(method, self.url + path, timeout=timeout, **request)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}{path}: {error or type(error).__name__}") from error
        if answer.status_code != 200:
            raise ServerError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}")
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise ServerError(f"{self.url}{path} answered what is not JSON: {answer.text[:100]!r}") from error

    async def healthy(self) -> bool:
        try:
            await self.call("GET", "/health", timeout=5.0)
        except ServerError:
            return False
        return True

    async def version(self) -> str:
        """The label of its weights. Raises ServerError."""
        return str((await self.call("GET", "/weight_info", timeout=10.0))["weight_version"])

    async def check_routes(self) -> int:
        """The length of its context. Raises EngineError that says how to start a server that lacks something."""
        paths = (await self.call("GET", "/openapi.json"))["paths"]
        for path, remedy in NEEDED.items():
            if path not in paths:
                raise EngineError(f"the vLLM server {self.url} has no {path}; {remedy}")
        return int((await self.call("GET", "/v1/models"))["data"][0]["max_model_len"])

    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:]) if self.log else ""

    def stop(self) -> None:
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


def start_process(python: str, model: Path, port: int, log: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """A vLLM server of the environment of ``python``, on loopback: its control routes have no key."""
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--enable-scale-out", "--logprobs-mode", "processed_logprobs",
        "--scheduling-policy", "priority", *options,
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"} | kept
    env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent, start_new_session=True
        )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def until_healthy(server: Server, seconds: float) -> None:
    """Wait for a server. Raises EngineError with the end of its log if its process ends or the time does."""
    for _ in range(max(1, int(seconds / 0.5))):
        if await server.healthy():
            return
        if not server.alive():
            raise EngineError(f"the vLLM server {server.url} ended while it started; its log ends:\n{server.tail()}")
        await asyncio.sleep(0.5)
    raise EngineError(f"the vLLM server {server.url} did not answer for {seconds:g} s; {server.tail()}")
