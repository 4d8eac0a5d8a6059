"""Online training on rollouts that differ in reward: what it learns, and what a killed run goes on from."""

import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from agentrl.models.policy import Policy
from agentrl.online.off_policy import divergence
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.trajectories import sample
from agentrl.rollouts.in_flight import Flow
from agentrl.schemas.training import TrainingRow
from agentrl.training.rows import TrainingRows
from agentrl.training.scoring import batch_logprobs

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("online"))


SMALL = {"iterations": 4, "tasks": 3, "samples": 4, "optimizer": {"lr": 1e-3}, "checkpoint_every": 2, **LIMITS}
"""Every checkpoint is after two iterations."""


def test_rollouts_that_differ_in_reward_move_the_policy_towards_the_reward(
    harness: Harness, warm: Model, tasks: Tasks
) -> None:
    config = {"iterations": 1, "tasks": 6, "samples": 8, "optimizer": {"lr": 1e-4}, **LIMITS}
    made = harness.run(online, config, model=warm, tasks=tasks)
    [metrics] = made["metrics"].table().to_pylist()
    assert 0 < metrics["success"] < 1
    assert metrics["grad_norm"] > 1e-3
    rows = {row.trajectory_id: row for row in made["trajectories"].read()}
    advantages = {row["trajectory_id"]: row["advantage"] for row in made["steps"].table().to_pylist()}
    assert any(advantages.values())
    groups = defaultdict(list)
    for row in rows.values():
        groups[row.group_id].append(row)
    for group in groups.values():
        mean = fmean(row.reward for row in group)
        for row in group:
            assert (advantages[row.trajectory_id] > 0) == (row.reward > mean)
    trained = TrainingRows.of_table(made["batches"].table())
    before, after = (batch_logprobs(Policy.load(model.path), trained) for model in (warm, made["model"]))
    gained = {name: (new - old).sum() for name, old, new in zip(trained.ids(), before, after, strict=True)}
    assert sum(advantages[name] * gain for name, gain in gained.items()) > 0


