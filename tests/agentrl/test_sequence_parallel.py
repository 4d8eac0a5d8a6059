"""Ranks that compute each micro batch together find what one process finds."""

import importlib
import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_models import random_rows, small_model
from torch import Tensor

from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.online.critic import ValueHead, value_loss
from agentrl.placement.addresses import ADDRESS
from agentrl.training.batch import TrainingError, collate
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.logprobs import token_logprobs
from agentrl.training.loop import epochs
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.packing import packed
from agentrl.training.ranks import join_ranks
from agentrl.training.rendezvous import MEET, RENDEZVOUS_S
from agentrl.training.rows import TrainingRows, write_rows
from agentrl.training.sequence import SequenceGroup
from agentrl.training.step import Trainer

OPTIMIZER = OptimizerConfig(lr=5e-3, schedule="cosine", warmup=1, micro_tokens=64, clip_norm=0.5)
STEPS = 4


@pytest.mark.slow
@pytest.mark.ci
def test_two_ranks_find_the_losses_and_gradients_of_one(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")  # once for both, before they are forked
    torch.multiprocessing.start_processes(_compare, (tmp_path / "first",), nprocs=2, start_method="fork")


def _compare(rank: int, meeting: Path) -> None:
    """What each of two ranks asserts."""
    position = {
        ADDRESS: "127.0.0.1",
        MEET: str(meeting),
        RENDEZVOUS_S: "60",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= position | {"RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    join_ranks()
    for kind in ("qwen2", "llama", "one head of keys"):
        model = _model(kind)
        group = SequenceGroup(2, model.config)
        for number in (3, 4):  # one of them has an odd number of tokens
            rows = TrainingRows.of(random_rows(number, seed=number, pairs=number == 4))
            for objective in (DPO(),) if number == 4 else (GRPO(entropy=0.1), GSPO()):
                _same(model, rows, group, partial(_loss, model, objective))
        net = ValueHead(Policy(model, None, kind))  # type: ignore[arg-type]
        torch.nn.init.normal_(net.head.weight)
        _same(net, rows, group, partial(_value, net))
    _halved(model, group)
    model.config.num_attention_heads = 3
    with pytest.raises(TrainingError, match="Attention head count 3 is not divisible by SP size 2"):
        SequenceGroup(2, model.config)
    dist.destroy_process_group()


def _model(kind: str) -> Any:
    if kind != "one head of keys":
        return small_model(kind)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1, initializer_range=0.3))


def _loss(model: Any, objective: Any, batch: Any) -> tuple[Tensor, Tensor]:
    with packed(model):
        logprobs, entropies = token_logprobs(model, batch.input_ids, batch.mask, batch.packing)
    return logprobs, objective.loss(logprobs, entropies, batch, 0.1)[0] / objective.count(batch)


def _value(net: ValueHead, batch: Any) -> tuple[Tensor, Tensor]:
    with packed(net.backbone):
        values = net(batch)
    return values * batch.mask, (value_loss(values, batch.logprobs, batch.weights, 0.2) * batch.mask).sum()


def _same(
    model: torch.nn.Module, rows: TrainingRows, group: SequenceGroup, work: Callable[[Any], tuple[Tensor, Tensor]]
) -> None:
    """Token by token values, the loss, and its gradients summed over the ranks."""
    expected, theirs = _found(model, work(collate(rows, packing=True)))
    batch = collate(rows, packing=True, sequence=group)
    assert batch.packing
    assert batch.packing.input_ids.shape[1] % 2 == 0
    result, ours = _found(model, work(batch))
    for first, other in zip(result, expected, strict=True):
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-5)
    for name, gradient in ours.items():
        dist.all_reduce(gradient)
        gap = (gradient - theirs[name]).abs().max()
        assert gap <= 1e-4 * theirs[name].abs().max() + 1e-7, (name, gap)


