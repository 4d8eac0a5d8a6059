"""Configs of generation engines, which pipeline files hold. None of them imports what it builds before ``build``."""

import os
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from agentrl.schemas.annotations import ADDED
from agentrl.schemas.installation import install_hint

if TYPE_CHECKING:
    from agentrl.engines.base import Engine
    from agentrl.engines.replicas import Replica
    from agentrl.engines.routes import RouteShape
    from agentrl.models.policy import Policy


_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM makes room for."""


class EngineConfig(BaseModel):
    """What an engine is made from. The fields of a class that is derived from this one are its settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    exact: ClassVar[bool] = True
    """Whether its turns have token ids and log-probabilities. It then samples from the model of the stage's input."""
    elsewhere: ClassVar[bool] = False
    """Whether it computes with weights of its own, and not with the model that it is given."""
    has_routes: ClassVar[bool] = False
    """Whether its turns can have the routes of a mixture of experts."""

    type: str
    _record_routes: bool = PrivateAttr(False)

    def with_routes(self) -> Self:
        """The same, whose engine records routes. Raises ValueError if it cannot."""
        if not self.has_routes:
            raise ValueError(f"engine.type: {self.type} does not return routes; transformers and vllm do")
        recording = self.model_copy()
        recording._record_routes = True
        return recording

    def _shape(self, policy: "Policy") -> "RouteShape | None":
        """What routes that are recorded look like, if some are. Raises ValueError if the model has none."""
        from agentrl.engines.routes import route_shape

        if not self._record_routes:
            return None
        if (shape := route_shape(policy.model)) is None:
            raise ValueError(
                f"{policy.name} ({policy.model.config.model_type}) has no routers of experts that are known here, so "
                "it has no routes to replay; leave routes out"
            )
        return shape

    @abstractmethod
    def build(self, policy: "Policy | None") -> "Engine":
        """The engine; ``policy`` is the model of the stage's input, if it has one."""


class EmbeddedConfig(EngineConfig):
    """The embedded engine, in the process of the stage."""

    has_routes: ClassVar[bool] = True

    type: Literal["transformers"] = "transformers"
    schedule: Literal["exact", "free"] = Field(
        "exact",
        description="exact: each step waits for all tools, and equal seeds give equal rows to the bit; free: no step "
        "waits, and the last bits of float32 sums depend on timing",
    )
    rows: int = Field(256, ge=1, description="rows in the cache at once; more are sampled one after the other")
    precision: Annotated[Literal["float32", "bfloat16"] | None, ADDED] = Field(
        None,
        description="of matrix products, through autocast if the model was saved in another one; None: as the stage "
        "trains the model, else as it was saved",
    )

    def build(self, policy: "Policy | None") -> "Engine":
        """The engine, with the policy's own model. Raises ModelMismatchError if sampling with its cache does not give
        the model's own log-probs."""
        from agentrl.engines.check import check_sampling
        from agentrl.engines.transformers import TransformersEngine

        if policy is None:
            raise ValueError("engine transformers samples from a model; wire inputs.model")
        if self.precision and str(policy.model.dtype) != f"torch.{self.precision}":
            policy.prepare(self.precision)
        check_sampling(policy)
        shape = self._shape(policy)
        engine = TransformersEngine(policy.model, self.rows, self.schedule, policy.autocast, shape)
        engine.version = policy.version
        return engine


