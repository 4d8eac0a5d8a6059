"""An online run of more iterations goes on from an earlier one, and keeps the policy that did best."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.models.policy import Policy
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import Selection, make_plan
from agentrl.pipelines.run.execute import Outcome, job_of, open_output, perform
from agentrl.schemas.manifest import InputRecord

SPEC = """
name: long
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 6, dev: 6, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  sloppy: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {noise: 1.0}}
  warm:
    uses: train.sft
    inputs: {trajectories: [expert, sloppy]}
    with: {model: {init: tiny}, steps: 40, batch: 6, optimizer: {lr: 5.0e-3, warmup: 10}}
  grpo:
    uses: train.grpo
    inputs: {model: warm, tasks: tasks.train, dev: tasks.dev}
    with:
      iterations: 2
      tasks: 4
      samples: 4
      max_tokens: 120
      max_turn_tokens: 24
      optimizer: {lr: 1.0e-3}
      checkpoints: {every: 1, last: 2}
"""


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalog = Catalog(folder / "store")
        self.buffer = TrajectoryBuffer(folder / "store")

    def run(self, settings: list[str], force: bool = False) -> Outcome:
        """Run stage grpo, and whatever before it never ran; if it is cached, what is there."""
        (self.folder / "long.yaml").write_text(SPEC)
        pipeline = load(
            str(self.folder / "long.yaml"), settings=[f"stages.grpo.with.{setting}" for setting in settings]
        )
        selection = Selection(only=("grpo",), force=True) if force else None
        plan = make_plan(pipeline, self.catalog, str(self.folder / "store"), selection)
        outcome = Outcome(plan.steps["grpo"].manifest, reused=True)  # type: ignore[arg-type]
        for step in plan.to_run:
            outcome = perform(job_of(step, plan, "test-run"))
        return outcome

    def open(self, outcome: Outcome, output: str) -> Any:
        record = InputRecord(stage="grpo", output=output, fingerprint=outcome.manifest.fingerprint)
        return open_output(record, self.catalog, self.buffer)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("extension"))


@pytest.mark.slow
def test_a_longer_run_goes_on_and_equals_one_from_the_start(store: Store) -> None:
    short = store.run(["iterations=2"])
    assert "continued_from" not in short.manifest.metrics
    before = store.open(short, "trajectories").ids()
    long = store.run(["iterations=4"])
    name = f"grpo/{short.manifest.fingerprint[:8]}"
    assert long.manifest.metrics["continued_from"] == f"{name} at iteration 2"
    assert any(f"goes on from iteration 2 of {name}" in warning for warning in long.manifest.warnings)
    ids = store.open(long, "trajectories").ids()
    assert ids[: len(before)] == before
    assert len(ids) == 2 * len(before)
    own = [row for row in store.buffer.get_many(store.buffer.ids(long.manifest.fingerprint)) if row.tags != ["dev"]]
    assert [row.trajectory_id for row in own] == ids[len(before) :], "the first iterations are not made again"
    assert store.run(["iterations=4"], force=True).reproduced is True, "a run from the start has the same content"


@pytest.mark.slow
@pytest.mark.ci
def test_a_shorter_run_is_the_beginning_of_an_earlier_one(store: Store) -> None:
    long = store.run(["iterations=4", "checkpoints.last=3"])
    made = store.run(["iterations=2", "checkpoints.last=3"])
    name = f"grpo/{long.manifest.fingerprint[:8]}"
    assert made.manifest.metrics["continued_from"] == f"{name} at iteration 2"
    assert store.open(made, "metrics").table().num_rows == 2
    assert sorted(path.stem for path in store.open(made, "checkpoints").path.glob("*.pt")) == ["000002"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_schedule_that_depends_on_the_number_of_iterations_starts_anew(store: Store) -> None:
    store.run(["iterations=1", "optimizer.schedule=linear"])
    made = store.run(["iterations=2", "optimizer.schedule=linear"])
    assert "continued_from" not in made.manifest.metrics
    [text] = [warning for warning in made.manifest.warnings if "does not go on" in warning]
    assert "schedule: linear depends on their number, so all 2 are made anew" in text


@pytest.mark.slow
@pytest.mark.ci
def test_the_policy_that_did_best_is_put_out(store: Store) -> None:
    made = store.run(["iterations=2", "optimizer.lr=3.0e-2", "checkpoints.keep=best"])
    judged = [row["dev_success"] for row in store.open(made, "metrics").table().to_pylist()]
    best = judged.index(max(judged))
    assert made.manifest.metrics["best_iteration"] == best
    assert made.manifest.metrics["best_dev_success"] == max(judged)
    shorter = store.run([f"iterations={best + 1}", "optimizer.lr=3.0e-2"])  # whose last policy it is
    expected, result = (Policy.load(store.open(item, "model").path).model.state_dict() for item in (shorter, made))
    assert all(bool((expected[name] == value).all()) for name, value in result.items())
    longer = store.run(["iterations=3", "optimizer.lr=3.0e-2", "checkpoints.keep=best"])
    assert "at iteration 2" in str(longer.manifest.metrics["continued_from"])
    assert store.run(["iterations=3", "optimizer.lr=3.0e-2", "checkpoints.keep=best"], force=True).reproduced is True


def test_rollouts_on_dev_are_kept_and_not_trained_on(store: Store) -> None:
    made = store.run(["iterations=2"])
    rows = store.buffer.get_many(store.buffer.ids(made.manifest.row_fingerprint))
    dev = [row for row in rows if row.tags == ["dev"]]
    assert len(dev) == 2 * 6
    assert {row.split for row in dev} == {"dev"}
    assert not {row.trajectory_id for row in dev} & set(store.open(made, "trajectories").ids())
    trained = {row["trajectory_id"] for row in store.open(made, "steps").table().to_pylist()}
    assert not trained & {row.trajectory_id for row in dev}
