"""Supervised training on continuations from their first turn on: what their parents sampled is learned too."""

import numpy as np
import pytest
from forked import LIMITS, harness, model, tabular, tasks

from agentrl.pipelines.handles import Model, Tasks, Trajectories
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.methods.lats.search import tree
from agentrl.pipelines.parts.selected import CORRECTING
from agentrl.pipelines.stages.select import select
from agentrl.pipelines.stages.train import sft
from agentrl.schemas.trajectory import Trajectory

__all__ = ["harness", "model", "tabular", "tasks"]

CONFIG = {"steps": 1, "batch": 64, "prefixes": "trained"}


@pytest.fixture(scope="module")
def searched(harness: Harness, model: Model, tasks: Tasks) -> Trajectories:
    return harness.run(tree, {"branch": 3, "rounds": 6, **LIMITS}, tasks=tasks, model=model)["trajectories"]


def sampled(row: Trajectory, rows: dict[str, Trajectory]) -> list[bool]:
    """Which tokens of a row it or one of those before it sampled."""
    if not row.fork_at:
        return row.action_mask
    assert row.parent_id
    return sampled(rows[row.parent_id], rows)[: row.fork_at] + row.action_mask[row.fork_at :]


def test_the_turns_of_all_parents_are_learned(harness: Harness, model: Model, searched: Trajectories) -> None:
    rows = {row.trajectory_id: row for row in searched.read()}
    deep = [row for row in rows.values() if row.parent_id and rows[row.parent_id].fork_at]
    assert deep, "a continuation of a continuation"
    made = harness.run(sft, CONFIG, trajectories=[searched], model=model)["rows"].table().to_pylist()
    assert {row["row_id"]: row["mask"] for row in made} == {name: sampled(row, rows) for name, row in rows.items()}
    plain = harness.run(sft, {**CONFIG, "prefixes": "context"}, trajectories=[searched], model=model)
    assert {row["row_id"]: row["mask"] for row in plain["rows"].table().to_pylist()} == {
        name: row.action_mask for name, row in rows.items()
    }
    assert sum(np.sum(row["mask"]) for row in made) > sum(row.n_action_tokens for row in rows.values())


def test_parents_that_are_not_selected_are_read(harness: Harness, model: Model, searched: Trajectories) -> None:
    rows = {row.trajectory_id: row for row in searched.read()}
    config = {"version": harness.buffer.version, "where": "fork_at > 0"}
    some = harness.run(select, config, trajectories=[searched])["trajectories"]
    assert 0 < len(some.ids()) < len(rows)
    made = harness.run(sft, CONFIG, trajectories=[some], model=model)["rows"].table().to_pylist()
    assert {row["row_id"]: row["mask"] for row in made} == {name: sampled(rows[name], rows) for name in some.ids()}


@pytest.mark.parametrize("source", CORRECTING)
def test_rows_that_correct_their_parents_are_refused(
    harness: Harness, model: Model, searched: Trajectories, source: str
) -> None:
    rows = [row for row in searched.read() if row.fork_at]
    named = [{"source": source, "trajectory_id": f"{source}-{number}"} for number in range(len(rows))]
    made = [row.model_copy(update=changes) for row, changes in zip(rows, named, strict=True)]
    corrected = harness.trajectories(made)
    with pytest.raises(ValueError, match=rf"prefixes: trained, and {len(rows)} of {len(rows)} rows have the source"):
        harness.run(sft, CONFIG, trajectories=[corrected], model=model)


def test_rows_without_their_parents_are_refused(harness: Harness, model: Model, searched: Trajectories) -> None:
    forked = next(row for row in searched.read() if row.fork_at)
    orphan = harness.trajectories([forked.model_copy(update={"trajectory_id": "orphan", "parent_id": "gone"})])
    with pytest.raises(ValueError, match="rows go on from 'gone', which the store does not have: bring in their"):
        harness.run(sft, CONFIG, trajectories=[orphan], model=model)
