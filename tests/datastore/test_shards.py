"""Shards in real processes: what is made again, taken over and set aside, and what errors say."""

import os
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import shard_work

from agentrl.datastore.curation.kernels import CallCheck
from agentrl.datastore.curation.pieces import Piece
from agentrl.datastore.errors import StoreError
from agentrl.datastore.shards import engine, queued, ray_tasks
from agentrl.datastore.shards.engine import run
from agentrl.datastore.shards.engines import engine_of, running, shared_folder
from agentrl.datastore.shards.heard import heard
from agentrl.datastore.shards.local import LocalProcesses
from agentrl.datastore.shards.queued import Queued
from agentrl.datastore.shards.ray_tasks import RayTasks
from agentrl.datastore.shards.shard import Shard, ShardError, finished
from agentrl.datastore.shards.slurm import SlurmJobs
from agentrl.datastore.shards.worker import installed, tried
from agentrl.schemas.pipeline import ShardEngine
from agentrl.schemas.shards import ShardsNow


def shard(function: str, path: Path, *more: object) -> Shard:
    return Shard(f"{function} of {path.name}", f"{shard_work.__name__}:{function}", (path, *more))


def silent(done: int, total: int, now: ShardsNow) -> None:
    pass


@pytest.fixture
def processes() -> Iterator[LocalProcesses]:
    pool = LocalProcesses(2)
    yield pool
    pool.close()