def test_under_bfloat16_the_drift_of_the_sampler_is_measured(
    harness: Harness, warm: Model, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.models.policy.processor_has_bfloat16", lambda: True)
    config = {**SMALL, "iterations": 1, "tasks": 6, "samples": 8, "optimizer": {"lr": 1e-4, "precision": "bfloat16"}}
    [metrics] = harness.run(online, config, model=warm, tasks=tasks)["metrics"].table().to_pylist()
    assert metrics["behaviour_kl"] == 0, "ratios are to the training pass itself"
    assert 0 < metrics["sampler_kl"] < 0.01
    shifted = rows_of(-1.0), rows_of(-0.7)
    assert divergence([shifted[0]], [shifted[1]]) == pytest.approx(math.expm1(0.3) - 0.3)


def rows_of(logprob: float) -> TrainingRows:
    row = {"input_ids": [1, 2, 3], "mask": [False, True, True], "weights": [0.0] * 3}
    return TrainingRows.of([TrainingRow(row_id="r", logprobs=[math.nan, logprob, logprob], **row)])


def test_a_ticket_gives_its_rollouts_their_ids_and_their_group(harness: Harness, warm: Model, tasks: Tasks) -> None:
    config = {**SMALL, "iterations": 2, "algorithm": {"type": "dapo", "resample": 1}}
    made = harness.run(online, config, model=warm, tasks=tasks)
    batches = made["metrics"].table().to_pylist()
    rows = made["trajectories"].read()
    assert [int(row.trajectory_id[-6:]) for row in rows] == list(range(len(rows)))
    assert len(rows) == 4 * sum(row["tickets"] for row in batches)
    tickets = made["coverage"].table().to_pylist()
    assert [ticket["ticket"] for ticket in tickets] == list(range(len(tickets)))
    for number, row in enumerate(batches):
        mine = [ticket for ticket in tickets if ticket["batch"] == number]
        assert len(mine) == row["tickets"]
        assert sum(entry["fills"] for entry in mine) == 3
        assert sum(not entry["fills"] for entry in mine) <= 3
    task_of = {row.group_id: row.task_id for row in rows}
    assert [ticket["task_id"] for ticket in tickets] == list(task_of.values())
    for row in rows:
        assert int(row.group_id[-6:]) == int(row.trajectory_id[-6:]) - row.sample_index
        assert row.group_id[:-6] == row.trajectory_id[:-6]
    sampled = harness.run(sample, {"samples": 2, "sampling": LIMITS}, model=warm, tasks=tasks)["trajectories"].read()
    assert [row.group_id for row in sampled] == [row.trajectory_id for row in sampled[::2] for _ in range(2)]


class Killed(BaseException):
    pass


def killing(at: int) -> Any:
    def progress(done: int, total: int | None = None, **metrics: Any) -> None:
        if done == at:
            raise Killed

    return progress


@pytest.mark.parametrize("algorithm", ["grpo", "remax"])
def test_a_resumed_run_takes_the_rollouts_that_the_buffer_holds(
    harness: Harness, warm: Model, tasks: Tasks, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after its third iteration; its checkpoint is after the second."""
    config = online.config.model_validate({**SMALL, "algorithm": {"type": algorithm}})
    undisturbed = harness.run(online, config.model_dump(), model=warm, tasks=tasks)
    context = harness._context("resumed")
    with pytest.raises(Killed):
        online(replace(context, progress=killing(3)), config, model=warm, tasks=tasks)
    before = context.row_ids()
    sampled: list[str] = []
    add = Flow.add

    async def counted(self: Any, jobs: Any, made: Any = {}) -> None:  # noqa: B006
        sampled.extend(job.name for job in jobs if job.name not in made)
        await add(self, jobs, made)

    monkeypatch.setattr(Flow, "add", counted)
    result = online(context, config, model=warm, tasks=tasks)
    assert sampled
    assert not set(sampled) & set(before)
    assert sorted([*before, *sampled]) == context.row_ids()
    for name in ("metrics", "batches"):
        expected, again = (made[name].table().to_pydict() for made in (undisturbed.outputs, result))
        for column in expected.keys() - {"row_id"}:
            assert repr(again[column]) == repr(expected[column]), column  # NaN is not equal to itself
    recorded = [row["trajectory_id"] for row in result["steps"].table().to_pylist()]
    assert len(set(recorded)) == len(recorded)
    assert set(recorded) <= set(context.row_ids())


def test_a_shard_that_lacks_rows_is_made_up_by_sampling_and_refused_online(
    harness: Harness, warm: Model, tasks: Tasks
) -> None:
    rows = harness.run(sample, {"samples": 2, "sampling": LIMITS}, model=warm, tasks=tasks)["trajectories"].read()
    context = harness._context("short")
    context.append(
        row.model_copy(update={"trajectory_id": context.trajectory_id(number)}) for number, row in enumerate(rows[:7])
    )
    config = sample.config.model_validate({"samples": 2, "sampling": LIMITS})
    made = sample(context, config, model=warm, tasks=tasks)["trajectories"].read()
    kept = {row.trajectory_id: row for row in made}
    assert len(kept) == 12
    for number, row in enumerate(rows[:7]):
        assert kept[context.trajectory_id(number)].input_ids == row.input_ids
    other = harness._context("others")
    other.append(
        row.model_copy(update={"trajectory_id": other.trajectory_id(number)}) for number, row in enumerate(rows[:7])
    )
    with pytest.raises(ValueError, match=r"stored rollouts of tickets 0 to 2 lack 1 of ticket 1, such as .*--force"):
        online(other, online.config.model_validate(SMALL), model=warm, tasks=tasks)


def test_the_best_policy_needs_tasks_to_judge_by(harness: Harness, warm: Model, tasks: Tasks) -> None:
    with pytest.raises(ValueError, match=r"checkpoints.keep: best needs tasks to judge by: wire inputs.dev"):
        harness.run(online, {**SMALL, "checkpoints": {"keep": "best"}}, model=warm, tasks=tasks)
