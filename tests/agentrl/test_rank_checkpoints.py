"""Checkpoints of ranks: what adapters leave out, what is refused, and that training goes on exactly."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import random_rows, small_model
from torch import nn

from agentrl.algorithms.grpo import GRPO
from agentrl.models.policy import Policy, processor_has_bfloat16
from agentrl.models.tiny import train_tokenizer
from agentrl.training.batch import TrainingError
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.ranks import LATEST, WRITERS, _restore, _Work, _writer
from agentrl.training.resharded import Fragment, ShardedStates, divided
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


def parts(groups: list[dict[str, torch.Tensor]], rank: int, ranks: int, padding: float) -> list[torch.Tensor]:
    """What a rank of ZeRO 3 holds of each group: an equal part of each parameter, in one buffer."""
    buffers = []
    for group in groups:
        padded = [torch.nn.functional.pad(value, (0, -len(value) % ranks), value=padding) for value in group.values()]
        buffers.append(torch.cat([value.chunk(ranks)[rank] for value in padded]))
    return buffers


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 7), st.integers(1, 7))
def test_parts_of_any_number_of_ranks_make_those_of_any_other(sizes: list[int], writers: int, readers: int) -> None:
    """Two groups, in files whose padding must not be read."""
    numbers = torch.arange(1.0, 2 * sum(sizes) + 1)
    values = [dict(enumerate(half.split(sizes))) for half in numbers.chunk(2)]
    groups = [{f"{kind}.{n}": value for n, value in group.items()} for kind, group in zip("ab", values, strict=True)]
    shapes = [{name: value.shape for name, value in group.items()} for group in groups]
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(writers):
            flat = parts(groups, rank, writers, torch.nan)
            moments = {n: {"step": torch.tensor(3.0), "exp_avg": -flat[n], "exp_avg_sq": flat[n] ** 2} for n in (0, 1)}
            state = {"fp32_flat_groups": flat, "optimizer_state_dict": {"state": moments}}
            file = Path(folder) / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, file)
        written = ShardedStates(Path(folder), writers, {"param_shapes": shapes})
        assert written.steps() == 3
        for rank in range(readers):
            for group, expected in enumerate(parts(groups, rank, readers, 0.0)):
                for kind, wanted in (("fp32", expected), ("exp_avg", -expected), ("exp_avg_sq", expected**2)):
                    flat = torch.zeros_like(expected)
                    for fragment in divided(shapes[group], group, rank, readers):
                        written.fill(kind, fragment, flat[fragment.start : fragment.start + fragment.count])
                    assert flat.equal(wanted), "each value once, and padding is zero"


def test_a_checkpoint_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    state = {"fp32_flat_groups": [torch.zeros(2)], "optimizer_state_dict": {"state": {}}}
    torch.save({"optimizer_state_dict": state}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    written = ShardedStates(tmp_path, 1, {"param_shapes": [{"a": torch.Size([2])}]})
    assert written.steps() is None, "no update was made"
    with pytest.raises(ValueError, match=r"has 2 of 3 values of a part of a$"):
        written.fill("fp32", Fragment("a", 0, 0, 0, 3), torch.zeros(3))


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


def interrupted(folder: Path, spread: DeepSpeed, **changes: Any) -> tuple[Path, Path]:
    """A job whose ranks were ended after their third step, and its newest checkpoint."""

    def interrupt(metrics: dict[str, float]) -> None:
        if metrics["step"] == 3:
            raise KeyboardInterrupt

    path = job_in(folder, spread, **changes)
    with pytest.raises(KeyboardInterrupt):
        launch(spread, path, interrupt)
    checkpoints = folder / "checkpoints"
    return path, checkpoints / (checkpoints / LATEST).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_adapters_go_on_from_small_checkpoints_on_as_many_ranks(zero: Any, tmp_path: Path) -> None:
    """The embedding, which is tied to the head, has 64,000 of the 80,000 parameters: it is in no file."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    spread = DeepSpeed(zero=zero, processes=2)
    lora = {"optimizer": OPTIMIZER.model_copy(update={"lora": LoRA(rank=4, alpha=8)}), "checkpoint_every": 2}
    whole = launch(spread, job_in(tmp_path / "whole", spread, **lora), lambda metrics: None)
    path, folder = interrupted(tmp_path / "killed", spread, **lora)
    assert (folder / WRITERS).read_text() == "2"
    assert sum(file.stat().st_size for file in folder.rglob("*model_states.pt")) < 4 * 64_000
    resumed: list[float] = []
    history = launch(spread, path, lambda metrics: resumed.append(metrics["step"]))
    assert resumed[0] >= 2
    assert losses(history) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "readers", "adapters"), [(1, 3, False), (2, 1, True), (3, 1, False), (3, 3, True)])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(
    zero: Any, readers: int, adapters: bool, tmp_path: Path
) -> None:
    """Sums over more ranks round otherwise, and nothing else differs: AdamW's moments, counted updates, groups."""
    pytest.importorskip("deepspeed")
    lora = LoRA(rank=4, alpha=8) if adapters else None
    settings = {"optimizer": OPTIMIZER.model_copy(update={"lora": lora}), "checkpoint_every": 2}
    two, other = (DeepSpeed(zero=zero, processes=ranks) for ranks in (2, readers))
    whole = launch(two, job_in(tmp_path / "whole", two, **settings), lambda metrics: None)
    path, _ = interrupted(tmp_path / "killed", two, **settings)
    job = TrainingJob.model_validate_json(path.read_text())
    job.model_copy(update={"deepspeed": other}).write(tmp_path / "killed")
    resumed: list[float] = []
    with pytest.warns(UserWarning, match=rf"2 ranks wrote the checkpoint .*step-\d, and {readers} go on from it"):
        history = launch(other, path, lambda metrics: resumed.append(metrics["step"]))
    assert resumed[0] >= 2
    for mine, theirs in zip(losses(history), losses(whole), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    weights = (Policy.load(tmp_path / name / "model").model.state_dict() for name in ("killed", "whole"))
    for mine, theirs in zip(*(state.values() for state in weights), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_with_the_next_step(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    spread = DeepSpeed(zero=2, processes=2)
    path, folder = interrupted(tmp_path / "killed", spread, optimizer=OPTIMIZER, checkpoint_every=2)
    damaged = folder / "model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    for ranks in (2, 1):
        spread = spread.model_copy(update={"processes": ranks})
        job = TrainingJob.model_validate_json(path.read_text()).model_copy(update={"deepspeed": spread})
        with pytest.raises(TrainingError, match=rf"{folder} cannot be read \(.*\); remove {folder.parent} to"):
            launch(spread, job.write(tmp_path / "killed"), lambda metrics: None)


@pytest.mark.slow
@pytest.mark.skipif(not processor_has_bfloat16(), reason="this processor would compute in float32")
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
