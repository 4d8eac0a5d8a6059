"""Models saved in bfloat16 learn as those saved in float32, and every pass over a model sees the same one."""

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import VOCABULARY, random_rows, small_model, small_policy

from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.algorithms.sft import SFT
from agentrl.engines.configs import EmbeddedConfig
from agentrl.models.policy import Policy, processor_has_bfloat16
from agentrl.models.tiny import train_tokenizer
from agentrl.schemas.training import TrainingRow
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows, write_rows
from agentrl.training.scoring import batch_logprobs, reference_logprobs
from agentrl.training.step import Trainer

BF16 = OptimizerConfig(precision="bfloat16")


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in bfloat16 here too if the processor rounds for them."""
    monkeypatch.setattr("agentrl.models.policy.processor_has_bfloat16", lambda: True)


def weighted_rows(number: int, pairs: bool = False) -> list[TrainingRow]:
    rows = random_rows(number, pairs=pairs)
    return [row.model_copy(update={"weights": [1.0] * len(row.input_ids)}) for row in rows]


def saved(folder: Path, dtype: torch.dtype) -> Path:
    """A model whose weights are numbers that bfloat16 holds, saved in ``dtype``: all copies begin alike."""
    model = small_model(seed=1).to(torch.bfloat16).to(dtype)
    Policy(model, train_tokenizer(["some text"], 300), "small").save(folder)
    return folder


def gain(start: Path, config: OptimizerConfig, steps: int) -> tuple[float, Policy]:
    """By how much training on one batch lowers its loss, measured in float32."""
    rows = weighted_rows(6)
    policy = Policy.load(start)
    assert policy.model.dtype == (torch.bfloat16 if start.name == "bfloat16" else torch.float32)
    trainer = Trainer(policy, SFT(), config, steps)
    first = trainer.step(TrainingRows.of(rows))["loss"]
    for _ in range(steps - 1):
        last = trainer.step(TrainingRows.of(rows))["loss"]
    return first - last, policy


@pytest.mark.parametrize("lr", [1e-6, 1e-5])
def test_a_model_saved_in_bfloat16_learns_as_one_saved_in_float32(lr: float, tmp_path: Path) -> None:
    config = OptimizerConfig(lr=lr)
    expected, _ = gain(saved(tmp_path / "float32", torch.float32), config, 30)
    result, policy = gain(saved(tmp_path / "bfloat16", torch.bfloat16), config, 30)
    assert expected > 0
    assert result == pytest.approx(expected, rel=1e-3)
    policy.save(tmp_path / "trained")
    assert Policy.load(tmp_path / "trained").model.dtype == torch.float32  # rounding would undo small steps


def test_autocast_learns_as_float32_does(tmp_path: Path) -> None:
    start = saved(tmp_path / "bfloat16", torch.bfloat16)
    expected, exact = gain(start, OptimizerConfig(lr=1e-4), 30)
    result, rounded = gain(start, BF16.model_copy(update={"lr": 1e-4}), 30)
    assert rounded.model.dtype == torch.float32
    assert result == pytest.approx(expected, rel=0.1)
    assert any(
        not torch.equal(*pair) for pair in zip(exact.model.parameters(), rounded.model.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_model_saved_in_bfloat16_learns_on_two_ranks(zero: Any, precision: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    optimizer = OptimizerConfig(lr=1e-5, precision=precision, micro_tokens=64)
    rows, losses = weighted_rows(8), {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        saved(folder / "start", dtype)
        write_rows(folder / "rows.arrow", TrainingRows.of(rows).batches)
        job = TrainingJob(
            objective=SFT(), optimizer=optimizer, deepspeed=DeepSpeed(zero=zero, processes=2), steps=12, batch=8, seed=0
        )
        losses[dtype] = [report["loss"] for report in launch(job.deepspeed, job.write(folder), lambda _: None)]
        assert Policy.load(folder / "model").model.dtype == torch.float32
    alone = Trainer(Policy.load(folder / "start"), SFT(), optimizer, 12)
    expected = [alone.step(batch)["loss"] for batch in [TrainingRows.of(rows)] * 12]
    noise = 1e-4 if precision == "float32" else 3e-3
    assert losses[torch.bfloat16] == pytest.approx(losses[torch.float32], abs=noise)
    assert losses[torch.bfloat16] == pytest.approx(expected, abs=noise)
    assert losses[torch.bfloat16][0] - losses[torch.bfloat16][-1] == pytest.approx(expected[0] - expected[-1], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_steps_of_a_millionth_are_not_lost_on_two_ranks(precision: Any, tmp_path: Path) -> None:
    """Measured in float32 before and after: products in bfloat16 do not show what so small steps change."""
    pytest.importorskip("deepspeed")
    optimizer = OptimizerConfig(lr=1e-6, precision=precision, micro_tokens=64)
    rows = weighted_rows(8)
    gains = {}
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        saved(folder / "start", dtype)
        write_rows(folder / "rows.arrow", TrainingRows.of(rows).batches)
        job = TrainingJob(
            objective=SFT(), optimizer=optimizer, deepspeed=DeepSpeed(zero=2, processes=2), steps=20, batch=8, seed=0
        )
        launch(job.deepspeed, job.write(folder), lambda _: None)
        gains[dtype] = measured(Policy.load(folder / "start"), rows) - measured(Policy.load(folder / "model"), rows)
    alone = Trainer(Policy.load(folder / "start"), SFT(), optimizer, 20)
    before = measured(alone.policy, rows)
    for _ in range(20):
        alone.step(TrainingRows.of(rows))
    expected = before - measured(alone.policy, rows)
    assert expected > 1e-5
    assert gains[torch.bfloat16] == pytest.approx(gains[torch.float32], rel=0.02)
    assert gains[torch.bfloat16] == pytest.approx(expected, rel=0.05)


def measured(policy: Policy, rows: list[TrainingRow]) -> float:
    """The mean negative log-likelihood of trained tokens, in float64."""
    policy = copy.deepcopy(policy).prepare("float32")
    policy.model.double()
    logprobs = batch_logprobs(policy, TrainingRows.of(rows))
    return -sum(float(item[row.mask].sum()) for row, item in zip(rows, logprobs, strict=True)) / sum(
        sum(row.mask) for row in rows
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_dpo_starts_at_ln_2(precision: Any) -> None:
    config = OptimizerConfig(precision=precision)
    policy = small_policy().prepare(precision)
    [batch] = TrainingRows.of(weighted_rows(8, pairs=True)).batches
    rows = TrainingRows([reference_logprobs(policy, batch, config.micro_tokens)])
    loss = Trainer(policy, DPO(), config, 1).step(rows)["loss"]
    assert loss == pytest.approx(math.log(2), abs=1e-6 if precision == "float32" else 1e-3)


def test_an_update_of_the_policy_that_sampled_clips_nothing_under_bfloat16() -> None:
    """Log-probs of another pass, such as the sampler's, differ by rounding: more than GSPO's bounds allow."""
    policy = small_policy().prepare("bfloat16")
    trainer = Trainer(policy, GSPO(), BF16, 1)
    exact = copy.deepcopy(policy).prepare("float32")
    plain = random_rows(16)
    other = [
        row.model_copy(update={"logprobs": logprob.tolist()})
        for row, logprob in zip(plain, batch_logprobs(exact, TrainingRows.of(plain)), strict=True)
    ]
    assert trainer.gradients(TrainingRows.of(other))["clip_share"] > 0.1
    trainer.backend.discard()
    anchored = trainer.anchored(TrainingRows.of(other))
    metrics = trainer.step(anchored)
    assert metrics["clip_share"] == 0
    assert metrics["behaviour_kl"] == 0


def gpt2() -> Policy:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
    return Policy(GPT2LMHeadModel(GPT2Config(**sizes)), small_policy().tokenizer, "gpt2")  # dropout is 0.1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_in_training(checkpointing: bool) -> None:
    policy = gpt2()
    rows = random_rows(6)
    rows = [
        row.model_copy(update={"logprobs": logprob.tolist()})
        for row, logprob in zip(rows, batch_logprobs(policy, TrainingRows.of(rows)), strict=True)
    ]
    trainer = Trainer(policy, GRPO(), OptimizerConfig(gradient_checkpointing=checkpointing), 1)
    metrics = trainer.gradients(TrainingRows.of(rows))
    assert metrics["clip_share"] == 0
    assert metrics["behaviour_kl"] < 1e-9


def test_checkpointing_computes_layers_again() -> None:
    policy = small_policy()
    calls = []
    layer = policy.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    counts = []
    for flag in (False, True):
        trainer = Trainer(policy, GRPO(), OptimizerConfig(gradient_checkpointing=flag), 1)
        calls.clear()  # the probe of the model has made some
        trainer.gradients(TrainingRows.of(random_rows(2)))
        counts.append(len(calls))
    assert counts == [1, 2]


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_weight_decay_spares_norms_and_biases(lora: LoRA | None) -> None:
    policy = small_policy()
    trainer = Trainer(policy, GRPO(), OptimizerConfig(weight_decay=0.1, lora=lora), 1)
    names = {id(parameter): name for name, parameter in policy.model.named_parameters()}
    groups = trainer.backend.optimizer.param_groups  # type: ignore[attr-defined]
    decayed = {names[id(param)] for group in groups if group["weight_decay"] for param in group["params"]}
    spared = {names[id(param)] for group in groups if not group["weight_decay"] for param in group["params"]}
    assert decayed
    assert all("norm" not in name and not name.endswith("bias") for name in decayed)
    assert all("norm" in name or name.endswith("bias") for name in spared)
    assert bool(spared) == (lora is None)


def test_a_processor_without_bfloat16_computes_in_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = TrainingRows.of(random_rows(4))
    plain = Trainer(small_policy(), GRPO(), OptimizerConfig(), 1).step(rows)
    monkeypatch.setattr("agentrl.models.policy.processor_has_bfloat16", lambda: False)
    with pytest.warns(UserWarning, match=r"bfloat16, but this processor has no .*; qwen2 is computed in float32"):
        trainer = Trainer(small_policy(), GRPO(), BF16, 1)
    assert trainer.policy.precision == "float32"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.policy.prepare("bfloat16").prepare("bfloat16")
    assert len(caught) == 1, "it is said once"
    assert trainer.step(rows) == plain


@pytest.mark.parametrize(
    ("saved", "asked", "dtype", "precision"),
    [
        (torch.float32, "bfloat16", torch.float32, "bfloat16"),
        (torch.float32, None, torch.float32, "float32"),
        (torch.bfloat16, "float32", torch.float32, "float32"),
        (torch.bfloat16, "bfloat16", torch.bfloat16, "float32"),  # it computes in bfloat16 without autocast
    ],
)
def test_the_embedded_engine_samples_in_the_precision_that_is_asked_for(
    saved: torch.dtype, asked: Any, dtype: torch.dtype, precision: str
) -> None:
    policy = small_policy()
    policy.model.to(saved)  # type: ignore[arg-type]
    EmbeddedConfig(precision=asked).build(policy)
    assert (policy.model.dtype, policy.precision) == (dtype, precision)


def test_instructions_for_bfloat16_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"avx2": True, "avx512_bf16": False, "amx_bf16": False}
    for name in (None, "avx512_bf16", "amx_bf16"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: flags | ({name: True} if name else {}))
        assert processor_has_bfloat16.__wrapped__() == (name is not None)
