"""Estimates of memory, against what models really take: counts of parameters, tensors that a pass keeps, caches, and
the peak of a process that trains."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shapes import LLAMA_8B, LLAMA_70B, QWEN_7B, model_folder, shape_of
from small_models import small_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.placement.memory import (
    GIB,
    ModelShape,
    TrainingPlan,
    activations,
    kv_bytes,
    sampled,
    serving,
    shape_of_config,
    training,
)
from agentrl.training.logprobs import token_logprobs
from agentrl.training.optimizer import LoRA
from agentrl.training.packing import pack, packed

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"), [(QWEN_7B, 7_615_616_512), (LLAMA_8B, 8_030_261_248), (LLAMA_70B, 70_553_706_496)]
)
def test_parameters_are_counted_from_the_config_alone(config: dict[str, Any], published: int, tmp_path: Path) -> None:
    """As the models' pages give them."""
    shape = shape_of(model_folder(tmp_path / "model", config))
    assert shape.parameters == published
    assert shape.item == 2
    assert shape.kv_token == 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_parameters_are_those_of_a_real_model_tied_or_not(kind: str) -> None:
    model = small_model(kind)
    shape = shape_of_config(model.config)
    assert shape.parameters * 4 == sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_adapters_are_those_that_peft_adds() -> None:
    pytest.importorskip("peft")
    from agentrl.models.policy import Policy
    from agentrl.training.lora import add_lora

    model = small_model("llama")
    before = sum(parameter.numel() for parameter in model.parameters())
    shape = shape_of_config(model.config)
    add_lora(Policy(model, None, "small"), LoRA(rank=3), seed=0)  # type: ignore[arg-type]
    assert shape.adapters(3) == sum(parameter.numel() for parameter in model.parameters()) - before


