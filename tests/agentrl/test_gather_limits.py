"""How much DeepSpeed holds whole at a time: by the model's shape, and without any effect on results."""

from pathlib import Path
from typing import Any

import pytest
from shapes import LLAMA_8B, LLAMA_70B, model_folder, shape_of
from small_models import random_rows, small_model

from agentrl.algorithms.grpo import GRPO
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
from agentrl.placement import limits
from agentrl.placement.limits import AHEAD, SMALL, GatherLimits, limits_of, sizes_of
from agentrl.training.job import DeepSpeed, TrainingJob
from agentrl.training.launch import launch
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.rows import TrainingRows, write_rows


@pytest.mark.parametrize(("config", "layer"), [(LLAMA_8B, 218_112_000), (LLAMA_70B, 855_654_400)])
def test_two_layers_fit_beside_the_largest_parameter(config: dict[str, Any], layer: int, tmp_path: Path) -> None:
    shape = shape_of(model_folder(tmp_path / "model", config))
    largest = config["vocab_size"] * config["hidden_size"]
    assert (shape.largest, shape.layer) == (largest, layer)
    assert limits_of(largest, layer) == GatherLimits(largest + 2 * layer, 0, layer // 2, 50_000_000)


def test_small_models_are_gathered_whole_and_huge_layers_are_not_gathered_ahead() -> None:
    model = small_model("llama")
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert sizes_of(model) == (model.lm_head.weight.numel(), layer)
    assert limits_of(*sizes_of(model)) == GatherLimits(SMALL, SMALL, SMALL // 2, SMALL)
    experts = 7 * 10**9
    assert limits_of(experts, 3 * experts).live == experts + AHEAD
    assert limits_of(experts, 3 * experts).prefetched == AHEAD // 2


def test_a_job_says_them_to_deepspeed() -> None:
    zero = DeepSpeed(zero=3).settings(None, GatherLimits(5, 4, 3, 2))["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == 5
    assert zero["stage3_max_reuse_distance"] == 4
    assert zero["stage3_prefetch_bucket_size"] == 3
    assert zero["reduce_bucket_size"] == 2


def job_in(folder: Path, **changes: Any) -> TrainingJob:
    folder.mkdir()
    rows = TrainingRows.of(random_rows(10))
    Policy(small_model("llama", seed=1), train_tokenizer(["some text"], 300), "small").save(folder / "start")
    write_rows(folder / "rows.arrow", rows.batches)
    settings = {"optimizer": OptimizerConfig(lr=5e-3, micro_tokens=64), "steps": 8, "batch": 5, "seed": 0} | changes
    return TrainingJob(objective=GRPO(), **settings)


@pytest.mark.slow
def test_limits_by_shape_change_no_bit_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits that a large model has, scaled to a small one: weights come layer by layer, and ahead."""
    pytest.importorskip("deepspeed")
    model = small_model("llama", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "SMALL", 0)
        by_shape = limits_of(*sizes_of(model))
    assert by_shape.reuse == 0
    assert by_shape.live < sum(parameter.numel() for parameter in model.parameters())
    scaled = DeepSpeed(zero=3).settings(None, by_shape)["zero_optimization"]
    histories = []
    for name, extra in (("as small", {}), ("by shape", {"zero_optimization": scaled})):
        spread = DeepSpeed(zero=3, processes=2, extra=extra)
        job = job_in(tmp_path / name, deepspeed=spread)
        history = launch(spread, job.write(tmp_path / name), lambda metrics: None)
        histories.append([(row["loss"], row["grad_norm"]) for row in history])
    assert histories[0] == histories[1]
    weights = [Policy.load(tmp_path / name / "model").model.state_dict() for name in ("as small", "by shape")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
