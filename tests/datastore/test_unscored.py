"""Rows without an outcome: unscored is not failed."""

import re
from pathlib import Path

import polars as pl
import pytest
from store_rows import FP, build

from agentrl.algorithms.grpo import GRPO
from agentrl.datastore import StoreError, TrajectoryBuffer
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.rules import Filter, Keep
from agentrl.datastore.read.sampling import SAMPLERS
from agentrl.online.credit import assign
from agentrl.pipelines.methods.agentq.preferences import trajectory_pairs
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, UnscoredError
from agentrl.training.weights import row_weights


@pytest.fixture
def buffer(tmp_path: Path) -> TrajectoryBuffer:
    """Rows 0 to 7, of which 0, 3 and 6 are unscored and 1, 5 and 7 are successes."""
    buffer = TrajectoryBuffer(tmp_path)
    rows = [build(i) if i % 3 else build(i, reward=None, success=None) for i in range(8)]
    buffer.append(rows, stage="rollout", fingerprint=FP)
    return buffer


def test_statistics_leave_unscored_rows_out_and_count_them(buffer: TrajectoryBuffer) -> None:
    [stage] = buffer.stats()["stages"]
    assert (stage["rows"], stage["unscored"], stage["success"]) == (8, 3, pytest.approx(3 / 5))
    assert buffer.get(build(0).trajectory_id).reward is None


def test_filters_find_them(buffer: TrajectoryBuffer) -> None:
    def count(where: str) -> int:
        return int(buffer.sql(f"select count(*) from trajectories where {where}").item())

    assert [count(where) for where in ("success", "not success", "success is null")] == [3, 2, 3]
    steps = buffer.sql("select count(*) from steps where success is null").item()
    assert steps == 2 * 3


@pytest.mark.parametrize(("what", "kept"), [("best", 2), ("correct", 2), ("shortest", 2), ("first", 2), ("all", 8)])
def test_curation_never_takes_them_for_good_or_bad(what: str, kept: int, buffer: TrajectoryBuffer) -> None:
    chosen = curate(buffer, [Keep(rule="keep", what=what)]).ids.to_pylist()  # type: ignore[arg-type]
    unscored = {build(i).trajectory_id for i in (0, 3, 6)}
    assert len(chosen) == kept
    assert bool(unscored & set(chosen)) == (what in ("first", "all"))
    only = curate(buffer, [Filter(rule="filter", where="reward is null"), Keep(rule="keep", what="best")])
    assert len(only.ids) == 0


@pytest.mark.parametrize("strategy", SAMPLERS)
def test_samplers_that_need_an_outcome_refuse_them(strategy: str, buffer: TrajectoryBuffer) -> None:
    rows = buffer.scan().collect()
    draw = SAMPLERS[strategy]
    if strategy in ("success_first", "prioritized", "curriculum"):
        with pytest.raises(StoreError, match=r"3 of 8 rows have no \w+: unscored is not failed"):
            draw(rows, 2)
    else:
        assert len(draw(rows, 8).ids) == 8
    assert len(draw(rows.filter(pl.col("success").is_not_null()), 2).ids) == 2


def test_learning_refuses_them_by_name() -> None:
    rows = [build(1), build(2, reward=None, success=None)]
    named = re.escape(rows[1].trajectory_id) + " has no reward: unscored is not failed"
    with pytest.raises(UnscoredError, match=named):
        assign(GRPO(), rows)
    with pytest.raises(UnscoredError, match=named):
        row_weights(to_table(rows, TRAJECTORY_SCHEMA), "reward")
    with pytest.raises(UnscoredError, match=named):
        trajectory_pairs(rows, 0.1, 4)
    assert row_weights(to_table(rows, TRAJECTORY_SCHEMA), "none").tolist() == [1.0, 1.0]
