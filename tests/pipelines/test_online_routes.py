"""Online training of a mixture of experts that replays the routes of its rollouts."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from agentrl.datastore.table.routes import FOLDER
from agentrl.pipelines.handles import Model, Tasks
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.checkpoints import DEV
from agentrl.pipelines.stages.grpo import online
from agentrl.pipelines.stages.online_log import OnlineLog
from agentrl.pipelines.stages.train import sft
from agentrl.pipelines.stages.trajectories import synthesize

sys.path += [str(Path(__file__).parents[1] / room) for room in ("agentrl", "datastore")]
from mixtures import mixture
from store_rows import build

SMALL = {
    "iterations": 3,
    "tasks": 3,
    "samples": 4,
    "optimizer": {"lr": 1e-3},
    "checkpoint_every": 2,
    "max_turn_tokens": 24,
    "max_tokens": 120,
    "routes": "replay",
}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("routes"))


@pytest.fixture(scope="module")
def mixed(harness: Harness, tasks: Tasks, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """It has learnt two ways to act in each task, as ``warm`` has."""
    folder = tmp_path_factory.mktemp("mixture")
    mixture("qwen3-moe", experts=8).save(folder)
    shown = [harness.run(synthesize, {"noise": noise}, tasks=tasks)["trajectories"] for noise in (0.0, 1.0)]
    config = {"model": {"path": str(folder)}, "steps": 40, "batch": 6, "optimizer": {"lr": 5e-3, "warmup": 10}}
    return harness.run(sft, config, trajectories=shown)["model"]


class Killed(BaseException):
    pass


def killing(done: int, total: int | None = None, **metrics: Any) -> None:
    if done == 3:
        raise Killed


def kept(harness: Harness) -> list[str]:
    """Files of routes in the store."""
    return list(harness.buffer.storage.keys(FOLDER))


@pytest.mark.slow
def test_a_run_replays_the_routes_of_its_rollouts_also_after_a_kill(
    harness: Harness, mixed: Model, tasks: Tasks
) -> None:
    """The run is killed after its third iteration; its checkpoint is after the second."""
    undisturbed = harness.run(online, SMALL, model=mixed, tasks=tasks)
    rows = undisturbed["metrics"].table().to_pylist()
    assert [row["routes_missing"] for row in rows] == [0.0] * 3
    for row in rows:
        assert 0 < row["replayed_routes_dlogp"] <= row["replayed_routes_max_dlogp"] < 1e-4
        assert row["own_routes_dlogp"] > 0
    assert any(row.get("grad_norm", 0) for row in rows)
    assert kept(harness) == [], "nothing reads routes once the run is over"
    context = harness._context("resumed")
    config = online.config.model_validate(SMALL)
    with pytest.raises(Killed):
        online(replace(context, progress=killing), config, model=mixed, tasks=tasks)
    # those of the first two iterations expired with the checkpoint
    assert [int(key.rpartition("/")[2][:6]) for key in kept(harness)] == [2]
    [recorded] = sorted((context.scratch / "batches").glob("*.routes"))
    assert recorded.stem == "000002"
    assert all(pq.read_table(recorded)["routes"].to_pylist())
    result = online(context, config, model=mixed, tasks=tasks)
    for name in ("metrics", "batches"):
        expected, again = (made[name].table().to_pydict() for made in (undisturbed.outputs, result))
        for column in expected.keys() - {"row_id"}:
            assert repr(again[column]) == repr(expected[column]), column
    assert "routes" not in result["batches"].table().column_names
    assert kept(harness) == []


@pytest.mark.slow
def test_without_replay_the_distance_of_own_routes_is_measured(harness: Harness, mixed: Model, tasks: Tasks) -> None:
    config = {**SMALL, "iterations": 1, "routes": None}
    [row] = harness.run(online, config, model=mixed, tasks=tasks)["metrics"].table().to_pylist()
    assert 0 < row["own_routes_dlogp"] <= row["own_routes_max_dlogp"] < 1e-4
    assert "replayed_routes_dlogp" not in row
    assert kept(harness) == []


def test_routes_of_rollouts_under_way_are_there_after_a_kill(tmp_path: Path) -> None:
    """Those of an evaluation are not kept."""
    context = Harness(tmp_path)._context("killed")
    names = [context.trajectory_id(number) for number in (0, 1, DEV)]
    rows = [build(trajectory_id=name, episode_id=name, policy_version=3) for name in names]
    turns = [np.full((4, 2, 2), number, np.uint8) for number in range(2)]
    log = OnlineLog(context)
    for name in names:
        log.keep_routes(name, turns)
    log.keep(rows[:1])
    again = OnlineLog(context)
    assert again.routes(names) == {}
    assert list(again.under_way(names)) == names[:1]
    again.append(rows)
    assert again.routes(names) == {names[0]: b"".join(turn.tobytes() for turn in turns)}
    assert not list(again.kept.iterdir())
    again.expire(iteration=1, version=3)
    assert again.routes(names)
    again.expire(iteration=1, version=4)
    assert again.routes(names) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "together"), [(2, 1), (3, 2)], ids=["rows on each", "rows split"])
def test_ranks_replay_routes_as_one_process_does(
    harness: Harness, mixed: Model, tasks: Tasks, zero: int, together: int
) -> None:
    """Off policy, so that the proximal policy replays them too, and computed again in backward passes."""
    pytest.importorskip("deepspeed")
    optimizer = {"lr": 1e-3, "micro_tokens": 512, "gradient_checkpointing": True}
    algorithm = {"type": "grpo", "off_policy": {"truncate": 2.0}}
    config = {**SMALL, "iterations": 2, "optimizer": optimizer, "algorithm": algorithm}
    spread = {"zero": zero, "processes": 2, "sequence_parallel": together}
    expected, ours = (
        harness.run(online, {**config, **more}, model=mixed, tasks=tasks)["metrics"].table().to_pylist()
        for more in ({}, {"deepspeed": spread})
    )
    assert any(row["grad_norm"] for row in expected)
    for row, wanted in zip(ours, expected, strict=True):
        assert row["routes_missing"] == 0
        assert row["replayed_routes_max_dlogp"] < 1e-4
        for name, value in wanted.items():
            assert row[name] == (value if value is None else pytest.approx(value, rel=2e-3, abs=2e-5)), name
    assert kept(harness) == []


def test_routes_of_stored_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="routes: replay draws stored rollouts, whose routes are not kept"):
        online.config.model_validate({**SMALL, "replay": {}})
