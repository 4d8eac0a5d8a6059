"""The training loop: accumulation, resume, masks, and data that it refuses."""

from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from small_models import random_rows, small_model, small_policy

from agentrl.algorithms.base import Objective
from agentrl.algorithms.dapo import DAPO
from agentrl.algorithms.dpo import DPO
from agentrl.algorithms.dr_grpo import DrGRPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.kto import KTO
from agentrl.algorithms.sft import SFT
from agentrl.algorithms.vapo import VAPO
from agentrl.training.backend import OneProcess
from agentrl.training.batch import Batch, TrainingError, collate
from agentrl.training.loop import fit
from agentrl.training.optimizer import LoRA, OptimizerConfig
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import reference_logprobs
from agentrl.training.step import Trainer

OBJECTIVES: list[Objective] = [SFT(), DPO(nll=0.3), KTO(), GRPO(entropy=0.1), DAPO(), DrGRPO()]


def step_gradients(objective: Objective, micro_tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    policy = small_policy()
    trainer = Trainer(policy, objective, OptimizerConfig(micro_tokens=micro_tokens, clip_norm=1e9), 1)
    rows = random_rows(8, pairs=isinstance(objective, DPO))
    if isinstance(objective, KTO):  # it counts by weights of rows, which are no advantages
        rows = [row.model_copy(update={"weights": [abs(weight) for weight in row.weights]}) for row in rows]
    metrics = trainer.gradients(TrainingRows.of(rows))
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}, metrics


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.type)
def test_one_batch_of_eight_equals_eight_of_one(objective: Objective) -> None:
    whole, metrics = step_gradients(objective, 100_000)
    parts, again = step_gradients(objective, 1)
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, atol=1e-5, rtol=1e-4)
    assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def test_tokens_outside_the_mask_teach_nothing() -> None:
    """Weights and log-probs outside the mask, of tool output, change no gradient."""
    rows = random_rows(4)
    changed = [
        row.model_copy(
            update={
                "weights": [w if m else 99.0 for w, m in zip(row.weights, row.mask, strict=True)],
                "logprobs": [p if m else -77.0 for p, m in zip(row.logprobs, row.mask, strict=True)],
            }
        )
        for row in rows
    ]
    matches = []
    for data in (rows, changed):
        trainer = Trainer(small_policy(), GRPO(), OptimizerConfig(), 1)
        matches.append(trainer.step(TrainingRows.of(data)))
    assert matches[0] == matches[1]


def run(tmp_path: Path, total: int, stop_after: int | None = None) -> list[dict[str, float]]:
    trainer = Trainer(small_policy(), SFT(), OptimizerConfig(lr=1e-3, schedule="cosine", warmup=2), total)

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] + 1 == stop_after:
            raise KeyboardInterrupt

    rows = [row.model_copy(update={"weights": [1.0] * len(row.input_ids)}) for row in random_rows(10)]
    return fit(trainer, TrainingRows.of(rows), 4, 0, tmp_path / "checkpoint.pt", on_step, checkpoint_every=2)


def test_a_resumed_run_has_the_curve_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    expected = run(whole, 7)
    with pytest.raises(KeyboardInterrupt):
        run(cut, 7, stop_after=5)
    assert run(cut, 7) == expected


def broken(name: str) -> TrainingRows:
    rows = random_rows(3)
    values = {
        "mask": [False] * len(rows[1].mask),
        "weights": [float("nan")] * len(rows[1].mask),
        "logprobs": [float("nan")] * len(rows[1].mask),
        "input_ids": [9999] * len(rows[1].mask),
        "ref_logprobs": [0.0],
    }
    rows[1] = rows[1].model_copy(update={name: values[name]})
    return TrainingRows.of(rows)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mask", "no action token"),
        ("weights", "weights not finite"),
        ("logprobs", "logprobs not finite"),
        ("input_ids", "outside the model's vocabulary of 61"),
        ("ref_logprobs", "differ in length"),
    ],
)
def test_broken_rows_are_refused_by_name_before_the_first_step(name: str, message: str, tmp_path: Path) -> None:
    policy = small_policy()
    before = policy.model.lm_head.weight.clone()
    with pytest.raises(TrainingError, match=rf"{message}.*row-1"):
        fit(Trainer(policy, GRPO(), OptimizerConfig(), 3), broken(name), 2, 0, tmp_path / "c.pt", lambda _: None)
    assert torch.equal(policy.model.lm_head.weight, before)


def test_a_reference_of_another_vocabulary_is_refused() -> None:
    policy = small_policy()
    policy.model = small_model(vocabulary=20)
    with pytest.raises(TrainingError, match="vocabulary of 20"):
        reference_logprobs(policy, TrainingRows.of(random_rows(2)).batches[0])