def test_all_are_done_and_those_that_end_their_process_are_made_again(
    tmp_path: Path, processes: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SLOW_S", 0.5)
    shards = [shard("write", tmp_path / f"{number}", "done") for number in range(5)]
    shards += [shard("dies", tmp_path / "dies", 2), shard("full_disk", tmp_path / "full", 1)]
    shards += [shard("hangs_once", tmp_path / "hangs")]
    told: list[tuple[int, int, ShardsNow]] = []
    run(shards, processes, lambda *state: told.append(state), "writing")
    written = {path.name for path in tmp_path.iterdir() if path.read_text() == "done"}
    assert written == {"0", "1", "2", "3", "4", "dies", "full", "hangs"}
    assert told[-1] == (8, 8, ShardsNow(what="writing", again=3))
    assert str(told[-1][2]) == "writing, 3 tried again"
    slow = [each for _, _, now in told for each in now.tries if each.state == "slow"]
    assert slow, "it is told that a shard is slow"
    assert "hangs_once of hangs" in {each.shard for each in slow}
    assert all(re.fullmatch(rf"{os.uname().nodename}, process \d+", each.worker) for each in slow)
    assert (tmp_path / "hangs.tries").stat().st_size == 2, "a slow shard is taken over"


def test_what_workers_warn_of_is_warned_of_here_once(
    tmp_path: Path, processes: LocalProcesses, capfd: pytest.CaptureFixture[str]
) -> None:
    shards = [shard("warns", tmp_path / f"{number}", "all say this", f"{number} says that") for number in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        messages: list[str] = []
        with heard(messages, shown=False):
            run(shards, processes, silent)
    assert sorted(messages) == ["0 says that", "1 says that", "2 says that", "all say this"]
    assert "says that" not in capfd.readouterr().err


def test_a_shard_that_always_ends_its_process_is_named_and_set_aside(tmp_path: Path, processes: LocalProcesses) -> None:
    shards = [shard("dies", tmp_path / "bad", 99), *(shard("write", tmp_path / f"{n}", "done") for n in range(3))]
    told: list[tuple[int, int, ShardsNow]] = []
    with pytest.raises(
        ShardError, match=r"'dies of bad' ended its process 3 times and was set aside.*signal 9"
    ) as error:
        run(shards, processes, lambda *state: told.append(state))
    done, total, now = told[-1]
    assert (done, total, now.counts) == (3, 4, {"set aside": 1})
    [aside] = now.tries
    assert (aside.shard, aside.state) == ("dies of bad", "set aside")
    assert "signal 9" in aside.problem
    assert "process" in aside.worker
    assert "the other 3 shards are done" in str(error.value)
    assert all((tmp_path / f"{number}").exists() for number in range(3))
    assert (tmp_path / "bad.tries").stat().st_size == 3
    assert "\n" not in str(error.value)


def test_errors_name_shard_worker_and_remedy(tmp_path: Path, processes: LocalProcesses) -> None:
    host = os.uname().nodename
    with pytest.raises(ShardError, match=rf"'wrong of x' on {host}, process \d+: ValueError: row 7 is no row"):
        run([shard("wrong", tmp_path / "x")], processes, silent)
    with pytest.raises(ShardError, match="does not see the folder: mount it on all workers"):
        run([shard("reads", tmp_path / "x", tmp_path / "absent" / "y")], processes, silent)
    with pytest.raises(ShardError, match=r"3 times and was set aside.*free space on its disk"):
        run([shard("full_disk", tmp_path / "x", 99)], processes, silent)
    other = tried(b"which this version cannot unpickle", "0.0.1 (code 0)")
    assert other.problem is not None
    assert "install the same on all workers" in other.problem
    with pytest.raises(StoreError, match=r"set execution\.engine\.folder"):
        shared_folder(ShardEngine(type="slurm"), "s3://bucket/store")


def test_what_is_missing_where_shards_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(function: str, *given: object) -> str:
        ending = tried(pickle.dumps(Shard("x", function, given)), installed())
        assert ending.problem is not None
        assert ending.worker.startswith(os.uname().nodename)
        assert "\n" not in ending.problem
        return ending.problem

    reason = problem("my_rewards:score")
    assert reason.startswith("ModuleNotFoundError: No module named 'my_rewards'; install it on all workers, or put")
    monkeypatch.delenv("SOME_KEY", raising=False)
    reason = problem("agentrl.pipelines.stage:reveal", "${SOME_KEY}")
    assert "environment variable SOME_KEY is not set" in reason
    assert reason.endswith("set it where workers start, as before `ray start` or `prefect worker start`")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    piece = Piece("a.parquet", 0, 1, np.zeros(1, np.uint32), np.zeros(1, np.uint32))
    make = "agentrl.datastore.curation.pieces:make_evidence"
    reason = problem(make, CallCheck(), [piece], "s3://bucket/store", tmp_path, tmp_path)
    assert "store 's3://bucket/store' cannot be used: " in reason
    assert "AWS_ACCESS_KEY_ID" in reason
    reason = problem(make, CallCheck(), [piece], str(tmp_path / "unseen"), tmp_path, tmp_path)
    assert "unseen/trajectories/a.parquet" in reason
    assert reason.endswith("this worker does not see the folder: mount it on all workers")


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        running(ShardEngine(type="ray"), tmp_path, silent) as run_them,
        pytest.raises(StoreError, match=r"this needs ray, which is not installed: pip install .*\[.*ray"),
    ):
        run_them([shard("write", tmp_path / "0", "")], "writing")


def test_a_node_of_ray_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agentrl.datastore.shards.worker", None)
    worker, problem, again, died = ray_tasks._work()(b"", "1.2.3 (code 0)")
    assert worker == os.uname().nodename
    assert problem.endswith("; install agentrl 1.2.3 (code 0) on all workers")
    assert not again
    assert not died


def test_a_cluster_of_another_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        @staticmethod
        def is_initialized() -> bool:
            return False

        @staticmethod
        def init(**options: object) -> None:
            raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.57.1\n")

    monkeypatch.setattr(ray_tasks, "optional", lambda module, extra: Ray)
    with pytest.raises(ShardError, match=r"refuses this process: Version mismatch: .* Ray: 2\.57\.1; install what it"):
        RayTasks()


def test_a_result_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "result"

    def fails() -> None:
        with finished(path) as unfinished:
            unfinished.write_text("half")
            raise ValueError

    with pytest.raises(ValueError):
        fails()
    assert list(path.parent.iterdir()) == []
    with finished(path) as unfinished:
        unfinished.write_text("whole")
    assert [file.read_text() for file in path.parent.iterdir()] == ["whole"]


@pytest.mark.slow
@pytest.mark.ci
def test_jobs_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for sbatch, squeue and scancel, which start real processes."""
    commands = Path(__file__).parent / "slurm_commands"
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShardError, match="scontrol is not on this machine"):
        SlurmJobs(None)
    monkeypatch.setenv("PATH", f"{commands}:{path}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path / "spool"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(queued, "LOOK_S", 0.2)
    (tmp_path / "spool").mkdir()
    shards = [shard("write", tmp_path / f"{number}", "done") for number in range(2)]
    shards += [shard("dies", tmp_path / "dies", 1), shard("dies", tmp_path / "bad", 99)]
    pool = Queued(tmp_path, SlurmJobs(2, 0.5, ["--partition=cpu"]))
    try:
        with pytest.raises(ShardError, match=r"'dies of bad' ended its process 3 times.*the job is gone"):
            run(shards, pool, silent)
    finally:
        pool.close()
    assert [(tmp_path / name).read_text() for name in ("0", "1", "dies")] == ["done"] * 3
    first = next((tmp_path / "spool").glob("1000.job")).read_text()
    assert "--array 0-3%2" in first
    assert "--partition=cpu --mem=512M" in first


def test_what_settings_of_slurm_rule_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(__file__).parent / 'slurm_commands'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SELECTS", "CR_CORE")
    with pytest.warns(
        UserWarning, match=r"does not reserve memory .*CR_CORE\), so memory_gib: 2 only rules out smaller"
    ):
        assert SlurmJobs(None, 2).most == 1000
    monkeypatch.setenv("FAKE_ARRAY_SIZE", "0")
    with pytest.raises(ShardError, match=r"allows no arrays of jobs \(its MaxArraySize is 0\); choose another engine"):
        SlurmJobs(None)


def test_work_that_is_small_starts_no_process(tmp_path: Path) -> None:
    told: list[tuple[int, int, ShardsNow]] = []
    with running(ShardEngine(), tmp_path, lambda *state: told.append(state)) as run_them:
        run_them([shard("write", tmp_path / "0", str(os.getpid()))], "writing")
        run_them([], "nothing")
    assert told == [(1, 1, ShardsNow(what="writing"))]


def test_options_by_which_jobs_are_found_again_are_refused() -> None:
    for option in ("--array=0-3", "--job-name=mine", "-o", "-Mother", "--wrap", "--clusters=all"):
        with pytest.raises(StoreError, match=rf"options: {option}: jobs are named.* leave it out"):
            engine_of({"type": "slurm", "options": [option]})
    engine_of({"type": "slurm", "options": ["--account=a", "-p", "cpu", "--nodelist=n1", "--mem-per-cpu=1G"]})
