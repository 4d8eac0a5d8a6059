"""The second stream of the loss: cross-entropy over its own count, beside any algorithm."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_models import random_rows, small_policy

from agentrl.algorithms.base import Objective
from agentrl.algorithms.dapo import DAPO
from agentrl.algorithms.dr_grpo import DrGRPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.schemas.training import CE_WEIGHTS, TRAINING_SCHEMA, TWO_STREAMS, TrainingRow
from agentrl.training.batch import TrainingError, check_rows, collate, micro_batches, units
from agentrl.training.logprobs import token_logprobs
from agentrl.training.optimizer import OptimizerConfig
from agentrl.training.packing import packed
from agentrl.training.rows import TrainingRows, parquet_batches, save_rows, step_table, write_rows
from agentrl.training.step import Trainer

OBJECTIVES: list[Objective] = [GRPO(entropy=0.1), DAPO(), DrGRPO(), GSPO()]
Gradients = dict[str, torch.Tensor]


def weighed(rows: list[TrainingRow], weight: float = 0.3) -> list[TrainingRow]:
    """Rows whose second stream has the tokens that the first one has not, but for the first one."""
    return [row.model_copy(update={CE_WEIGHTS: [0.0 if m else weight for m in row.mask]}, deep=True) for row in rows]


def observed(row: TrainingRow) -> TrainingRow:
    """A row of the second stream alone."""
    return row.model_copy(update={"mask": [False] * len(row.mask)})


def gradients(
    rows: list[TrainingRow], objective: Objective, micro_tokens: int = 10_000, packs: bool = True
) -> tuple[Gradients, dict[str, float]]:
    policy = small_policy()
    trainer = Trainer(policy, objective, OptimizerConfig(micro_tokens=micro_tokens), 1)
    trainer.packs = packs
    metrics = trainer.gradients(TrainingRows.of(rows))
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}, metrics


def close(result: Gradients, expected: Gradients) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.type)
def test_each_stream_is_divided_by_its_own_count(objective: Objective) -> None:
    """The gradient is that of the objective alone, plus the mean over the second stream's tokens of ``-w log p``."""
    rows = random_rows(6)
    first, alone = gradients(rows, objective)
    both, metrics = gradients(weighed(rows), objective)
    policy = small_policy()
    batch = collate(TrainingRows.of(weighed(rows)))
    assert batch.ce_weights is not None
    inside = batch.ce_weights != 0
    logprobs, _ = token_logprobs(policy.model.eval(), batch.input_ids, inside)
    ce = -(batch.ce_weights * logprobs).sum() / inside.sum()
    ce.backward()
    close(both, {name: first[name] + p.grad for name, p in policy.model.named_parameters() if p.grad is not None})
    assert metrics["ce_tokens"] == inside.sum()
    assert metrics["ce_loss"] == pytest.approx(ce.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(alone["loss"] + ce.item(), rel=1e-4)
    for name in set(alone) - {"loss"}:
        assert metrics[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.type)
def test_a_row_of_the_second_stream_alone_changes_nothing_in_the_first(objective: Objective) -> None:
    rows = weighed(random_rows(6))
    some, _ = gradients([*rows[:4], *map(observed, rows[4:])], objective)
    first, _ = gradients([row.model_copy(update={CE_WEIGHTS: []}) for row in rows[:4]], objective)
    second, _ = gradients(list(map(observed, rows)), objective)
    close(some, {name: first[name] + second[name] for name in first})


@pytest.mark.parametrize("objective", OBJECTIVES[:1], ids=lambda objective: objective.type)
def test_one_batch_of_eight_equals_eight_of_one_and_packed_rows_equal_padded_ones(objective: Objective) -> None:
    rows = weighed(random_rows(8))
    rows[3] = observed(rows[3])
    whole, metrics = gradients(rows, objective)
    for changed in ({"micro_tokens": 1}, {"packs": False}):
        result, again = gradients(rows, objective, **changed)  # type: ignore[arg-type]
        close(result, whole)
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.type)
def test_without_a_second_stream_the_step_is_the_same_to_the_bit(objective: Objective) -> None:
    """The step as it was before there was a second stream, written down once more."""
    rows = random_rows(6)
    result, metrics = gradients(rows, objective)
    policy = small_policy()
    trainer = Trainer(policy, objective, OptimizerConfig(), 1)
    table = TrainingRows.of(rows)
    [part] = micro_batches(table, units(table), 10_000)
    batch = collate(table.take(part), packing=True)
    with packed(policy.model):
        logprobs, entropies = token_logprobs(policy.model.eval(), batch.input_ids, batch.mask, batch.packing)
        total, _ = objective.loss(logprobs, entropies, batch, objective.over_step({}))
        trainer.backend.backward(total / objective.count(batch) * 1.0, last=True)
    for name, p in policy.model.named_parameters():
        assert p.grad is None or torch.equal(result[name], p.grad), name
    assert metrics["loss"] == total.item() / objective.count(batch)
    assert not {"ce_loss", "ce_tokens"} & set(metrics)
    zeros, again = gradients(weighed(rows, weight=0.0), objective)
    assert all(torch.equal(zeros[name], result[name]) for name in result)
    assert {name: again[name] for name in metrics} == metrics


