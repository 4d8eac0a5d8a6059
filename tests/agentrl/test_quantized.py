"""Frozen weights in 4 bits: what is sampled, saved and gone on from is the model that is trained."""

import asyncio
import copy
from pathlib import Path

import pytest
import torch
from small_models import random_rows, small_model

from agentrl.algorithms.grpo import GRPO
from agentrl.engines.base import Weights
from agentrl.engines.configs import EmbeddedConfig
from agentrl.engines.quantized import is_quantized, quantize, restore, state_of, whole
from agentrl.engines.weights import tensors_of
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.pipelines.stages.online_config import OnlineConfig
from agentrl.pipelines.stages.train import SFTConfig
from agentrl.placement.memory import TrainingPlan, shape_of_config, training
from agentrl.training.export import export
from agentrl.training.lora import merge_lora
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.step import Trainer

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
QLORA = OptimizerConfig(lr=5e-3, micro_tokens=64, lora=LoRA(rank=4, alpha=8, quantize="nf4"))
IDS = torch.arange(5, 45)[None]


def small_policy(kind: str = "llama") -> Policy:
    return Policy(small_model(kind, seed=1, vocabulary=2000, inner=64), train_tokenizer(["some text"], 300), "small")


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(IDS).logits
    return result


def trained(policy: Policy, steps: int, path: Path | None = None) -> Trainer:
    trainer = Trainer(policy, GRPO(), QLORA, 4)
    for step in range(trainer.done, steps):
        trainer.step(TrainingRows.of(random_rows(6, seed=step)), 1.0)
    if path:
        trainer.save(path, {})
    return trainer


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_linear_layers_are_in_four_bits_and_are_cast_back_to_what_is_computed(kind: str) -> None:
    """Qwen's layers have biases, which stay as they are. A model that is loaded with the cast weights computes the
    same, and they are within the paper's bins: at most .15 of the largest value of each block away. Blocks are of 64,
    or of 32 where rows are shorter."""
    policy = small_policy(kind)
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    other = copy.deepcopy(policy.model)
    quantize(policy.model)
    quantize(policy.model)  # stays as it is
    frozen = {name for name, parameter in policy.model.named_parameters() if is_quantized(parameter)}
    assert {name.split(".")[-2] for name in frozen} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    for name, parameter in policy.model.named_parameters():
        if name in frozen:
            block = 32 if before[name].shape[1] % 64 else 64
            blocks, cast = before[name].view(-1, block), whole(parameter).view(-1, block)
            assert ((blocks - cast).abs() <= 0.16 * blocks.abs().amax(-1, keepdim=True)).all()
        else:
            assert parameter.equal(before[name])
    other.load_state_dict(state_of(policy.model))
    assert torch.allclose(logits(policy.model), logits(other), atol=1e-5)


def test_a_block_that_would_go_over_the_end_of_a_row_is_refused() -> None:
    policy = small_policy()
    policy.model.model.layers[0].mlp.down_proj = torch.nn.Linear(40, 32)
    with pytest.raises(ValueError, match=r"multiple of 32; model.layers.0.mlp.down_proj has 40; leave quantize out"):
        quantize(policy.model)


def test_what_is_saved_is_what_was_trained(tmp_path: Path) -> None:
    policy = small_policy()
    start = copy.deepcopy(policy)
    trainer = trained(policy, 2)
    expected = logits(policy.model)
    assert not torch.allclose(expected, logits(start.model), atol=1e-2), "rounded, and trained"
    export(policy, trainer.backend, tmp_path / "exported")
    bare = tensors_of(policy.model)
    merge_lora(policy)
    assert not any(is_quantized(parameter) for parameter in policy.model.parameters())
    policy.save(tmp_path / "merged")
    for name in ("exported", "merged"):
        loaded = Policy.load(tmp_path / name)
        assert torch.allclose(logits(loaded.model), expected, atol=1e-4), name
    assert {name: tensor.shape for name, tensor in bare.items() if name != "lm_head.weight"} == {
        name: tensor.shape for name, tensor in start.model.state_dict().items() if name != "lm_head.weight"
    }, "a server is given the base as an ordinary model"


def test_a_checkpoint_has_no_frozen_weight_and_training_goes_on_exactly(tmp_path: Path) -> None:
    whole_run = trained(small_policy(), 4)
    trained(small_policy(), 2, tmp_path / "checkpoint.pt")
    again = Trainer(small_policy(), GRPO(), QLORA, 4)
    assert again.load(tmp_path / "checkpoint.pt") is not None
    for step in (2, 3):
        again.step(TrainingRows.of(random_rows(6, seed=step)), 1.0)
    for name, value in state_of(whole_run.policy.model).items():
        assert state_of(again.policy.model)[name].equal(value), name
    weights = sum(parameter.numel() for parameter in again.policy.model.parameters() if is_quantized(parameter))
    assert weights
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert not any(name.endswith("base_layer.weight") or ".absmax" in name for name in state)
    state["model.other"] = state.pop("model.norm.weight")
    with pytest.raises(RuntimeError, match=r"^2 tensors .* alone, such as \['model.norm.weight', 'model.other'\]"):
        restore(again.policy.model, state)


def test_an_engine_samples_from_what_is_trained() -> None:
    policy = small_policy()
    Trainer(policy, GRPO(), QLORA, 4)
    engine = EmbeddedConfig().build(Policy(copy.deepcopy(policy.model), policy.tokenizer, "sampler"))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter += 0.05

    async def load_and_score() -> list[float]:
        await engine.load(Weights(1, policy.model))
        return await engine.score(IDS[0].tolist())

    scores = asyncio.run(load_and_score())
    wanted = logits(policy.model)[0, :-1].log_softmax(-1).gather(-1, IDS[0, 1:, None])[:, 0]
    assert scores == pytest.approx(wanted.tolist(), abs=1e-4)


def test_the_plan_counts_what_weights_in_four_bits_take() -> None:
    """All but scales, which small layers have more of: blocks of 256 scales are not full."""
    model = small_model("llama", inner=64)
    policy, shape = Policy(model, train_tokenizer(["some text"], 300), "small"), shape_of_config(model.config)
    Trainer(policy, GRPO(), QLORA, 1)
    held = 0
    for parameter in policy.model.parameters():
        held += parameter.nbytes
        if is_quantized(parameter):
            held += parameter.quant_state.absmax.nbytes + parameter.quant_state.state2.absmax.nbytes
    planned = training(shape, TrainingPlan(tokens=64, lora_rank=4, quantized=True)).parts["weights"]
    assert planned == pytest.approx(held, rel=0.02)
    assert planned < 0.7 * training(shape, TrainingPlan(tokens=64, lora_rank=4)).parts["weights"]


def test_what_cannot_be_is_refused_when_it_is_loaded() -> None:
    lora = {"lora": {"quantize": "nf4"}}
    with pytest.raises(ValueError, match=r"lora.quantize: nf4 is for one process, and deepspeed starts ranks"):
        SFTConfig(steps=1, optimizer=lora, deepspeed={"zero": 2})
    with pytest.raises(ValueError, match=r"algorithm ppo trains a critic, .*leave quantize out"):
        OnlineConfig(iterations=1, optimizer=lora, algorithm={"type": "ppo"})
    with pytest.raises(ValueError, match="quantize"):
        SFTConfig(steps=1, optimizer={"lora": {"quantize": "int8"}})
    bare = small_model("llama")
    bare.model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match=r"finds no linear layer"):
        quantize(bare)