def _found(model: torch.nn.Module, result: tuple[Tensor, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    model.zero_grad()
    result[1].backward()
    assert result[1].abs() > 1e-3
    gradients = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    return tuple(item.detach() for item in result), gradients


def _halved(model: Any, group: SequenceGroup) -> None:
    """A rank keeps half of what the backward pass needs."""
    rows = TrainingRows.of(random_rows(8, shared=2))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def kept(sequence: SequenceGroup | None) -> int:
        sizes: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        batch = collate(rows, packing=True, sequence=sequence)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            held = _loss(model, GRPO(), batch)
        assert held[1].requires_grad
        return sum(sizes.values())

    assert 0.4 < kept(group) / kept(None) < 0.62


def job_in(folder: Path, objective: Any, spread: DeepSpeed, **changes: Any) -> tuple[TrainingJob, TrainingRows]:
    folder.mkdir()
    rows = TrainingRows.of(random_rows(10, pairs=isinstance(objective, DPO)))
    Policy(small_model(seed=1), train_tokenizer(["some text"], 300), "small").save(folder / "start")
    write_rows(folder / "rows.arrow", rows.batches)
    settings = {"optimizer": OPTIMIZER, "steps": STEPS, "batch": 3, "seed": 0} | changes
    return TrainingJob(objective=objective, deepspeed=spread, **settings), rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "spread", "changes"),
    [
        (GRPO(entropy=0.01), DeepSpeed(zero=3, processes=2, sequence_parallel=2), {}),
        (DPO(), DeepSpeed(zero=2, processes=4, sequence_parallel=2), {"gradient_checkpointing": True}),
        (GRPO(), DeepSpeed(zero=1, processes=2, sequence_parallel=2), {"precision": "bfloat16"}),
    ],
    ids=["zero 3", "two groups, computed again", "bfloat16"],
)
def test_a_job_learns_what_one_process_learns(
    objective: Any, spread: DeepSpeed, changes: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    optimizer = OPTIMIZER.model_copy(update=changes)
    job, rows = job_in(tmp_path / "job", objective, spread, optimizer=optimizer)
    history = launch(spread, job.write(tmp_path / "job"), lambda _: None)
    trainer = Trainer(Policy.load(tmp_path / "job" / "start"), objective, optimizer, STEPS)
    expected = [trainer.step(rows.take(batch)) for batch in islice(epochs(rows, 3, 0), STEPS)]
    if changes.get("precision"):  # rounding grows from step to step
        names = ("loss", "entropy", "grad_norm")
        assert [history[0][name] for name in names] == pytest.approx([expected[0][name] for name in names], rel=0.05)
        return
    for commit, item in zip(history, expected, strict=True):
        for name, value in item.items():
            assert commit[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name
    trained = Policy.load(tmp_path / "job" / "model").model.state_dict()
    for name, value in trainer.policy.model.state_dict().items():
        assert trained[name].numpy() == pytest.approx(value.numpy(), abs=2e-4), name


@pytest.mark.slow
def test_a_model_whose_passes_are_not_packed_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    from transformers import Qwen2ForCausalLM

    spread = DeepSpeed(zero=1, processes=2, sequence_parallel=2)
    job, _ = job_in(tmp_path / "job", GRPO(), spread)
    config = small_model().config
    config.use_sliding_window, config.sliding_window, config.max_window_layers = True, 8, 0
    config.layer_types = ["sliding_attention"] * 2
    Policy(Qwen2ForCausalLM(config), train_tokenizer(["some text"], 300), "small").save(tmp_path / "job" / "start")
    with pytest.raises(TrainingError, match=r"sequence_parallel: 2 splits packed rows, and passes of Qwen2"):
        launch(spread, job.write(tmp_path / "job"), lambda _: None)


def test_ranks_that_the_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence_parallel: 2 does not divide the 3 ranks of a machine"):
        DeepSpeed(processes=3, sequence_parallel=2)
    spread = DeepSpeed(sequence_parallel=4)
    assert spread.ranks(8) == 8
    with pytest.raises(ValueError, match="does not divide the 1 ranks"):
        spread.ranks(0)
