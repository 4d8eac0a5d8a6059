"""Online training on DeepSpeed ranks: the same as in one process, also after a kill and without memory."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agentrl.models.policy import Policy
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness, Result
from agentrl.pipelines.stages.grpo import online

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}
SMALL = {"iterations": 3, "tasks": 3, "samples": 4, "checkpoint_every": 1, "checkpoints": {"last": 0}, **LIMITS}
OPTIMIZER = {"lr": 1e-3, "micro_tokens": 512}

HUNGRY = """
import torch
from agentrl.algorithms.grpo import GRPO

class Hungry(GRPO):
    type: str
    room: int = 256

    def loss(self, logprobs, entropies, batch, baseline=0.0):
        if batch.input_ids.numel() > self.room:
            raise torch.OutOfMemoryError(f"out of memory: {batch.input_ids.numel()} tokens\\nand more")
        return super().loss(logprobs, entropies, batch, baseline)
"""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "hungry.py").write_text(HUNGRY)
    sys.path.insert(0, str(folder))
    yield Harness(folder)
    sys.path.remove(str(folder))


def spread(zero: int, together: int = 1) -> dict[str, Any]:
    return {"zero": zero, "processes": 2, "sequence_parallel": together}


def same(result: Result, expected: Result) -> None:
    """Both trained on the same rollouts, with the same losses, and ended with the same weights."""
    ours, theirs = (made["metrics"].table().to_pylist() for made in (result, expected))
    assert any(row["grad_norm"] for row in theirs)
    for first, other in zip(ours, theirs, strict=True):
        for name, value in other.items():
            assert first[name] == (value if value is None else pytest.approx(value, rel=2e-3, abs=2e-5)), (name, first)
    weights, others = (Policy.load(made["model"].path).model.state_dict() for made in (result, expected))
    for name, value in others.items():
        assert weights[name].numpy() == pytest.approx(value.numpy(), abs=5e-4), name


KL = {"coef": 0.1, "estimator": "k3"}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a critic and a reference": (spread(3), {"type": "ppo", "kl": KL}, {}),
    "adapters and a reference": (spread(3), {"type": "grpo", "kl": KL}, {"lora": {"rank": 4, "alpha": 8}}),
    "in bfloat16, off policy": (
        spread(2),
        {"type": "grpo", "off_policy": {"truncate": 2.0}},
        {"precision": "bfloat16"},
    ),
    "rows split, a critic and a reference": (spread(3, together=2), {"type": "ppo", "kl": KL}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.ci] if number == 0 else []) for number, way in enumerate(WAYS)]
)
def test_ranks_learn_what_one_process_learns(harness: Harness, warm: Model, tasks: Tasks, way: str) -> None:
    deepspeed, algorithm, optimizer = WAYS[way]
    config = {**SMALL, "algorithm": algorithm, "optimizer": {**OPTIMIZER, **optimizer}, "updates": 2}
    expected = harness.run(online, config, model=warm, tasks=tasks)
    outputs = harness.run(online, {**config, "deepspeed": deepspeed}, model=warm, tasks=tasks)
    same(outputs, expected)
    for name in ("train_logprobs", "entropy"):
        ours, theirs = (made["batches"].table()[name].combine_chunks() for made in (outputs, expected))
        assert ours.offsets == theirs.offsets
        assert ours.values.to_numpy() == pytest.approx(theirs.values.to_numpy(), abs=2e-2), name


@pytest.mark.slow
def test_ranks_divide_two_streams_by_the_counts_of_all(harness: Harness, warm: Model, tasks: Tasks) -> None:
    config = {**SMALL, "iterations": 2, "optimizer": OPTIMIZER, "observe": {"tool": 0.5}, "updates": 2}
    expected = harness.run(online, config, model=warm, tasks=tasks)
    assert all(row["ce_tokens"] for row in expected["metrics"].table().to_pylist())
    same(harness.run(online, {**config, "deepspeed": spread(2)}, model=warm, tasks=tasks), expected)


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "ranks"), [("grpo", 2), ("ppo", 3)])
def test_a_killed_run_on_ranks_goes_on(algorithm: str, ranks: int, harness: Harness, warm: Model, tasks: Tasks) -> None:
    """It is killed after its third iteration; its checkpoint is after the second. As many ranks go on from it, or one
    more, which take over the parts of the policy and of its critic."""
    config = {**SMALL, "iterations": 4, "checkpoint_every": 2, "optimizer": OPTIMIZER, "algorithm": {"type": algorithm}}
    expected = harness.run(online, config, model=warm, tasks=tasks)
    own = online.config.model_validate({**config, "deepspeed": spread(3)})
    context = harness._context(f"resumed {algorithm}")

    def kill(done: int, total: int | None = None, **metrics: Any) -> None:
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        online(replace(context, progress=kill), own, model=warm, tasks=tasks)
    own = own.model_copy(update={"deepspeed": own.deepspeed.model_copy(update={"processes": ranks})})
    before = context.row_ids()
    again: list[str] = []
    result = online(
        replace(context, progress=lambda done, total, **shown: again.append(str(shown.get("again")))),
        own,
        model=warm,
        tasks=tasks,
    )
    assert again == ["from its record", "None"]
    assert len(before) == 36
    same(Result(result, {}), expected)


@pytest.mark.slow
def test_ranks_without_memory_begin_again_with_half_the_micro_batches(
    harness: Harness, warm: Model, tasks: Tasks
) -> None:
    """The checkpoint is after the second iteration, and memory runs out in the first and in the fourth."""
    hungry = {"type": "hungry:Hungry", "room": 300}
    config = {**SMALL, "optimizer": OPTIMIZER}
    expected = harness.run(online, config, model=warm, tasks=tasks)
    with pytest.warns(UserWarning, match=r"rank . ran out of memory: out of memory: \d+ tokens; .* of 256 tokens"):
        made = harness.run(online, {**config, "algorithm": hungry, "deepspeed": spread(2)}, model=warm, tasks=tasks)
    same(made, expected)
