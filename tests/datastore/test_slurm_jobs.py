"""Shards as jobs of a real Slurm: what is made again, what is kept, and what users read if jobs do not start."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shard_work
from real_slurm import RealSlurm, real_slurm, until

from agentrl.datastore.shards import queued
from agentrl.datastore.shards.engine import run
from agentrl.datastore.shards.queued import Queued
from agentrl.datastore.shards.shard import Shard, ShardError
from agentrl.datastore.shards.slurm import SlurmJobs
from agentrl.schemas.shards import ShardsNow

pytestmark = pytest.mark.slurm
HERE = Path(__file__).parent


def shard(function: str, path: Path, *more: object) -> Shard:
    return Shard(f"{function} of {path.name}", f"{shard_work.__name__}:{function}", (path, *more))


@pytest.fixture(autouse=True)
def _looked_at_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queued, "LOOK_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@contextmanager
def pool_of(
    folder: Path, workers: int | None = None, *options: str, memory_gib: float | None = None
) -> Iterator[Queued]:
    pool = Queued(folder, SlurmJobs(workers, memory_gib, options), workers)
    try:
        yield pool
    finally:
        pool.close()


def silent(*state: object) -> None:
    pass


def test_jobs_that_die_are_made_again_and_the_last_is_named(tmp_path: Path, slurm: RealSlurm) -> None:
    shards = [shard("write", tmp_path / f"{number}", "done") for number in range(6)]
    shards += [shard("dies", tmp_path / "dies", 1), shard("dies", tmp_path / "bad", 99)]
    what = (
        r"'dies of bad' ended its process 3 times.*at last on .*: the job is gone: \d+_0 is FAILED \(NonZeroExitCode\)"
    )
    with pool_of(tmp_path) as pool, pytest.raises(ShardError, match=what):
        run(shards, pool, silent)
    assert [(tmp_path / f"{name}").read_text() for name in (*range(6), "dies")] == ["done"] * 7
    until(lambda: not slurm.jobs())


def test_no_more_jobs_run_at_once_than_workers_also_if_shards_are_made_again(tmp_path: Path, slurm: RealSlurm) -> None:
    """Limits of endpoints are divided among ``workers``."""
    shards = [shard("alone", tmp_path / f"{number}", tmp_path / "busy") for number in range(4)]
    shards += [shard("dies", tmp_path / "dies", 2), shard("full_disk", tmp_path / "full", 2)]
    with pool_of(tmp_path, 1) as pool:
        run(shards, pool, silent)
    assert len(list(tmp_path.glob("*.tries"))) == 2


def test_an_array_larger_than_the_cluster_and_than_slurm_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [shard("write", tmp_path / f"{number}", "done") for number in range(12)]
    with real_slurm("MaxArraySize=5") as small:
        small.entered(monkeypatch)
        sent: list[int] = []
        with pool_of(tmp_path) as pool:
            assert pool.room == 5
            start = pool.start
            monkeypatch.setattr(pool, "start", lambda shards: (sent.append(len(shards)), start(shards))[1])
            run(shards, pool, silent)
    assert sum(sent) == 12
    assert max(sent) == 5
    assert all((tmp_path / f"{number}").exists() for number in range(12))


@pytest.mark.parametrize(
    ("option", "memory_gib", "what"),
    [
        (
            "--partition=gpus",
            None,
            "sbatch failed: invalid partition specified: gpus; Batch .*; change memory_gib, gpus or options",
        ),
        (
            "--comment=x",
            50,
            "sbatch failed: Memory specification can not be satisfied; Batch .*; change memory_gib, gpus or opt",
        ),
        (
            "--gres=gpu:1",
            None,
            r"sbatch failed: Invalid generic resource \(gres\) specification; change memory_gib, gpus",
        ),
    ],
)
def test_what_slurm_refuses_is_said_in_a_line(
    tmp_path: Path, slurm: RealSlurm, option: str, memory_gib: float | None, what: str
) -> None:
    with pool_of(tmp_path, None, option, memory_gib=memory_gib) as pool, pytest.raises(ShardError, match=what) as error:
        run([shard("write", tmp_path / "x", "")], pool, silent)
    assert "\n" not in str(error.value)
    assert not slurm.jobs()


class Told(list[ShardsNow]):
    """What the progress of a stage is told, until a notice, which ends the run."""

    def __call__(self, done: int, total: int, now: ShardsNow) -> None:
        self.append(now)
        if now.notice:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("options", "change", "undo", "reason"),
    [
        (["--cpus-per-task=5"], "", "", "PartitionConfig"),
        ([], "partitionname=all state=down", "partitionname=all state=up", "PartitionDown"),
        (
            ["--time=10"],
            "partitionname=all maxtime=5",
            "partitionname=all maxtime=infinite",
            "Partition(TimeLimit|Config)",
        ),
        (["--hold"], "", "", "JobHeldUser"),
        (
            [],
            "nodename=n1,n2 state=drain reason=x",
            "nodename=n1,n2 state=resume",
            "(Nodes required .* DOWN|ReqNodeNotAvail)",
        ),
    ],
)
def test_why_jobs_wait_that_nothing_starts_is_said(
    tmp_path: Path, slurm: RealSlurm, options: list[str], change: str, undo: str, reason: str
) -> None:
    told = Told()
    if change:
        slurm.ask("scontrol", "update", *change.split())
    try:
        with pool_of(tmp_path, None, *options) as pool, pytest.raises(KeyboardInterrupt):
            run([shard("write", tmp_path / f"{number}", "") for number in range(2)], pool, told)
    finally:
        if undo:
            slurm.ask("scontrol", "update", *undo.split())
    notice = rf"Slurm does not start 2 of 2 jobs: {reason}.* \(see `scontrol show job \d+_0`\)"
    assert re.fullmatch(notice, told[-1].notice), told[-1].notice
    assert told[-1].counts == {"waiting": 2}
    assert str(told[-1]).endswith(told[-1].notice)
    until(lambda: not slurm.jobs())


def test_jobs_that_wait_for_others_are_no_reason_to_say_anything(tmp_path: Path, slurm: RealSlurm) -> None:
    notices: set[str] = set()
    with pool_of(tmp_path, 1) as pool:
        shards = [shard("alone", tmp_path / f"{number}", tmp_path / "busy") for number in range(3)]
        run(shards, pool, lambda done, total, now: notices.add(now.notice))
    assert notices == {""}


def test_a_job_that_takes_more_memory_than_it_asked_for_is_named(tmp_path: Path, slurm: RealSlurm) -> None:
    what = r"'takes of x' ended its process 3 times.* is \w+ .*: slurmstepd.*Exceeded job memory limit.*more memory"
    with pool_of(tmp_path, memory_gib=0.3) as pool, pytest.raises(ShardError, match=what):
        run([shard("takes", tmp_path / "x", 600)], pool, silent)


def test_jobs_have_threads_for_their_processors_and_nothing_of_the_allocation_that_submits_them(
    tmp_path: Path, slurm: RealSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {"SLURM_CPUS_PER_TASK": "7", "SLURM_MEM_PER_NODE": "9", "SQUEUE_STATES": "SUSPENDED"}.items():
        monkeypatch.setenv(name, value)
    for number, options in enumerate(([], ["--cpus-per-task=2"])):
        with pool_of(tmp_path, None, *options) as pool:
            run([shard("sees", tmp_path / f"{number}", "OMP_NUM_THREADS")], pool, silent)
    assert [(tmp_path / name).read_text() for name in ("0", "1")] == ["1", "2"]


def test_jobs_of_a_run_that_was_killed_are_cancelled_by_the_next(tmp_path: Path, slurm: RealSlurm) -> None:
    killed = Queued(tmp_path, SlurmJobs(1), 1)  # nobody closes it
    killed.start([shard("waits", tmp_path / f"{number}", tmp_path / "never") for number in range(3)])
    until(lambda: len(slurm.jobs()) == 3 and slurm.workers())
    with pool_of(tmp_path) as pool:
        run([shard("write", tmp_path / "x", "done")], pool, silent)
    until(lambda: not slurm.jobs())
    assert not slurm.workers()


def test_a_controller_that_is_away_for_a_while_costs_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks that were answered "nothing" would take every job for lost."""
    notices: list[str] = []
    away, back = tmp_path / "away", tmp_path / "back"
    shards = [shard("waits", tmp_path / "0", back), shard("waits", tmp_path / "1", away, 1)]

    def tell(done: int, total: int, now: ShardsNow) -> None:
        if now.counts == {"running": 2} and not away.exists():
            cluster.kill("slurmctld")
            away.touch()
        if now.notice and len(notices) < 2:
            notices.append(now.notice)
            if len(notices) == 2:
                cluster.start_controller()
                back.touch()

    with real_slurm("MessageTimeout=3") as cluster:
        cluster.entered(monkeypatch)
        with pool_of(tmp_path) as pool:
            run(shards, pool, tell)
    assert all("Slurm's controller does not answer" in notice for notice in notices), notices
    assert [(tmp_path / f"{number}.tries").stat().st_size for number in range(2)] == [1, 2]
