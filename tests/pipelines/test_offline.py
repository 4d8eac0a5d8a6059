"""Which stored rollouts train.offline and KTO take, and which of them are compared with each other."""

from typing import Any

import pytest

from pipelines.handles import Model, Tasks, Trajectories
from pipelines.harness import Harness
from pipelines.stages.tasks import generate
from pipelines.stages.train import kto, offline, sft
from pipelines.stages.trajectories import sample, synthesize

CONFIG: dict[str, Any] = {"steps": 1, "batch": 4}
LIMITS = {"max_turn_tokens": 8, "max_tokens": 120}
TWO_OF_EACH = {"samples": 2, "sampling": LIMITS}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def tasks(harness: Harness) -> Tasks:
    return harness.run(generate, {"env": "lookup", "train": 2, "dev": 1, "heldout": 1})["train"]


@pytest.fixture(scope="module")
def model(harness: Harness, tasks: Tasks) -> Model:
    expert = harness.run(synthesize, tasks=tasks)["trajectories"]
    return harness.run(sft, CONFIG | {"model": {"init": "tiny"}}, trajectories=[expert])["model"]


def scored(harness: Harness, given: Trajectories, rewards: list[float], **changes: Any) -> Trajectories:
    """Copies of rows with these rewards."""
    rows = [
        row.model_copy(
            update={"trajectory_id": f"{row.trajectory_id}-{harness._count}", "reward": one, "success": one > 0}
        )
        for row, one in zip(given.read(), rewards, strict=True)
    ]
    return harness.trajectories([row.model_copy(update=changes) for row in rows])


@pytest.mark.parametrize("stage", [offline, kto], ids=lambda stage: stage.name)
@pytest.mark.parametrize("shift", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_rows_that_are_no_samples_of_the_policy_are_refused(
    harness: Harness, tasks: Tasks, model: Model, stage: Any, shift: dict[str, float]
) -> None:
    plain, other = (
        scored(harness, harness.run(sample, config, model=model, tasks=tasks)["trajectories"], [0.0, 1.0, 1.0, 0.0])
        for config in (TWO_OF_EACH, {"samples": 2, "sampling": {**LIMITS, **shift}})
    )
    with pytest.raises(ValueError, match=rf"4 of 8 rows were not sampled at temperature 1 .*{other.ids()[0]}"):
        harness.run(stage, CONFIG, trajectories=[plain, other], model=model)
    with pytest.warns(UserWarning, match="4 of 8 rows .* are left out"):
        left = harness.run(
            stage, CONFIG | {"other_temperatures": "leave_out"}, trajectories=[plain, other], model=model
        )
    assert left.metrics["rows"] == 4
    kept = harness.run(stage, CONFIG | {"other_temperatures": "keep"}, trajectories=[plain, other], model=model)
    assert kept.metrics["rows"] == 8


@pytest.mark.parametrize("named", [True, False], ids=["ticket", "task"])
def test_rollouts_are_compared_with_those_of_their_own_policy_and_ticket(
    harness: Harness, tasks: Tasks, model: Model, named: bool
) -> None:
    """One policy solves everything and another nothing: among its own, no rollout is better than the others."""
    made = [harness.run(sample, TWO_OF_EACH, model=model, tasks=tasks)["trajectories"] for _ in range(2)]
    changes = [{} if named else {"group_id": None, "policy": policy} for policy in ("one", "other")]
    given = [
        scored(harness, rows, [reward] * 4, **change)
        for rows, reward, change in zip(made, (1.0, 0.0), changes, strict=True)
    ]
    config = CONFIG | {"algorithm": {"type": "rloo", "entropy": 0.1}}
    rows = harness.run(offline, config, trajectories=given, model=model)["rows"].table()
    assert len(rows) == 8
    assert {weight for row in rows["weights"].to_pylist() for weight in row} == {0.0}
