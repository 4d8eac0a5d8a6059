"""Online training that trains on stored rollouts again: what a step is made of, what is refused, and what a killed run
goes on from."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.trajectories import sample, synthesize
from agentrl.schemas.trajectory import UnscoredError
from agentrl.training.rows import TrainingRows

LIMITS = {"max_turn_tokens": 24, "max_tokens": 120}
SMALL = {"iterations": 3, "tasks": 4, "samples": 4, "optimizer": {"lr": 1e-3}, "checkpoint_every": 2, **LIMITS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("replayed"))


@pytest.fixture(scope="module")
def stored(harness: Harness, warm: Model, tasks: Tasks) -> Trajectories:
    """Four rollouts of each task, by the policy that training starts from."""
    made: Trajectories = harness.run(sample, {"samples": 4, "sampling": LIMITS}, model=warm, tasks=tasks)[
        "trajectories"
    ]
    return made


def test_stored_groups_are_part_of_each_step(harness: Harness, warm: Model, tasks: Tasks, stored: Trajectories) -> None:
    config = {**SMALL, "replay": {"share": 0.5, "draw": "priority"}}
    made = harness.run(online, config, model=warm, tasks=tasks, replay=[stored])
    groups = {row.trajectory_id: row.group_id for row in [*stored.read(), *made["trajectories"].read()]}
    fresh = set(made["trajectories"].ids())
    metrics = made["metrics"].table().to_pylist()
    steps = made["steps"].table().to_pylist()
    batches = made["batches"].table()
    for number, step in enumerate(metrics):
        records = [record for record in steps if record["step"] == number]
        again = [record for record in records if record["replay_weight"]]
        assert step["replay_rows"] == len(again) > 0
        assert {record["trajectory_id"] for record in records if not record["replay_weight"]} <= fresh
        weights = defaultdict(set)
        for record in again:
            weights[groups[record["trajectory_id"]]].add(record["replay_weight"])
        assert all(len(each) == 1 for each in weights.values()), "all rows of a group, of one weight"
        assert len(again) == 4 * len(weights)
        assert sum(min(each) for each in weights.values()) == pytest.approx(4), "as much as four draws"
        trained = set(batches.filter(batches["iteration"].to_numpy() == number)["row_id"].to_pylist())
        assert trained == {record["trajectory_id"] for record in records if record["trained"]}
        assert any(record["trained"] for record in again)
    assert metrics[0]["replay_ess"] == pytest.approx(1, abs=1e-4), "they were sampled by this very policy"
    assert metrics[0]["replay_importance"] == pytest.approx(1, abs=1e-4)
    assert 0 < metrics[2]["replay_ess"] < 1
    assert metrics[2]["behaviour_kl"] == pytest.approx(0, abs=1e-6), "the first ratio is to the policy before the step"
    assert made.metrics["replay_rows"] == sum(step["replay_rows"] for step in metrics)
    assert made.metrics["turns_trained_of_drawn"] == 1, "coverage counts what was sampled"


def test_a_guard_that_leaves_the_replayed_part_out_leaves_the_step_as_it_was(
    harness: Harness, warm: Model, tasks: Tasks, stored: Trajectories
) -> None:
    guarded = {"share": 0.5, "own": False, "correction": {"min_ess": 1.0, "guard": "skip"}}
    short = {**SMALL, "iterations": 2}
    plain = harness.run(online, short, model=warm, tasks=tasks)
    # to the last bit no stored row is as likely as it was, so the guard leaves all of them out
    made = harness.run(online, {**short, "replay": guarded}, model=warm, tasks=tasks, replay=[stored])
    assert made.metrics["replay_dropped"] == 2
    assert made.metrics["replay_scaled"] == 0
    losses = [[step["grad_norm"] for step in each["metrics"].table().to_pylist()] for each in (plain, made)]
    assert losses[0] == losses[1]
    assert not any(row["trained"] for row in made["steps"].table().to_pylist() if row["replay_weight"])


class Killed(BaseException):
    pass


def killing(at: int) -> Any:
    def progress(done: int, total: int | None = None, **metrics: Any) -> None:
        if done == at:
            raise Killed

    return progress


@pytest.mark.slow
def test_a_killed_run_replays_what_it_would_have(harness: Harness, warm: Model, tasks: Tasks) -> None:
    """It is killed after its third iteration, and goes on from a checkpoint after the second and a record of the
    third."""
    config = online.config.model_validate({**SMALL, "iterations": 4, "replay": {"share": 0.5, "max_age": 3}})
    undisturbed = harness.run(online, config.model_dump(), model=warm, tasks=tasks)
    context = harness._context("killed")
    with pytest.raises(Killed):
        online(replace(context, progress=killing(3)), config, model=warm, tasks=tasks)
    result = online(context, config, model=warm, tasks=tasks)
    metrics = [made["metrics"].table().to_pylist() for made in (undisturbed.outputs, result)]
    assert metrics[0][0]["replay_rows"] == 0, "nothing is stored yet"
    assert metrics[0][-1]["replay_age"] > 1
    assert repr(metrics[1]) == repr(metrics[0])
    weights = [TrainingRows.of_table(made["batches"].table()).lists("weights")[1] for made in (undisturbed, result)]
    assert (weights[0] == weights[1]).all()


def test_rows_without_log_probs_are_learned_from_where_no_ratio_is_taken(
    harness: Harness, warm: Model, tasks: Tasks
) -> None:
    """Scripted rows of two kinds in one group of each task: the right one is pushed up."""
    rows = [
        row
        for noise in (0.0, 1.0)
        for row in harness.run(synthesize, {"noise": noise}, tasks=tasks)["trajectories"].read()
    ]
    context = harness._context("annotated")
    grouped = [
        row.model_copy(update={"trajectory_id": context.trajectory_id(number), "group_id": f"of {row.task_id}"})
        for number, row in enumerate(rows)
    ]
    context.append(grouped)
    given = context.select()
    config = {**SMALL, "replay": {"share": 0.5, "own": False, "correction": None}, "algorithm": {"type": "rloo"}}
    made = harness.run(online, config, model=warm, tasks=tasks, replay=[given])
    reward = {row.trajectory_id: row.reward for row in given.read()}
    again = [row for row in made["steps"].table().to_pylist() if row["replay_weight"]]
    assert again
    assert all((row["advantage"] > 0) == (reward[row["trajectory_id"]] > 0.5) for row in again)
    for step in made["metrics"].table().to_pylist():
        assert step["behaviour_kl"] == pytest.approx(0, abs=1e-4), "of rows that have log-probs"
        assert "replay_ess" not in step
    with pytest.raises(ValueError, match=f"{given.ids()[0]} has no log-probs of the policy that sampled it"):
        harness.run(online, {**SMALL, "replay": {}}, model=warm, tasks=tasks, replay=[given])


def test_what_cannot_be_replayed_is_named(harness: Harness, warm: Model, tasks: Tasks, stored: Trajectories) -> None:
    def refused(
        message: str, config: dict[str, Any], replayed: Sequence[Trajectories], error: Any = ValueError
    ) -> None:
        with pytest.raises(error, match=message):
            harness.run(online, {**SMALL, **config}, model=warm, tasks=tasks, replay=list(replayed))

    refused("inputs.replay is wired, and replay is not set", {}, [stored])
    refused("replay.own: false leaves nothing to replay; wire inputs.replay", {"replay": {"own": False}}, [])
    single = harness.run(sample, {"samples": 1, "sampling": LIMITS}, model=warm, tasks=tasks)["trajectories"]
    refused("no group of the 6 rows of inputs.replay has rewards that differ", {"replay": {"own": False}}, [single])
    greedy = harness.run(sample, {"samples": 2, "sampling": {**LIMITS, "temperature": 0.0}}, model=warm, tasks=tasks)
    refused("were not sampled at temperature 1", {"replay": {}}, [greedy["trajectories"]])
    context = harness._context("unscored")
    first, *_ = stored.read()
    context.append([first.model_copy(update={"trajectory_id": context.trajectory_id(0), "reward": None})])
    refused(context.trajectory_id(0), {"replay": {}}, [context.select()], UnscoredError)