def test_a_loss_that_is_not_finite_keeps_the_last_good_policy_and_the_rows(tmp_path: Path) -> None:
    policy = small_policy()
    trainer = Trainer(policy, SFT(), OptimizerConfig(lr=1e-3), 5)

    def poison(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            trainer.backend.parameters[0].data[:] = float("inf")

    rows = TrainingRows.of(random_rows(4))
    with pytest.raises(TrainingError, match=r"step 3: loss nan.*failed_step.parquet"):
        fit(trainer, rows, 2, 0, tmp_path / "checkpoint.pt", poison)
    assert pq.read_table(tmp_path / "failed_step.parquet").num_rows == 2
    assert len(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["history"]) == 3


@pytest.mark.parametrize(
    "changes", [{"lora": LoRA(rank=4)}, {"precision": "bfloat16"}, {"gradient_checkpointing": True}], ids=str
)
def test_options_train(changes: dict) -> None:
    """Every option lowers the loss on one batch."""
    from agentrl.training.lora import merge_lora

    policy = small_policy()
    made = [row.model_copy(update={"weights": [1.0] * len(row.input_ids)}) for row in random_rows(4)]
    rows = TrainingRows.of(made)
    trainer = Trainer(policy, SFT(), OptimizerConfig(lr=1e-2, **changes), 30)
    losses = [trainer.step(rows)["loss"] for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    merge_lora(policy)
    assert Trainer(policy, SFT(), OptimizerConfig(), 1).step(rows)["loss"] == pytest.approx(losses[-1], rel=0.15)
    assert not [name for name, _ in policy.model.named_parameters() if "lora" in name]


def test_checkpointing_changes_no_gradient() -> None:
    rows = TrainingRows.of(random_rows(4))
    norms = [
        Trainer(small_policy(), GRPO(), OptimizerConfig(gradient_checkpointing=flag), 1).step(rows)["grad_norm"]
        for flag in (False, True)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_an_online_step_that_fails_leaves_its_rows(tmp_path: Path) -> None:
    from types import SimpleNamespace

    from agentrl.pipelines.stages.grpo import _step

    policy = small_policy()
    trainer = Trainer(policy, GRPO(), OptimizerConfig(), 1)
    trainer.backend.parameters[0].data[:] = float("inf")
    context = SimpleNamespace(scratch=tmp_path)
    loop = SimpleNamespace(step=lambda: trainer.step(TrainingRows.of(random_rows(3))))
    with pytest.raises(TrainingError, match=r"row-0.*failed_step.parquet"):
        _step(context, loop)  # type: ignore[arg-type]
    assert pq.read_table(tmp_path / "failed_step.parquet")["row_id"].to_pylist() == ["row-0", "row-1", "row-2"]


def test_a_rank_builds_no_micro_batch_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class SecondOfFour(OneProcess):
        share, shares = 1, 4

    built: list[int] = []

    def counted(rows: TrainingRows, **given: Any) -> Batch:
        built.append(len(rows))
        return collate(rows, **given)

    monkeypatch.setattr("agentrl.training.step.collate", counted)
    config = OptimizerConfig(micro_tokens=1)  # a micro batch for each row
    Trainer(small_policy(), VAPO(), config, 1, SecondOfFour).gradients(TrainingRows.of(random_rows(9)))
    assert built == [1, 1, 1]  # rows 1 and 5, and one that does not count, since another rank has a third one


class Short(OneProcess):
    """Memory for so many tokens, padding included."""

    room = 100
    tried: ClassVar[list[int]] = []

    def run(self, work: Any) -> Any:
        if (batch := getattr(work, "args", None)) and isinstance(batch[0], Batch):
            self.tried.append(batch[0].input_ids.numel())
            if self.tried[-1] > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more")
        return super().run(work)


def test_a_step_without_memory_halves_its_micro_batches_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Short, "tried", [])
    rows = TrainingRows.of(random_rows(8))
    config = OptimizerConfig(micro_tokens=400)
    expected = Trainer(small_policy(), GRPO(), config, 2).step(rows)
    trainer = Trainer(small_policy(), GRPO(), config, 2, Short)
    with pytest.warns(
        UserWarning, match=r"step 0 ran out of memory \(CUDA .* 2.00 GiB.\); micro batches have (100|200) tokens"
    ):
        result = trainer.step(rows)
    assert result == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert max(Short.tried) > 100
    Short.tried.clear()
    trainer.step(rows)
    assert max(Short.tried) <= 100, "it forgot what it learnt"
    monkeypatch.setattr(Short, "room", 5)
    with pytest.raises(TrainingError, match=r"one row alone does not fit into memory .*gradient_checkpointing"):
        trainer.step(rows)
