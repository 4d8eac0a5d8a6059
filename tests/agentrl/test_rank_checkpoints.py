"""Checkpoints of ranks: what adapters leave out, what is refused, and that training goes on exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import random_rows, small_model
from torch import nn

from agentrl.algorithms.grpo import GRPO
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.training.batch import TrainingError
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.ranks import LATEST, WRITERS, _check_writers, _restore, _Work, _writer
from agentrl.training.rows import TrainingRows, write_rows

OPTIMIZER = OptimizerConfig(lr=5e-3, micro_tokens=64)


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model[0].bias.requires_grad_(True)
    model.tied = model[0].weight  # a second name of a frozen parameter
    return _Work(model)


def test_frozen_parameters_are_in_no_checkpoint_under_any_name() -> None:
    assert set(half_frozen().state_dict()) == {"model.0.bias", "model.1.weight", "model.1.bias"}


def test_a_checkpoint_must_have_all_that_is_trained_and_nothing_else() -> None:
    saved, other = half_frozen().state_dict(), half_frozen()
    frozen = other.model[0].weight.clone()
    _restore(saved, other)
    assert all(other.state_dict()[name].equal(value) for name, value in saved.items())
    assert other.model[0].weight.equal(frozen), "it stays as it was loaded"
    with pytest.raises(TrainingError, match=r"1 parameters are in one of both alone, such as \['model.0.bias'\]"):
        _restore({name: value for name, value in saved.items() if name != "model.0.bias"}, other)
    with pytest.raises(TrainingError, match=r"such as \['model.2.bias'\]; remove its folder"):
        _restore({**saved, "model.2.bias": torch.zeros(3)}, other)


def test_each_rank_makes_its_own_files_durable() -> None:
    files = {
        "model/zero_pp_rank_12_mp_rank_00_optim_states.pt": 12,
        "model/zero_pp_rank_3_mp_rank_00_model_states.pt": 3,
        "model/offloaded_tensors/rank07/exp_avg.swp": 7,
        "model/mp_rank_00_model_states.pt": 0,
        "model": 0,
        WRITERS: 0,
    }
    assert {name: _writer(Path("/checkpoints/step-1") / name) for name in files} == files


def test_another_number_of_ranks_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "step-3").mkdir()
    _check_writers(tmp_path, "step-3", 4)  # of a version that did not say who wrote it: DeepSpeed compares
    (tmp_path / "step-3" / WRITERS).write_text("2")
    _check_writers(tmp_path, "step-3", 2)
    with pytest.raises(
        TrainingError, match=r"written by 2 ranks, .* 4 are to go on .*deepspeed.processes, .* or remove"
    ):
        _check_writers(tmp_path, "step-3", 4)


def test_ranks_exchange_no_fewer_bits_than_they_compute_in() -> None:
    with pytest.raises(ValueError, match=r"communication: bfloat16 needs zero: 3, not 2"):
        DeepSpeed(communication="bfloat16")
    spread = DeepSpeed(zero=3, communication="bfloat16")
    with pytest.raises(ValueError, match=r"set optimizer\.precision: bfloat16"):
        TrainingJob(objective=GRPO(), optimizer=OPTIMIZER, deepspeed=spread, steps=1, seed=0)
    assert spread.settings(None)["torch_autocast"]["lower_precision_safe_modules"] == ["torch.nn.Linear"]
    assert "torch_autocast" not in DeepSpeed(zero=3).settings(None)


def job_in(folder: Path, spread: DeepSpeed, **changes: Any) -> Path:
    folder.mkdir()
    Policy(small_model(seed=1, vocabulary=2000), train_tokenizer(["some text"], 300), "small").save(folder / "start")
    write_rows(folder / "rows.arrow", TrainingRows.of(random_rows(10)).batches)
    settings = {"optimizer": OPTIMIZER, "steps": 5, "batch": 3, "seed": 0} | changes
    return TrainingJob(objective=GRPO(), deepspeed=spread, **settings).write(folder)


def losses(history: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in history]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_adapters_go_on_from_small_checkpoints_on_as_many_ranks(zero: Any, tmp_path: Path) -> None:
    """The embedding, which is tied to the head, has 64,000 of the 80,000 parameters: it is in no file."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    spread = DeepSpeed(zero=zero, processes=2)
    lora = {"optimizer": OPTIMIZER.model_copy(update={"lora": LoRA(rank=4, alpha=8)}), "checkpoint_every": 2}
    whole = launch(spread, job_in(tmp_path / "whole", spread, **lora), lambda metrics: None)

    def kill(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    path = job_in(tmp_path / "killed", spread, **lora)
    with pytest.raises(KeyboardInterrupt):
        launch(spread, path, kill)
    checkpoints = tmp_path / "killed" / "checkpoints"
    folder = checkpoints / (checkpoints / LATEST).read_text()
    assert (folder / WRITERS).read_text() == "2"
    assert sum(file.stat().st_size for file in folder.rglob("*model_states.pt")) < 4 * 64_000
    alone = DeepSpeed(zero=zero, processes=1)
    job = TrainingJob.model_validate_json(path.read_text())
    job.model_copy(update={"deepspeed": alone}).write(tmp_path / "killed")
    with pytest.raises(TrainingError, match=r"was written by 2 ranks, .* and 1 are to go on from it"):
        launch(alone, path, lambda metrics: None)
    job.write(tmp_path / "killed")
    resumed: list[float] = []
    history = launch(spread, path, lambda metrics: resumed.append(metrics["step"]))
    assert resumed[0] >= 2
    assert losses(history) == losses(whole)


@pytest.mark.slow
def test_weights_may_travel_in_bfloat16_and_stay_in_float32(tmp_path: Path) -> None:
    """Products are in bfloat16 anyway, so the first loss is the same; gradients are summed in fewer bits."""
    pytest.importorskip("deepspeed")
    optimizer = OPTIMIZER.model_copy(update={"precision": "bfloat16"})
    histories = {}
    for communication in ("float32", "bfloat16"):
        spread = DeepSpeed(zero=3, processes=2, communication=communication)
        path = job_in(tmp_path / communication, spread, optimizer=optimizer)
        histories[communication] = losses(launch(spread, path, lambda metrics: None))
    assert histories["bfloat16"][0][0] == histories["float32"][0][0]
    assert histories["bfloat16"] != histories["float32"]
    for rounded, exact in zip(*histories.values(), strict=True):
        assert rounded == pytest.approx(exact, rel=0.03)
    still = optimizer.model_copy(update={"lr": 1e-12})
    spread = DeepSpeed(zero=3, processes=2, communication="bfloat16")
    launch(spread, job_in(tmp_path / "still", spread, optimizer=still, steps=1), lambda metrics: None)
    start, model = (Policy.load(tmp_path / "still" / name).model.state_dict() for name in ("start", "model"))
    assert all((start[name] - model[name]).abs().max() < 1e-9 for name in start), "no weight was rounded when saved"
