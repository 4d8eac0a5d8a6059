"""What training holds on a CUDA device, against what `agentrl plan` says that it needs.

For each setting a model made from a config trains two steps in which every micro batch is full. A line has the peak of
its tensors, what the device holds beyond them (CUDA's context, kernels, what the allocator cannot use), and whether
both together are within a tenth of the plan. Nothing else may use the device meanwhile.

    python benchmarks/gpu_memory.py
    SCALE=small ...                          # a tiny model, on any machine: tries the script out
    CHECK=1 ...                              # exit code 1 if a target is missed
"""

import gc
import os
import sys
import warnings
from dataclasses import dataclass

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from agentrl.algorithms.sft import SFT
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.placement.memory import GIB, TrainingPlan, shape_of_config, training
from agentrl.schemas.training import TrainingRow
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer

SMALL = os.environ.get("SCALE") == "small"
WITHIN = 0.10
"""Of the plan, above and below."""

SIZES = {"0.5 B": (896, 4864, 24, 14, 2), "1.5 B": (1536, 8960, 28, 12, 2)}
"""Width, inner width, layers, heads and key heads of Qwen2.5."""


@dataclass(frozen=True)
class Setting:
    name: str
    tokens: int
    length: int
    bfloat16: bool = False
    checkpointing: bool = False
    rank: int | None = None

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(
            micro_tokens=self.tokens,
            precision="bfloat16" if self.bfloat16 else "float32",
            gradient_checkpointing=self.checkpointing,
            lora=LoRA(rank=self.rank) if self.rank else None,
        )


SETTINGS = [
    Setting("all weights, float32", 4096, 512),
    Setting("all weights, bfloat16", 4096, 512, bfloat16=True),
    Setting("all weights, bfloat16, checkpointing", 16384, 2048, bfloat16=True, checkpointing=True),
    Setting("adapters of rank 16, bfloat16", 4096, 512, bfloat16=True, rank=16),
    Setting("adapters of rank 16, bfloat16, checkpointing", 16384, 2048, bfloat16=True, checkpointing=True, rank=16),
    Setting("all weights, bfloat16, checkpointing, one row", 16384, 16384, bfloat16=True, checkpointing=True),
]


def config_of(size: str) -> Qwen2Config:
    width, inner, layers, heads, keys = (48, 96, 2, 4, 2) if SMALL else SIZES[size]
    return Qwen2Config(
        vocab_size=512 if SMALL else 151_936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


def full(tokens: int, length: int, vocabulary: int) -> TrainingRows:
    """Rows of ``length`` random tokens that fill two micro batches and begin differently."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (2 * tokens // length, length), generator=generator).tolist()
    mask = [False] + [True] * (length - 1)
    return TrainingRows.of(
        [
            TrainingRow(row_id=f"r{number}", unit=number, input_ids=row, mask=mask, weights=[1.0] * length)
            for number, row in enumerate(ids)
        ]
    )


def peak(size: str, setting: Setting) -> tuple[float, float]:
    """GiB of tensors at the peak of two steps, and of what the allocator took from the device."""
    config = config_of(size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    policy = Policy(model, train_tokenizer(["some text"], 300), "model")
    trainer = Trainer(policy, SFT(), setting.optimizer, 10)
    scale = 64 if SMALL else 1
    rows = full(setting.tokens // scale, setting.length // scale, config.vocab_size)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        trainer.step(rows)
    if device == "cpu":
        return 0.0, 0.0
    return torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB


def within(size: str, setting: Setting) -> bool:
    """Print a line: whether the plan holds. True where nothing can be measured."""
    shape = shape_of_config(config_of(size))
    plan = TrainingPlan(
        setting.tokens, bfloat16=setting.bfloat16, checkpointing=setting.checkpointing, lora_rank=setting.rank
    )
    planned = training(shape, plan).total / GIB
    held, reserved = peak(size, setting)
    gc.collect()
    text = f"{size}, {setting.name}, {setting.tokens:,} tokens in rows of {setting.length:,}"
    if not torch.cuda.is_available():
        print(f"{text}: ran; no CUDA device, so nothing was measured", flush=True)
        return True
    free, whole = torch.cuda.mem_get_info()
    beyond = reserved - held + (whole - free - torch.cuda.memory_reserved()) / GIB
    torch.cuda.empty_cache()
    met = abs((held + beyond) / planned - 1) <= WITHIN
    figures = f"tensors {held:.2f} GiB and {beyond:.2f} beyond them, plan {planned:.2f}"
    print(f"{text}: {figures}  {'met' if met else 'MISSED'}", flush=True)
    return met


def main() -> int:
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    if not SMALL and not torch.cuda.is_available():
        print("no CUDA device here; SCALE=small tries the script out on any machine")
        return 1
    matches = [within(size, setting) for size in SIZES for setting in SETTINGS]
    return int(os.environ.get("CHECK") == "1" and not all(matches))


if __name__ == "__main__":
    sys.exit(main())