class VLLMConfig(EngineConfig):
    """vLLM: servers that the stage starts or that a URL names, or in the process of the stage."""

    elsewhere: ClassVar[bool] = True
    has_routes: ClassVar[bool] = True

    type: Literal["vllm"] = "vllm"
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of the model, if the stage starts vLLM")
    context: int | None = Field(None, ge=1, description="tokens, if the stage starts vLLM; None: the model's")
    tolerance: float | None = Field(
        None,
        gt=0,
        description="mean difference of log-probs from transformers' that is allowed; None: 1e-3, or four times what "
        "rounding to bfloat16 costs the model if dtype is not float32",
    )
    sync: Literal["folders", "delta", "nccl", "ipc"] = Field(
        "folders",
        description="how weights come to vLLM: as folders, as what changed (delta), or by vLLM's own transfer between "
        "GPUs (nccl) or on one (ipc), which needs vLLM where the stage runs; adapters are folders",
    )
    in_process: bool = Field(False, description="no server: vLLM is installed where the stage runs")
    urls: list[str] = Field([], description="servers that run already; without any the stage starts some")
    servers: int = Field(1, ge=1, description="how many to start")
    tensor_parallel: int = Field(1, ge=1, description="GPUs of each server, over which its model is split")
    python: str = Field("python", description="interpreter of an environment that has vLLM")
    folder: str | None = Field(
        None, description="where folders of weights go, readable for servers; None: the stage's own"
    )

    @model_validator(mode="after")
    def _of_one_dtype(self) -> "VLLMConfig":
        if self.sync == "delta" and self.dtype == "auto":
            raise ValueError(
                "sync: delta compares weights in the dtype of the servers; name it by dtype: bfloat16 (in float32 each "
                "step changes nearly all weights)"
            )
        return self

    @model_validator(mode="after")
    def _in_one_place(self) -> "VLLMConfig":
        given = [name for name in ("urls", "servers", "python") if name in self.model_fields_set]
        if self.in_process and given:
            raise ValueError(
                f"in_process starts no server, so {', '.join(given)} would do nothing; leave one of them out"
            )
        return self

    def build(self, policy: "Policy | None") -> "Engine":
        """The engine, when vLLM answers. Raises EngineError if it does not start, and ValueError if a package is
        missing."""
        import torch

        from agentrl.engines.replicas import EXTENSION, ROUTES, WORKER
        from agentrl.engines.transfer import check_transfer, transfer_option
        from agentrl.engines.vllm import VLLMEngine
        from agentrl.engines.weights import adapter_rank, adapter_targets, has_experts
        from agentrl.placement.launcher import here

        if policy is None:
            raise ValueError("engine vllm samples from a model; wire inputs.model")
        options = ["--dtype", self.dtype, *(["--max-model-len", str(self.context)] if self.context else [])]
        options += ["--tensor-parallel-size", str(self.tensor_parallel)] if self.tensor_parallel > 1 else []
        on_cpu = not (torch.cuda.is_available() or (not self.in_process and here().gpus))
        if on_cpu:
            # a part of a prompt, with a seed, ends vLLM 0.32 on a CPU: its generators there have no offset to set back
            options += ["--enforce-eager", "--no-enable-chunked-prefill"]
            # its blocks there are of 128 tokens otherwise, and a block that is not full is computed again in each turn
            options += ["--block-size", "32", "--max-num-seqs", "256"]
        if self.sync == "delta" or (on_cpu and has_experts(policy.model)):
            module = "agentrl.engines.worker" if self.in_process else WORKER
            options += [EXTENSION, f"{module}.extension.Extension"]

        shape = self._shape(policy)
        options += [ROUTES] if shape else []
        if self.sync in ("nccl", "ipc"):
            check_transfer(self.sync)
            options += transfer_option(self.sync)
        if rank := adapter_rank(policy.model):
            room = next(
                (supported for supported in _VLLM_RANKS if supported >= rank), rank
            )  # vLLM says it if a rank is too large
            # two at once: turns under way go on with the one that they began with
            options += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", "2", "--max-cpu-loras", "4"]
            # or else the output layer is adapted too, and vLLM 0.32 ends if it scores a prompt beside other requests
            options += ["--lora-target-modules", *adapter_targets(policy.model)]
        replicas = self._in_process(options) if self.in_process else self._servers(options)
        folder = Path(self.folder).expanduser() if self.folder else None
        dtype = None if self.dtype == "auto" else self.dtype
        return VLLMEngine(policy, replicas, folder, self.tolerance, self.sync, dtype, shape)

    def _in_process(self, options: list[str]) -> "list[Replica]":
        from agentrl.engines.in_process import InProcess

        return [InProcess(options)]

    def _servers(self, options: list[str]) -> "list[Replica]":
        try:
            from agentrl.engines.servers import Server
            from agentrl.placement.launcher import here
        except ImportError as error:
            raise ValueError(f"engine vllm needs {error.name}; {install_hint('vllm')}") from None
        if self.urls:
            return [Server(url.rstrip("/")) for url in self.urls]
        gpus = self.tensor_parallel if here().gpus else 0
        return [Server(python=self.python, options=options, gpus=gpus) for _ in range(self.servers)]


class OpenAIConfig(EngineConfig):
    """An OpenAI-compatible endpoint. Its rows are text, without token ids."""

    exact: ClassVar[bool] = False

    type: Literal["openai"] = "openai"
    model: str = Field(description="the endpoint's name for it")
    base_url: str = Field("https://api.openai.com/v1", description="where the endpoint is")
    api_key: Annotated[Annotated[str, Field(pattern=r"^\$\{\w+\}$")] | None, "secret"] = Field(
        "${OPENAI_API_KEY}", description="${NAME} of an environment variable; null for a server that asks for none"
    )
    concurrency: int = Field(32, ge=1, description="requests at once")
    requests_per_minute: int | None = Field(None, ge=1, description="sent one after the other, at equal distances")
    timeout_s: float = Field(120.0, gt=0, description="seconds of one request")
    retries: int = Field(6, ge=0, description="how often a request that failed for a passing reason is sent again")
    price_prompt: float = Field(0.0, ge=0, description="US dollars for a million prompt tokens")
    price_completion: float = Field(0.0, ge=0, description="US dollars for a million sampled tokens")
    max_cost: float | None = Field(
        None, gt=0, description="no request is sent once this is spent; what is under way then still costs"
    )
    cache: str | None = Field(None, description="a file that keeps replies by the content of their request")

    @model_validator(mode="after")
    def _has_prices(self) -> "OpenAIConfig":
        if self.max_cost is not None and not self.price_prompt + self.price_completion:
            raise ValueError("max_cost needs price_prompt and price_completion, the prices of a million tokens")
        return self

    def build(self, policy: "Policy | None") -> "Engine":
        """The engine. Raises LookupError if the key's variable is not set, and ValueError if a package is missing."""
        try:
            from agentrl.engines.openai import OpenAIEngine
        except ImportError as error:
            raise ValueError(f"engine openai needs {error.name}; {install_hint('openai')}") from None
        if self.api_key is None:
            return OpenAIEngine(self, "none")
        name = self.api_key[2:-1]
        if name not in os.environ:
            raise LookupError(
                f"environment variable {name} is not set; export it, name another in engine.api_key, or set it to null "
                "for a server that asks for none"
            )
        return OpenAIEngine(self, os.environ[name])


DEFAULT_ENGINE = EmbeddedConfig()
