"""What training saw of each token is recorded beside the rows of its batches, and changes nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.datastore.storage.digest import digest
from agentrl.models.policy import Policy
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.plan.fingerprint import _hashed, _unhashed
from agentrl.pipelines.stages.grpo import online
from agentrl.training import step
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

SMALL = {
    "iterations": 2,
    "tasks": 3,
    "samples": 4,
    "updates": 2,
    "optimizer": {"lr": 1e-3, "micro_tokens": 256},
    "checkpoints": {"last": 0},
    "max_turn_tokens": 24,
    "max_tokens": 120,
}
COLUMNS = ["train_logprobs", "entropy"]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def made(harness: Harness, warm: Model, tasks: Tasks) -> Result:
    return harness.run(online, SMALL, model=warm, tasks=tasks)


@pytest.mark.slow
@pytest.mark.ci
def test_log_probs_and_entropies_are_those_of_the_policy_before_each_step(made: Result, warm: Model) -> None:
    table = made["batches"].table()
    rows = TrainingRows.of_table(table)
    assert [str(table.schema.field(name).type.value_type) for name in COLUMNS] == ["halffloat", "halffloat"]
    for name in COLUMNS:
        assert [len(entry) for entry in table[name].to_pylist()] == [sum(mask) for mask in table["mask"].to_pylist()]
    first = np.flatnonzero(table["step"].to_numpy() == 0)
    policy = Policy.load(warm.path)
    expected = batch_logprobs(policy, rows.take(first))
    for position, values in zip(first.tolist(), expected, strict=True):
        mask = np.array(table["mask"][position].as_py())
        assert table["train_logprobs"][position].values.to_numpy() == pytest.approx(values[mask], abs=5e-3)
        with torch.inference_mode():
            logits = policy.model(torch.tensor([table["input_ids"][position].as_py()])).logits[0].float()
        own = torch.distributions.Categorical(logits=logits).entropy()[:-1].numpy()
        assert table["entropy"][position].values.to_numpy() == pytest.approx(own[mask[1:]], abs=5e-3)
    moved = [
        abs(
            table["train_logprobs"][position].values.to_numpy() - sampled[np.array(table["mask"][position].as_py())]
        ).max()
        for position in np.flatnonzero(table["step"].to_numpy() == 1).tolist()
        for sampled in [table["logprobs"][position].values.to_numpy()]
    ]
    assert max(moved) > 5e-3, "the second step of an iteration sees what the first one changed"


@pytest.mark.slow
@pytest.mark.ci
def test_it_can_be_left_out_and_changes_nothing_else(
    harness: Harness, made: Result, warm: Model, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    forward: Callable[..., Any] = step.Trainer.forward

    def counted(self: Any, batch: Any) -> Any:
        nonlocal passes
        passes += 1
        return forward(self, batch)

    monkeypatch.setattr(step.Trainer, "forward", counted)
    without = harness.run(online, {**SMALL, "record_tokens": False}, model=warm, tasks=tasks)
    of_one, passes = passes, 0
    again = harness.run(online, SMALL, model=warm, tasks=tasks)
    assert passes == of_one, "entropies come from the pass that the gradients come from"
    tables = [item["batches"].table() for item in (without, again)]
    assert tables[0].column_names == [name for name in tables[1].column_names if name not in COLUMNS]
    names = [name for name in tables[0].column_names if name != "row_id"]
    for ours, theirs in ((without, made), (again, made)):
        assert repr(ours["batches"].table().select(names).to_pydict()) == repr(
            theirs["batches"].table().select(names).to_pydict()
        )
        weights = "model.safetensors"
        assert digest(Path(ours["model"].path) / weights) == digest(Path(theirs["model"].path) / weights)


def test_it_is_on_and_in_no_fingerprint() -> None:
    hashed = [
        _hashed(config, _unhashed("train.online"))
        for config in (online.config(), online.config(record_tokens=True), online.config(record_tokens=False))
    ]
    assert online.config().record_tokens
    assert hashed[0] == hashed[1] == hashed[2]
    assert "record_tokens" not in hashed[0]