def test_a_model_without_a_config_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the memory of model .* cannot be estimated"):
        shape_of(tmp_path)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("kind", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_activations_are_what_a_pass_keeps(kind: Any, bfloat16: bool) -> None:
    """Distinct storages that autograd holds after a packed forward pass, without the weights themselves."""
    config = (LlamaConfig if kind is LlamaForCausalLM else Qwen3Config)(**SIZES, tie_word_embeddings=False)
    model = kind(config).train()
    ids = [list(range(start, start + 200)) for start in (1, 202)]
    mask = torch.ones(2, 200, dtype=torch.bool)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        packed(model),
        torch.autocast("cpu", torch.bfloat16, enabled=bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        held = token_logprobs(model, torch.tensor(ids), mask, pack(ids))
    estimate = activations(shape_of_config(config), TrainingPlan(tokens=400, bfloat16=bfloat16))
    logits = 4 * 400 * config.vocab_size  # the head keeps its softmax, since all of it is one chunk
    assert estimate == pytest.approx(sum(kept.values()) - logits, rel=0.25)
    del held


def test_keys_and_values_are_those_of_the_cache() -> None:
    model = small_model("llama")
    cache = DynamicCache(config=model.config)
    model(torch.ones(3, 50, dtype=torch.long), past_key_values=cache, use_cache=True)
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert taken == 3 * kv_bytes(shape_of_config(model.config), 1, 50, 4)


def big(path: Path) -> ModelShape:
    return shape_of(model_folder(path / "big", LLAMA_70B))


def test_states_are_split_by_stage_as_in_the_paper(tmp_path: Path) -> None:
    """Rajbhandari et al. 2020, figure 1, with 16 bytes for each parameter in float32; stages 1 and 2 keep a copy."""
    shape = big(tmp_path)
    states = {
        zero: sum(
            training(shape, TrainingPlan(tokens=1, zero=zero, ranks=64)).parts[name]
            for name in ("weights", "gradients", "optimizer")
        )
        / shape.parameters
        for zero in range(4)
    }
    assert states == {0: 16, 1: 8 + 12 / 64, 2: 4 + 16 / 64, 3: 16 / 64}


def test_adapters_offloading_and_checkpointing_take_what_they_should(tmp_path: Path) -> None:
    shape = big(tmp_path)
    plan = TrainingPlan(tokens=8192, zero=3, ranks=32, bfloat16=True)
    full = training(shape, plan)
    lora = training(shape, TrainingPlan(**{**vars(plan), "lora_rank": 16}))
    assert lora.parts["optimizer"] < full.parts["optimizer"] / 100
    assert lora.parts["weights"] == pytest.approx(full.parts["weights"], rel=0.02)
    away = training(shape, TrainingPlan(**{**vars(plan), "offload_optimizer": True}))
    assert (away.parts["optimizer"], away.parts["gradients"]) == (0, 0)
    assert away.host >= 12 * shape.parameters / 32
    again = training(shape, TrainingPlan(**{**vars(plan), "checkpointing": True}))
    assert again.parts["activations"] < full.parts["activations"] / 2


TRACED = [
    (LLAMA_8B, TrainingPlan(4096, bfloat16=True, checkpointing=True, zero=3, ranks=8), 25.1),
    (LLAMA_8B, TrainingPlan(4096, zero=3, ranks=8), 71.4),
    (LLAMA_70B, TrainingPlan(8192, bfloat16=True, checkpointing=True, lora_rank=16, zero=3, ranks=32), 47.1),
    (QWEN_7B, TrainingPlan(8192, bfloat16=True, checkpointing=True, zero=3, ranks=8), 25.9),
    (QWEN_7B, TrainingPlan(8192, bfloat16=True, checkpointing=True, zero=2, ranks=8), 57.9),
    (QWEN_7B, TrainingPlan(4096, bfloat16=True, zero=1, ranks=8), 112.6),
    (QWEN_7B, TrainingPlan(4096, bfloat16=True, checkpointing=True, lora_rank=16, zero=2, ranks=8), 32.2),
    (QWEN_7B, TrainingPlan(4096, bfloat16=True, lora_rank=16, ranks=8), 68.2),
    (QWEN_7B, TrainingPlan(4096, bfloat16=True, checkpointing=True), 128.6),
]
"""Peaks in GiB, without overhead, of what `plan --trace` runs: eight layers, and what two more add for each of the
others (two and four in one process). The last one is a process alone."""


@pytest.mark.parametrize(("config", "plan", "traced"), TRACED)
def test_a_process_needs_what_was_traced(
    config: dict[str, Any], plan: TrainingPlan, traced: float, tmp_path: Path
) -> None:
    """Casts of weights are not kept there: they would be 15 GiB more with 8 billion parameters, 131 with 70."""
    need = training(shape_of(model_folder(tmp_path / "model", config)), plan)
    assert (need.total - need.parts["overhead"]) / GIB == pytest.approx(traced, rel=0.15)


def test_copies_of_trained_weights_are_kept_where_weights_are_whole(tmp_path: Path) -> None:
    shape = big(tmp_path)
    plan = TrainingPlan(tokens=1, bfloat16=True, checkpointing=True, ranks=8)
    whole, sharded = (activations(shape, replace(plan, zero=zero)) for zero in (2, 3))
    assert whole - sharded == 2 * shape.parameters
    assert activations(shape, replace(plan, zero=2, lora_rank=8)) == sharded, "each layer casts again what is frozen"


def test_a_server_takes_its_share_of_the_gpu_and_at_least_one_row(tmp_path: Path) -> None:
    shape = big(tmp_path)
    whole = serving(shape, 8, 8192, 2, 80 * GIB)
    assert whole.total == pytest.approx(0.9 * 80 * GIB)
    alone = serving(shape, 1, 8192, 2, 80 * GIB)
    assert alone.total > 80 * GIB
    assert alone.parts["KV cache"] == kv_bytes(shape, 1, 8192, 2)


def test_an_embedded_engine_keeps_rounded_weights_beside_those_of_the_model(tmp_path: Path) -> None:
    shape = big(tmp_path)
    whole, rounded = (sampled(shape, 4, 1000, 4, bfloat16) for bfloat16 in (False, True))
    assert whole == {"KV cache": 4 * 4 * kv_bytes(shape, 1, 1000, 1)}
    assert rounded == {"KV cache": whole["KV cache"] / 2, "weights in bfloat16": 2 * shape.weights}


TRAINS = """
import json, resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from agentrl.algorithms.sft import SFT
from agentrl.models.policy import Policy
from agentrl.placement.memory import TrainingPlan, shape_of_config, training
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer
from agentrl.schemas.training import TrainingRow

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def rows(length):
    ids = list(range(length))
    one = dict(label=1, input_ids=ids, mask=[False] + [True] * (length - 1), weights=[1.0] * length)
    return TrainingRows.of([TrainingRow(row_id=f"r{n}", unit=n, **one) for n in range(2)])

def trainer(width, layers):
    config = LlamaConfig(vocab_size=4096, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                         num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024)
    model = LlamaForCausalLM(config)
    made = Trainer(Policy(model, None, "m"), SFT(), OptimizerConfig(micro_tokens=2048), 3)
    return made, shape_of_config(config)

small, _ = trainer(32, 1)
small.step(rows(16))  # imports, and what torch holds anyway
before = peak()
made, shape = trainer(768, 12)
for _ in range(3):
    made.step(rows(1000))
need = training(shape, TrainingPlan(tokens=1000))  # the rows are equal, and a packed pass computes them once
print(json.dumps({"parameters": shape.parameters, "grew": peak() - before, "said": need.total - need.parts["overhead"],
                  "parts": need.parts}))
"""


@pytest.mark.slow
def test_the_peak_of_a_process_that_trains_is_what_was_said() -> None:
    """About 90 million parameters on the CPU: weights, gradients, both moments and activations."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", TRAINS], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["parameters"] > 90e6
    assert printed["said"] == pytest.approx(printed["grew"], rel=0.15), printed
