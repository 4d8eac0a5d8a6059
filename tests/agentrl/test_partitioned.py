"""Models of which each rank holds a part (ZeRO 3): loading, saving, and the memory of a rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import random_rows, small_model

from agentrl.algorithms.sft import SFT
from agentrl.engines import weights
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.training.backend import OneProcess
from agentrl.training.export import export
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.lora import add_lora, merge_lora
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows, write_rows

STILL = OptimizerConfig(lr=1e-12, micro_tokens=64)
"""Steps that change nothing that can be seen."""


def job_in(folder: Path, model: Any, zero: Any = 3, **changes: Any) -> TrainingJob:
    folder.mkdir()
    Policy(model, train_tokenizer(["some text"], 300), "model").save(folder / "start")
    write_rows(folder / "rows.arrow", TrainingRows.of(random_rows(4)).batches)
    settings = {"optimizer": STILL, "steps": 1, "batch": 4, "seed": 0} | changes
    return TrainingJob(objective=SFT(), deepspeed=DeepSpeed(zero=zero, processes=2), **settings)


def experts() -> Any:
    """A family whose files have other tensors than its model: experts one by one, and all in one."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_experts=4,
        shared_expert_intermediate_size=16, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama in bfloat16", "experts"])
def test_what_was_loaded_in_parts_is_saved_as_it_was(family: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    model = experts() if family == "experts" else small_model("llama", seed=3).to(torch.bfloat16)
    folder = tmp_path / "job"
    job = job_in(folder, model)
    if family == "experts":
        with pytest.warns(UserWarning, match="the first process reads all of .*: its files have no model.layers.0.mlp"):
            launch(job.deepspeed, job.write(folder), lambda _: None)
    else:
        launch(job.deepspeed, job.write(folder), lambda _: None)
    before, after = (Policy.load(folder / name).model for name in ("start", "model"))
    assert after.dtype == torch.float32
    assert after.config.architectures == before.config.architectures
    for name, value in before.state_dict().items():
        assert after.state_dict()[name].numpy() == pytest.approx(value.float().numpy(), abs=1e-6), name


def test_adapters_are_folded_into_files_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the policy changes meanwhile."""
    pytest.importorskip("peft")
    policy = Policy(small_model("llama"), train_tokenizer(["some text"], 300), "model")
    add_lora(policy, LoRA(rank=4, alpha=8), 0)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    monkeypatch.setattr(weights, "SHARD_BYTES", 10_000)
    export(policy, OneProcess(policy.model), tmp_path / "model")
    assert all(torch.equal(policy.model.state_dict()[name], value) for name, value in before.items())
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert set(
        json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"].values()
    ) == set(files)
    assert max((tmp_path / "model" / name).stat().st_size for name in files) < 20_000
    merge_lora(policy)
    result = Policy.load(tmp_path / "model").model.state_dict()
    assert result.keys() == policy.model.state_dict().keys()
    for name, value in policy.model.state_dict().items():
        torch.testing.assert_close(result[name], value)


@pytest.mark.slow
def test_a_rank_holds_its_share_of_300_million_parameters(tmp_path: Path) -> None:
    """Weights, gradients and moments of Adam are 16 bytes for each parameter: 4.5 GiB in one process. No rank may ever
    hold all weights either, when they are loaded or saved."""
    pytest.importorskip("deepspeed")
    from benchmarks.online_memory import peaks

    result = peaks(tmp_path)
    assert result.alone > 4.1
    print(result)
    assert result.rank < 0.72 * result.alone, result
