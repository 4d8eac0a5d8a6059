"""Settings that every optimiser step has, independent of the loss."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.schemas.annotations import ADDED

if TYPE_CHECKING:
    import torch


class LoRA(BaseModel):
    """Low-rank adapters (Hu et al. 2021) through PEFT, over weights that may be in 4 bits (Dettmers et al. 2023). They
    are merged into the weights when the model is saved."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1, description="inner width of an adapter")
    alpha: int = Field(32, ge=1, description="adapters are scaled by alpha / rank")
    targets: str | list[str] = Field("all-linear", description="names of modules, or all-linear")
    quantize: Annotated[Literal["nf4"] | None, ADDED] = Field(
        None,
        description="nf4: weights of linear layers are frozen in 4 bits (QLoRA), and sampled, scored and saved as such",
    )


class OptimizerConfig(BaseModel):
    """AdamW with warm-up, a schedule to zero or none, and clipping."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(1e-5, gt=0, description="learning rate, the highest of the schedule")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate after the warm-up; linear and cosine end at 0"
    )
    warmup: int = Field(0, ge=0, description="optimiser steps over which the learning rate rises to lr")
    betas: tuple[float, float] = Field((0.9, 0.999), description="decay of AdamW's two running means, per step")
    weight_decay: float = Field(0.0, ge=0, description="of matrices; norms and biases are spared")
    clip_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")
    micro_tokens: int = Field(4096, ge=1, description="padded tokens in one forward pass; bounds memory, not results")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of matrix products, through autocast; weights are trained and saved in float32"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass: less memory")
    lora: LoRA | None = Field(None, description="train low-rank adapters alone; null: all weights")

    @property
    def quantized(self) -> bool:
        """Whether frozen weights are in 4 bits."""
        return bool(self.lora and self.lora.quantize)

    def lr_at(self, step: int, total: int) -> float:
        """Learning rate of optimiser step ``step`` of ``total``, both counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, total - self.warmup)
        scale = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}[self.schedule]
        return self.lr * scale


def parameter_groups(model: "torch.nn.Module", weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as groups of an optimiser: matrices with ``weight_decay``; vectors, which are norms and
    biases, without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {
        parameter for parameter in trained if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2
    }  # also if it is in parts
    groups = [
        {"params": [parameter for parameter in trained if parameter in matrices], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter not in matrices], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
