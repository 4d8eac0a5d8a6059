"""Scores are the same however they are divided, by whatever gives them, and after kills; limits are shared."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judge_server import judging
from real_slurm import RealSlurm, until
from test_not_trained import acted

from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards import engines, queued
from agentrl.datastore.shards.shard import ShardError
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.parts import divided_scores
from agentrl.pipelines.parts.divided_scores import rows_of
from agentrl.pipelines.parts.shared_limits import with_shared_limits
from agentrl.pipelines.stages import score as score_module
from agentrl.pipelines.stages.score import ScoreConfig, score
from agentrl.rewards.judge import Judge
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

TASK = Task(task_id="t", env="e", split="train", prompt="q", ground_truth='"a3"')
Score = Callable[..., dict[str, dict[str, Any]]]


def rows() -> list[Trajectory]:
    return [acted(f"a{number}", 1.0, []).model_copy(update={"group_id": f"g{number // 3}"}) for number in range(30)]


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Score:
    """Scores by id, of an engine; the rows in the order of a seed."""
    monkeypatch.setattr(score_module, "AT_ONCE", 4)
    monkeypatch.setenv("JUDGE_KEY", "k")
    harness = Harness(tmp_path)
    context = harness._context("given")
    context.append(rows()[:20])
    context.append(rows()[20:], 1)
    tasks = harness.tasks([TASK])

    def scores(engine: dict[str, Any], rewards: list[dict[str, Any]], seed: int = 0) -> dict[str, dict[str, Any]]:
        stage = harness._context("score")
        stage.stage, stage.engine = "score", ShardEngine.model_validate(engine)
        given = np.random.default_rng(seed).permutation(sorted(row.trajectory_id for row in rows())).tolist()
        config = ScoreConfig.model_validate({"rewards": [{"type": "exact"}, *rewards]})
        table = score(stage, config, trajectories=[context.select(given)], tasks=[tasks])["scores"].table()
        assert not (stage.scratch / "shards").exists()
        return {row["trajectory_id"]: row for row in table.to_pylist()}

    return scores


def verdict(request: dict[str, Any]) -> str:
    return json.dumps({"score": len(request["messages"][0]["content"]) % 5})


@pytest.mark.parametrize("engine", [{"type": "here"}, {"type": "here", "shards": 1}, {"type": "here", "shards": 7}])
def test_shards_and_the_order_of_rows_change_nothing(scored: Score, engine: dict[str, Any]) -> None:
    with judging(verdict) as server:
        rewards = [{"type": "judge", "weight": 0.5, "engines": [server.engine]}]
        expected = scored({}, rewards)
        assert len(expected) == 30
        assert expected["a3"]["success"]
        assert len({row["reward"] for row in expected.values()}) > 1
        asked = len(server.requests)
        assert scored(engine, rewards, seed=1) == expected
        assert len(server.requests) == 2 * asked


@pytest.mark.slow
@pytest.mark.ci
def test_processes_that_are_killed_give_the_same(scored: Score, tmp_path: Path) -> None:
    (tmp_path / "killed").mkdir()
    dying = {"type": "dying_reward:Dying", "folder": str(tmp_path / "killed"), "weight": 0.25}
    with judging(verdict) as server:
        judge = {"type": "judge", "weight": 0.5, "engines": [{**server.engine, "requests_per_minute": 6000}]}
        expected = scored({}, [judge, {**dying, "rows": []}])
        engine = {"type": "processes", "workers": 2, "shards": 4}
        assert scored(engine, [judge, {**dying, "rows": ["a4", "a20", "a29"]}]) == expected
        assert len(list((tmp_path / "killed").iterdir())) == 3


@pytest.mark.slow
def test_jobs_of_slurm_give_the_same(scored: Score, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Path(__file__).parents[1] / "datastore" / "slurm_commands"
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "spool"))
    monkeypatch.setattr(queued, "LOOK_S", 0.2)
    (tmp_path / "spool").mkdir()
    with judging(verdict) as server:
        rewards = [{"type": "judge", "weight": 0.5, "engines": [server.engine]}]
        assert scored({"type": "slurm", "workers": 2, "shards": 2}, rewards) == scored({}, rewards)


@pytest.mark.slurm
def test_jobs_of_a_real_slurm_give_the_same_and_are_made_again(
    scored: Score, tmp_path: Path, slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "LOOK_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "killed").mkdir()
    dying = {"type": "dying_reward:Dying", "folder": str(tmp_path / "killed"), "weight": 0.25}
    with judging(verdict) as server:
        judge = {"type": "judge", "weight": 0.5, "engines": [server.engine]}
        expected = scored({}, [judge, {**dying, "rows": []}])
        engine = {"type": "slurm", "workers": 2, "shards": 3}
        assert scored(engine, [judge, {**dying, "rows": ["a4"]}]) == expected
    until(lambda: not slurm.jobs())


@pytest.mark.slow
def test_two_nodes_of_ray_give_the_same_and_say_what_they_lack(scored: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
        monkeypatch.setenv("LATER_KEY", "k")  # the nodes were started without it
        with judging(verdict) as server:
            judge = {"type": "judge", "weight": 0.5, "engines": [server.engine]}
            assert scored({"type": "ray", "workers": 2, "shards": 3}, [judge]) == scored({}, [judge])
            judge = {**judge, "engines": [{**server.engine, "api_key": "${LATER_KEY}"}]}
            with pytest.raises(
                ShardError, match=r"shard 'scores of batches from 0' on .*LATER_KEY is not set.*as before `ray start`"
            ):
                scored({"type": "ray", "workers": 1, "shards": 1}, [judge])
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_limits_of_endpoints_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(engine: dict[str, Any], **config: Any) -> tuple[int, int | None]:
        judge = Judge.model_validate({"engines": [{"type": "openai", "model": "m", **config}]})
        [shared] = with_shared_limits([judge], ShardEngine.model_validate(engine))
        assert isinstance(shared, Judge)
        return shared.engines[0].concurrency, shared.engines[0].requests_per_minute  # type: ignore[attr-defined]

    assert limits({"type": "ray", "workers": 5}, requests_per_minute=99) == (6, 19)
    assert limits({"type": "here", "workers": 5}, requests_per_minute=99) == (32, 99)
    assert limits({"workers": 5}) == (32, None)
    monkeypatch.setattr(engines, "workers_of", lambda engine: 3)
    assert limits({"type": "processes"}) == (10, None)
    with pytest.raises(StoreError, match=r"judge, engine m: requests_per_minute: 4 cannot be shared by 5 workers; set"):
        limits({"type": "slurm", "workers": 5}, requests_per_minute=4)
    with pytest.raises(StoreError, match=r"number is not known with ray; set execution\.engine\.workers"):
        limits({"type": "ray"})
    with pytest.raises(StoreError, match=r"max_cost: 2 cannot be kept by workers"):
        limits({"type": "ray", "workers": 2}, max_cost=2, price_prompt=1)


def test_rows_whose_file_was_compacted_away_come_from_the_table(tmp_path: Path) -> None:
    from agentrl.datastore.upkeep.compaction import compact
    from agentrl.datastore.upkeep.retention import vacuum

    harness = Harness(tmp_path)
    ids = harness.trajectories(rows()[:9]).ids() + harness.trajectories(rows()[9:12]).ids()
    asked = [ids[11], ids[0], ids[10]]
    [pieces] = divided_scores.pieces_of_batches(harness.buffer, [asked])
    before = rows_of(harness.buffer.store, pieces, asked)
    assert [row.trajectory_id for row in before] == asked
    compact(harness.buffer)
    vacuum(harness.buffer, retention_hours=0, dry_run=False)
    after = rows_of(harness.buffer.store, pieces, asked)
    assert [row.model_dump_json() for row in after] == [row.model_dump_json() for row in before]
    with pytest.raises(FileNotFoundError):
        rows_of(str(tmp_path / "elsewhere"), pieces, asked)
