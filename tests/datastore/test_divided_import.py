"""An import gives the same rows, notes and counts however its files are divided, by whatever reads them, and after
kills."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from divided_files import imported, write_files

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.datastore.formats import divided, parts
from agentrl.datastore.formats.source import Source
from agentrl.datastore.shards import queued
from agentrl.datastore.shards.engines import engine_of
from agentrl.datastore.shards.local import LocalProcesses
from agentrl.datastore.shards.shard import Shard, ShardError
from agentrl.datastore.shards.worker import installed, tried
from agentrl.pipelines.harness import Harness
from agentrl.pipelines.stages.imports import ImportConfig, import_
from agentrl.schemas.pipeline import ShardEngine

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_SIZE", 3000)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def expected(files: list[str], tmp_path: Path) -> dict[str, Any]:
    """As forks of this process read them, without an engine."""
    answer = imported(tmp_path / "expected", files, None)
    assert len(answer["rows"]) == 151
    assert len(answer["unreadable"]) == 2
    assert answer["ignored"]["odd"] == 76
    return answer


@pytest.mark.parametrize("shards", [1, 7, 64])
def test_shards_change_nothing(files: list[str], expected: object, tmp_path: Path, shards: int) -> None:
    assert imported(tmp_path / "store", files, {"type": "here", "shards": shards}) == expected
    assert not list((tmp_path / "store" / "tmp").glob("import*/shards"))


def test_a_stage_reads_by_its_engine(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided, "PARTS", 2)
    told: list[Any] = []

    def came(folder: str, engine: ShardEngine) -> tuple[list[str], object]:
        context = Harness(tmp_path / folder)._context("import")
        context.engine, context.progress = engine, lambda *state, **more: told.append((*state, *more.values()))
        config = ImportConfig.model_validate({"paths": files, "quarantine": True})
        rows = import_(context, config)["trajectories"].read()
        return [row.model_dump_json(exclude={"created_at"}) for row in rows], context.metrics

    expected = came("forks", ShardEngine())
    assert told == []
    assert came("shards", ShardEngine(type="here")) == expected
    assert told[-1][0] == told[-1][1] > 1
    assert str(told[-1][2]) == "files"


@pytest.mark.slow
@pytest.mark.ci
def test_processes_give_the_same(files: list[str], expected: object, tmp_path: Path) -> None:
    assert imported(tmp_path / "store", files, {"type": "processes", "workers": 2, "shards": 5}) == expected


@pytest.mark.slow
def test_jobs_of_slurm_give_the_same(
    files: list[str], expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{HERE / 'slurm_commands'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "spool"))
    monkeypatch.setattr(queued, "LOOK_S", 0.2)
    (tmp_path / "spool").mkdir()
    assert imported(tmp_path / "store", files, {"type": "slurm", "workers": 2, "shards": 2}) == expected


@pytest.mark.slow
def test_two_nodes_of_ray_give_the_same(files: list[str], expected: object, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
        assert imported(tmp_path / "store", files, {"type": "ray", "shards": 5}) == expected
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_kills_of_workers_and_of_the_driver_change_nothing(files: list[str], expected: object, tmp_path: Path) -> None:
    """Each kill of a worker is made good by another try; each of the driver by the next command, which reads no part
    that is there."""
    store, result = tmp_path / "store", tmp_path / "result.json"
    command = [sys.executable, str(HERE / "divided_files.py"), str(store), str(result), *files]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), *sys.path])}
    killed = {"driver": 0, "worker": 0}
    while not result.exists():
        driver = subprocess.Popen(command, env=env, start_new_session=True)
        work = store / "tmp"
        while driver.poll() is None:
            time.sleep(0.05)
            workers = psutil.Process(driver.pid).children() if driver.poll() is None else []
            done = len(list(work.glob("import*/shards/files/*.rows")))
            if workers and done >= 2 * (killed["driver"] + 1) and killed["driver"] < 2:
                driver.kill()
                killed["driver"] += 1
            elif workers and killed["worker"] < 5:
                os.kill(workers[0].pid, signal.SIGKILL)
                killed["worker"] += 1
        assert driver.wait() in (0, -signal.SIGKILL)
    assert killed == {"driver": 2, "worker": 5}
    assert json.loads(result.read_text()) == json.loads(json.dumps(expected))


def test_a_part_with_an_error_is_no_checkpoint(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = Path(files[0]).read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "score" in line) + "{broken\n")
    with pytest.raises(StoreError, match=r"rows\.jsonl:119.*--quarantine"):
        imported(tmp_path / "store", [str(path)], {"type": "here"}, quarantine=False)
    assert TrajectoryBuffer(tmp_path / "store").stats()["rows"] == 1, "the one from before"
    made = list((tmp_path / "store").glob("tmp/import*/shards/files/*.rows"))
    assert len(made) == len(list(parts.lines(Source(path)))) - 1 > 2


def test_a_worker_that_sees_no_such_file_or_another_one_says_so(files: list[str]) -> None:
    file = divided._Elsewhere(Path(files[0]), "a", None, 1, False, False, 7)  # type: ignore[arg-type]
    with pytest.raises(
        StoreError, match=r"has \d+ bytes here, and 7 where the run is; mount one folder on all workers"
    ):
        file.open()
    absent = divided._Elsewhere(Path("/absent/a.jsonl"), "a", None, 1, False, False, 7)  # type: ignore[arg-type]
    shard = Shard("rows of a", f"{divided.__name__}:read_parts", ([], {0: absent}, None))
    ending = tried(pickle.dumps(shard), installed())
    assert ending.problem is not None
    assert "/absent/a.jsonl" in ending.problem
    assert "this worker does not see the folder: mount it on all workers" in ending.problem


def test_an_engine_is_named_as_in_a_pipeline() -> None:
    assert engine_of("ray") == engine_of({"type": "ray"}) == engine_of("{type: ray}")
    with pytest.raises(StoreError, match=r"engine 'dask': type: .*'processes'"):
        engine_of("dask")
    with pytest.raises(StoreError, match="worker: Extra inputs are not permitted"):
        engine_of("{type: ray, worker: 3}")
    with pytest.raises(StoreError, match="is no YAML"):
        engine_of("{type: ray")


def test_what_cannot_be_sent_is_named() -> None:
    pool = LocalProcesses(1)
    with pytest.raises(ShardError, match=r"shard 'a' cannot be sent to another process: .*\{type: here\}"):
        pool.start([Shard("a", "m:f", (lambda: None,))])
    assert pool.pids == []