def test_rows_without_a_second_stream_keep_the_columns_that_they_had(tmp_path: Path) -> None:
    """Tables of runs that do not ask for it have the bytes that they had before."""
    rows = TrainingRows.of(random_rows(4))
    assert rows.schema.names == [name for name in TrainingRow.model_fields if name != CE_WEIGHTS]
    assert rows.schema.metadata == {b"agentrl.schema_version": b"1"}
    assert step_table(0, [(0, rows)]).column_names == ["iteration", "step", *TRAINING_SCHEMA.names]
    assert step_table(0, []).column_names == ["iteration", "step", *TRAINING_SCHEMA.names]
    assert pq.read_schema(save_rows(tmp_path / "kept.parquet", rows)).names == TRAINING_SCHEMA.names
    assert TrainingRows.open(write_rows(tmp_path / "rows.arrow", rows.batches)).schema.names == TRAINING_SCHEMA.names
    assert len(TrainingRows.open(write_rows(tmp_path / "none.arrow", []))) == 0


def test_a_second_stream_goes_through_files_and_selections(tmp_path: Path) -> None:
    rows = TrainingRows.of(weighed(random_rows(5)))
    path = save_rows(tmp_path / "kept.parquet", rows)
    for again in (
        TrainingRows.open(write_rows(tmp_path / "rows.arrow", parquet_batches(path))),
        TrainingRows.of_table(step_table(3, [(7, rows)])),
        rows.take([4, 3, 2, 1, 0]).take([4, 3, 2, 1, 0]),
    ):
        assert again.schema.names == TWO_STREAMS.names
        assert again.table()[CE_WEIGHTS].to_pylist() == rows.table()[CE_WEIGHTS].to_pylist()
    mixed = pa.concat_tables([step_table(0, []), step_table(1, [(0, rows)])], promote_options="default")
    assert TrainingRows.of_table(mixed).table()[CE_WEIGHTS].to_pylist() == rows.table()[CE_WEIGHTS].to_pylist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({CE_WEIGHTS: [0.5]}, "ce_weights and input_ids differ in length"),
        ({CE_WEIGHTS: [float("nan")] * 9}, "ce_weights not finite"),
        ({CE_WEIGHTS: [0.0] * 9, "mask": [False] * 9}, "no action token"),
        ({CE_WEIGHTS: [1.0] + [0.0] * 8, "mask": [False] * 9}, "no action token"),
    ],
)
def test_a_second_stream_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], message: str) -> None:
    good = TrainingRow(
        row_id="good", input_ids=[1] * 9, mask=[False] * 9, weights=[0.0] * 9, ce_weights=[0.0] * 8 + [0.1]
    )
    check_rows(TrainingRows.of([good]), small_policy())
    bad = good.model_copy(update={"row_id": "bad", **changes})
    with pytest.raises(TrainingError, match=rf"{message}.* in bad$"):
        check_rows(TrainingRows.of([good, bad]), small_policy())
