"""A curation gives the same ids and reasons however it is divided, by whatever it runs, and after kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from divided_rows import BY_VECTORS, RULES, filled, kept, rows

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation import curate as curation
from agentrl.datastore.curation import diversity, kernels, pieces, semantic
from agentrl.datastore.curation.contamination import HeldOut
from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.search import vectors
from agentrl.datastore.search.embedding import LatentEmbedder
from agentrl.datastore.shards import queued
from agentrl.datastore.shards.divide import in_this_process
from agentrl.datastore.shards.shard import Shard, ShardError
from agentrl.datastore.storage.object_store import LocalStorage
from agentrl.datastore.upkeep.compaction import compact
from agentrl.datastore.upkeep.retention import vacuum
from agentrl.schemas.pipeline import ShardEngine

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def given() -> list:
    return rows(600)


@pytest.fixture(scope="module")
def expected(given: list, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, str]]:
    """Of the rows in one file, in one shard."""
    answer = kept(filled(tmp_path_factory.mktemp("whole"), given, 1), ShardEngine(type="here", shards=1))
    counts = Counter(answer[1].values())
    assert len(counts) == 5, "each rule drops rows"
    assert len(answer[0]) > 100
    return answer


@pytest.mark.parametrize("shards", [7, 64, None])
def test_shards_and_the_order_of_rows_change_nothing(
    tmp_path: Path, given: list, expected: object, shards: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_ROWS", 50)
    order = np.random.default_rng(shards or 3).permutation(len(given))
    buffer = filled(tmp_path, [given[number] for number in order], 3)
    assert kept(buffer, ShardEngine(type="here", shards=shards)) == expected


def test_evidence_is_made_once_and_goes_with_its_file(
    tmp_path: Path, given: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Counter[str]()
    texts = kernels._conversations

    def counted(table: object) -> object:
        for row in texts(table):  # type: ignore[arg-type]
            read["rows"] += 1
            yield row

    monkeypatch.setattr(kernels, "_conversations", counted)
    buffer = filled(tmp_path, given[:-20], 3)
    rule = {"rule": "near_duplicates", "scope": "all"}
    near = Rules.model_validate({"rules": [rule]}).rules
    first = curation.curate(buffer, near).ids.to_pylist()
    assert read.pop("rows") > len(given) - 20, "all rows, and those that are compared once more"
    assert curation.curate(buffer, near).ids.to_pylist() == first
    assert not read, "all that is needed was kept"
    buffer.append(given[-20:], stage="rollout", fingerprint="g")
    later = curation.curate(buffer, near).ids.to_pylist()
    assert 20 <= read.pop("rows") < 120, "new rows, and those that they are compared with"
    few = [row.trajectory_id for row in given[:5]]
    curation.curate(buffer, Rules.model_validate({"rules": [rule | {"compare": ["reasoning"]}]}).rules, ids=few)
    assert read.pop("rows") <= 10, "of few rows of a file no evidence of the others is made"
    evidence = tmp_path / "tmp" / "evidence" / "sketch-question-actions-2"
    assert len(list(evidence.iterdir())) == 4
    compact(buffer)
    assert curation.curate(buffer, near).ids.to_pylist() == later
    older = evidence.with_name("sketch-question-actions-1")
    (older / next(evidence.iterdir()).name).mkdir(parents=True)
    vacuum(buffer, retention_hours=0, dry_run=False)
    assert len(list(evidence.iterdir())) == 1
    assert not older.exists(), "no curation reads it any more"
    assert curation.curate(buffer, near).ids.to_pylist() == later


def test_verdicts_on_leaks_are_kept_by_what_is_held_out(
    tmp_path: Path, given: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Counter[str]()
    within = HeldOut.in_conversation
    monkeypatch.setattr(HeldOut, "in_conversation", lambda *arguments: (read.update(["rows"]), within(*arguments))[1])
    clean = Rules.model_validate({"rules": [RULES[0]]}).rules

    def left(folder: Path, heldout: str = "") -> list[str]:
        return curation.curate(TrajectoryBuffer(folder), clean, heldout=[heldout] if heldout else []).ids.to_pylist()

    few = [row for row in given if row.split == "train"][-20:]
    older = [row for row in given if row not in few]
    buffer = filled(tmp_path / "kept", older, 3)
    first = left(tmp_path / "kept")
    assert read.pop("rows") == len(older), "held-out rows too, with the pieces that they are in"
    assert left(tmp_path / "kept") == first
    assert not read, "all that is needed was kept"
    buffer.append(few, stage="rollout", fingerprint="g")
    later = left(tmp_path / "kept")
    assert read.pop("rows") == len(few)
    other = left(tmp_path / "kept", older[0].prompt)
    assert read.pop("rows") > len(few), "another set is held out"
    filled(tmp_path / "new", [*older, *few], 2)
    assert (left(tmp_path / "new"), left(tmp_path / "new", older[0].prompt)) == (later, other)
    assert len(other) < len(later) < len(given)


def test_vectors_are_the_same_however_texts_are_divided(
    tmp_path: Path, given: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = filled(tmp_path, given)
    monkeypatch.setattr(vectors, "TEXTS", 50)
    monkeypatch.setattr(semantic, "TEXTS", 50)
    monkeypatch.setattr(diversity, "DISTANCES", 0)
    expected = kept(buffer, ShardEngine(), rules=BY_VECTORS)
    assert len(set(expected[1].values())) == 4, "each rule drops rows"
    vectors._model.cache_clear()
    for shards in (None, 1, 7):
        assert kept(buffer, ShardEngine(type="here", shards=shards), tmp_path / f"{shards}", BY_VECTORS) == expected
        assert len(list((tmp_path / f"{shards}").glob("vectors-*/*.npz"))) > 7
        assert len(list((tmp_path / f"{shards}").glob("centers-*/*.vectors.npy"))) == 2
    again = filled(tmp_path / "again", [given[number] for number in np.random.default_rng(1).permutation(len(given))])
    assert kept(again, ShardEngine(type="here"), rules=BY_VECTORS) == expected
    assert vectors._model.cache_info().misses == 4, "each curation loaded its model once"


def test_core_sets_cover_nearly_as_well_and_depend_on_the_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversity, "DISTANCES", 0)
    numbers = np.random.default_rng(0)
    points = (numbers.normal(size=(3000, 4)) * numbers.choice([0.1, 1, 3], (3000, 1))).astype(np.float32)
    keys = numbers.integers(0, 2**64, len(points), np.uint64)

    def covered(taken: list[int]) -> float:
        return max(np.sqrt(((points[taken] - point) ** 2).sum(1)).min() for point in points)

    answers = list[list[int]]()
    for shards in (None, 1, 3):
        run = Counter[str]()

        def counted(work: Sequence[Shard], what: str, run: Counter[str] = run) -> None:
            run[what] += len(work)
            in_this_process(work, what)

        folder = tmp_path / f"{shards}"
        division = Division(LocalStorage(folder), [], folder, folder, counted, shards)
        answers.append(diversity.core_sets(points, keys, 60, division))
        assert run["centers"] == {None: 7, 1: 1, 3: 3}[shards]
        assert diversity.core_sets(points, keys, 60, division) == answers[0]
        assert run["centers"] == {None: 7, 1: 1, 3: 3}[shards], "parts that are done are not done again"
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) == 60
    assert answers[0] != diversity.k_center(points, 60)
    assert covered(answers[0]) <= 1.25 * covered(diversity.k_center(points, 60))


def test_an_engine_is_told_that_k_center_runs_here(
    tmp_path: Path, given: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversity, "DISTANCES", 0)
    buffer = filled(tmp_path, given[:100], 1)
    with pytest.warns(UserWarning, match=r"which no engine can divide.*core_sets"):
        kept(buffer, ShardEngine(type="here"), rules=BY_VECTORS[2:3])


def test_workers_with_different_models_are_refused(
    tmp_path: Path, given: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(LatentEmbedder):
        loaded = 0

        @classmethod
        def load(cls, path: Path) -> LatentEmbedder:
            model = LatentEmbedder.load(path)
            cls.loaded += 1
            model.identity = f"model {cls.loaded}"
            return model

    monkeypatch.setattr(vectors, "TEXTS", 50)
    monkeypatch.setattr(semantic, "TEXTS", 50)
    monkeypatch.setattr(vectors, "LatentEmbedder", Other)
    monkeypatch.setattr(vectors, "_model", vectors._model.__wrapped__)
    with pytest.raises(ShardError, match=r"different models under the name 'embedded': model 1, model 2"):
        kept(filled(tmp_path, given), ShardEngine(type="here", shards=2), rules=BY_VECTORS[1:2])


@pytest.mark.slow
def test_processes_that_embed_give_the_same(tmp_path: Path, given: list) -> None:
    buffer = filled(tmp_path, given)
    engine = ShardEngine(type="processes", workers=2, shards=3)
    assert kept(buffer, engine, rules=BY_VECTORS) == kept(buffer, ShardEngine(), rules=BY_VECTORS)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_processes_give_the_same(tmp_path: Path, given: list, expected: object, workers: int) -> None:
    assert kept(filled(tmp_path, given), ShardEngine(type="processes", workers=workers, shards=5)) == expected


@pytest.mark.slow
def test_jobs_of_slurm_give_the_same(
    tmp_path: Path, given: list, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{HERE / 'slurm_commands'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "spool"))
    monkeypatch.setattr(queued, "LOOK_S", 0.2)
    (tmp_path / "spool").mkdir()
    assert kept(filled(tmp_path / "store", given), ShardEngine(type="slurm", workers=2, shards=2)) == expected


@pytest.mark.slow
def test_two_nodes_of_ray_give_the_same(tmp_path: Path, given: list, expected: object) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
        assert kept(filled(tmp_path, given), ShardEngine(type="ray", shards=5)) == expected
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        assert len(nodes) == 2
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_fifty_kills_change_nothing(tmp_path: Path, given: list, expected: object) -> None:
    """Five are of the driver, which is then started again; the others of its workers."""
    store = filled(tmp_path / "store", given)
    result, chance = tmp_path / "result.json", random.Random(0)
    engine = ShardEngine(type="processes", workers=2, shards=40).model_dump_json()
    command = [sys.executable, str(HERE / "divided_rows.py"), store.store, str(tmp_path / "work"), str(result), engine]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), *sys.path])}
    killed = Counter[str]()
    while True:
        driver = subprocess.Popen(command, env=env, start_new_session=True)
        while driver.poll() is None:
            time.sleep(chance.uniform(0.02, 0.3))
            workers = psutil.Process(driver.pid).children() if driver.poll() is None else []
            if workers and killed["driver"] < 5 and killed["worker"] >= 9 * (killed["driver"] + 1):
                driver.kill()
                killed["driver"] += 1
            elif workers and killed["worker"] < 45:
                os.kill(chance.choice(workers).pid, signal.SIGKILL)
                killed["worker"] += 1
        assert driver.returncode in (0, -signal.SIGKILL)
        if driver.returncode == 0 and sum(killed.values()) >= 50:
            break
        if driver.returncode == 0:  # it was done before it was killed often enough: once more from the start
            for folder in (tmp_path / "work", Path(store.store) / "tmp" / "evidence"):
                shutil.rmtree(folder, ignore_errors=True)
    ids, reasons = json.loads(result.read_text())
    assert (ids, reasons) == expected
    assert kept(TrajectoryBuffer(store.store), ShardEngine(type="here")) == expected, "what was kept is whole"
