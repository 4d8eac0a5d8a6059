"""A training job as files: a job file and an Arrow table of rows, into a model folder and a metrics table. The same
job runs in this process, or on many through DeepSpeed."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.algorithms import Algorithm
from agentrl.placement.limits import GatherLimits
from agentrl.schemas.annotations import ADDED
from agentrl.training.optimizer import OptimizerConfig


class DeepSpeed(BaseModel):
    """How a job is spread over processes (Rajbhandari et al. 2020). ``zero`` shards nothing (0), optimiser states (1),
    also gradients (2), or also parameters (3). ``sequence_parallel`` neighbouring ranks compute each micro batch
    together (:mod:`agentrl.training.sequence`), so that each holds the activations of its share of the tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    zero: Literal[0, 1, 2, 3] = Field(
        2, description="what ranks shard: nothing, optimiser states, gradients too, weights too"
    )
    processes: int | None = Field(
        None, ge=1, description="ranks on each machine; None: one for each GPU of the stage, or one if there is none"
    )
    sequence_parallel: int = Field(
        1, ge=1, description="ranks of one machine over which each row is split; it divides them and the model's heads"
    )
    offload_optimizer: Literal["cpu", "nvme"] | None = Field(None, description="where optimiser states are kept")
    offload_parameters: Literal["cpu", "nvme"] | None = Field(None, description="needs zero: 3")
    communication: Annotated[Literal["float32", "bfloat16"], ADDED] = Field(
        "float32",
        description="of weights of linear layers and their gradients between ranks; bfloat16 needs zero: 3 and "
        "precision: bfloat16, moves half the bytes, and changes results",
    )
    extra: dict[str, Any] = Field(
        {}, description="merged into the DeepSpeed config that these settings make, key by key"
    )

    @model_validator(mode="after")
    def _offloads_what_it_shards(self) -> "DeepSpeed":
        if self.offload_parameters and self.zero != 3:
            raise ValueError(f"offload_parameters needs zero: 3, not {self.zero}")
        return self

    @model_validator(mode="after")
    def _communicates_what_it_shards(self) -> "DeepSpeed":
        if self.communication == "bfloat16" and self.zero != 3:
            raise ValueError(f"communication: bfloat16 needs zero: 3, not {self.zero}; leave it out")
        return self

    @model_validator(mode="after")
    def _splits_rows_over_whole_groups(self) -> "DeepSpeed":
        if self.processes:
            self.ranks(0)
        return self

    def check(self, optimizer: OptimizerConfig) -> None:
        """Raises ValueError if products are in more bits than the weights that ranks exchange for them, or if weights
        are in 4 bits."""
        if optimizer.quantized:
            raise ValueError(
                "optimizer.lora.quantize: nf4 is for one process, and deepspeed starts ranks; leave one of both out "
                "(deepspeed: {zero: 3} divides frozen weights over ranks)"
            )
        if self.communication == "bfloat16" and optimizer.precision != "bfloat16":
            raise ValueError(
                f"deepspeed.communication: bfloat16 rounds weights before products in {optimizer.precision}; set "
                "optimizer.precision: bfloat16, or leave it out"
            )

    def ranks(self, gpus: int) -> int:
        """Ranks on a machine with ``gpus`` GPUs. Raises ValueError if they cannot share rows as they should."""
        number = self.processes or max(1, gpus)
        if number % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel: {self.sequence_parallel} does not divide the {number} ranks of a machine; take a "
                "divisor, or set processes, or execution.gpus, to a multiple of it"
            )
        return number

    def settings(self, optimizer: OptimizerConfig | None, limits: GatherLimits | None = None) -> dict[str, Any]:
        """The configuration that DeepSpeed reads. Batch sizes are nominal: the trainer decides what accumulates.
        Without an optimiser it is for a model that is only computed; without ``limits``, for one of any shape."""
        limits = limits or GatherLimits()
        zero: dict[str, Any] = {"stage": self.zero}
        if self.zero:
            zero["reduce_bucket_size"] = limits.reduced
        if self.zero == 3:
            zero |= {
                "stage3_max_live_parameters": limits.live,
                "stage3_max_reuse_distance": limits.reuse,
                "stage3_prefetch_bucket_size": limits.prefetched,
                "sub_group_size": _SUB_GROUP,
            }
        if self.offload_optimizer and optimizer:
            zero["offload_optimizer"] = {"device": self.offload_optimizer}
        if self.offload_parameters:
            zero["offload_param"] = {"device": self.offload_parameters}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        if self.communication == "bfloat16":
            config["torch_autocast"] = {
                "enabled": True,
                "dtype": "bfloat16",
                "lower_precision_safe_modules": ["torch.nn.Linear"],  # an embedding would be rounded, and no product is
            }
        if optimizer:
            config["gradient_clipping"] = optimizer.clip_norm
            adam = {"lr": optimizer.lr, "betas": list(optimizer.betas), "weight_decay": optimizer.weight_decay}
            config["optimizer"] = {"type": "AdamW", "params": {**adam, "torch_adam": True}}
        return _merged(config, self.extra)


_SUB_GROUP = 8_000_000
"""Elements of a rank's part that the optimiser updates at a time."""


def _merged(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """``extra`` over ``config``, also inside of mappings that both have."""
    both = {
        name: _merged(config[name], value)
        for name, value in extra.items()
        if isinstance(value, dict) and isinstance(config.get(name), dict)
    }
    return {**config, **extra, **both}


class TrainingJob(BaseModel):
    """The folder of its file holds what is read (``rows.arrow``, which every rank maps into memory, and ``start/``, the
    model, unless ``start`` names another folder or a model of the Hugging Face hub) and what is written (``model/``,
    ``metrics.parquet``, and ``checkpoints/`` meanwhile). ``made_by`` is the fingerprint of the tokenizer that the model
    must have, and the id of a row that it tokenised; None if that was compared before.

    A job whose batches arrive meanwhile, in online training, names the folder of its ``orders``
    (:mod:`agentrl.training.orders`) and the ``updates`` of an iteration, and has no ``rows.arrow``. With
    ``record_tokens`` it answers what updates saw of their tokens."""

    model_config = ConfigDict(extra="forbid")

    objective: Algorithm
    optimizer: OptimizerConfig
    deepspeed: DeepSpeed
    steps: int
    batch: int = 0
    seed: int
    checkpoint_every: int = 100
    start: str | None = None
    made_by: tuple[str, str] | None = None
    orders: str | None = None
    updates: int = 1
    record_tokens: bool = False

    @model_validator(mode="after")
    def _exchanges_what_it_computes(self) -> "TrainingJob":
        self.deepspeed.check(self.optimizer)
        return self

    def write(self, folder: Path) -> Path:
        path = folder / "job.json"
        path.write_text(self.model_dump_json(indent=2))
        return path
