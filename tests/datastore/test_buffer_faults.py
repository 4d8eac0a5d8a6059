"""Faults that a buffer must survive. Processes are really killed, disks are really full."""

import os
import random
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from store_rows import FP, build

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.errors import StoreError
from agentrl.datastore.upkeep import check

ROWS = 40
HERE = Path(__file__).parent


def worker(store: str, first: int, last: int, rows: int = ROWS) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "append_worker.py"), store, str(first), str(last), str(rows)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def numbers(store: str | Path) -> list[int]:
    return sorted(int(name[-6:]) for name in TrajectoryBuffer(store).ids(FP))


def kill_and_resume(store: str, shards: int, seed: int) -> int:
    """Run a worker until all shards are in, killing it again and again at random moments. Gives the kills."""
    moments = random.Random(seed)
    kills = 0
    while True:
        process = worker(store, 0, shards)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun to append
        try:
            process.wait(moments.uniform(0.2, 2.0))
            return kills
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            counts = numbers(store)
            assert len(counts) == len(set(counts))
            assert len(counts) % ROWS == 0  # shards are whole or absent
            assert kills < 200


@pytest.mark.slow
def test_kill_dash_nine_in_the_middle_of_appends(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    kills = kill_and_resume(store, 50, seed=1)
    assert kills >= 1
    assert numbers(store) == list(range(50 * ROWS))
    assert {problem.kind for problem in check(TrajectoryBuffer(store))} <= {"orphan"}  # what the killed had written


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_dash_nine_many_times(tmp_path: Path, seed: int) -> None:
    store = str(tmp_path / "store")
    kill_and_resume(store, 50, seed)
    assert numbers(store) == list(range(50 * ROWS))


@pytest.mark.parametrize(
    "processes", [pytest.param(3, id="three"), pytest.param(8, id="eight", marks=pytest.mark.slow)]
)
def test_processes_that_append_at_once_lose_and_double_nothing(store: str, processes: int) -> None:
    # neighbours overlap in half their shards, as two runs of one stage would
    started = [worker(store, 2 * i, 2 * i + 4, 10) for i in range(processes)]
    assert [process.wait(120) for process in started] == [0] * processes
    assert numbers(store) == list(range((2 * processes + 2) * 10))
    assert TrajectoryBuffer(store).scan().select(pl.len()).collect().item() == (2 * processes + 2) * 10


@pytest.mark.slow
@pytest.mark.ci
def test_a_full_disk_in_mid_append(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(20_000)], stage="s", fingerprint="a")
    before, files = buffer.version, sorted((tmp_path / "trajectories").iterdir())
    # a limit on the size of files makes writes fail as a full disk does: with an error from the system, part written
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000));"
        "from agentrl.datastore import TrajectoryBuffer; from store_rows import build;"
        f"TrajectoryBuffer({str(tmp_path)!r}).append((build(i) for i in range(20_000)), stage='s', fingerprint='b')"
    )
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "StoreError: append to" in done.stderr
    assert "the table is unchanged" in done.stderr
    assert TrajectoryBuffer(tmp_path).version == before
    assert sorted((tmp_path / "trajectories").iterdir()) == files  # what was written is cleaned up
    assert not buffer.has("b")
    assert not list((tmp_path / "writers").iterdir())
    buffer.append([build(1)], stage="s", fingerprint="b")
    assert check(buffer) == []


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    buffer.append([build(i) for i in range(500)], stage="s", fingerprint=FP)
    [file] = (tmp_path / "trajectories").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(StoreError, match=rf"{file.name}.*agentrl buffer check"):
        TrajectoryBuffer(tmp_path).get(build(3).trajectory_id)


def test_a_corrupt_commit_is_an_error_that_says_so(tmp_path: Path) -> None:
    buffer = TrajectoryBuffer(tmp_path)
    for number in range(2):
        buffer.append([build(number)], stage="s", fingerprint=FP, shard=number)
    commit = sorted((tmp_path / "trajectories/_delta_log").glob("*.json"))[-2]
    commit.write_bytes(commit.read_bytes()[:50])
    with pytest.raises(StoreError, match="agentrl buffer check"):
        TrajectoryBuffer(tmp_path).scan()


@pytest.mark.slow
def test_a_million_rows_stream_in_little_memory(tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.path.insert(0, 'benchmarks');"
        "from agentrl.datastore import TrajectoryBuffer; from buffer_data import make;"
        "batches = (b for i in range(0, 1_000_000, 10_000) for b in make(10_000, i, mean_tokens=50).to_batches());"
        f"r = TrajectoryBuffer({str(tmp_path)!r}).append(batches, stage='s', fingerprint='f');"
        "print(r.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rows, megabytes = map(int, done.stdout.split())
    assert rows == 1_000_000
    assert megabytes < 1024


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        code = (
            "import resource, sys; sys.path.insert(0, 'benchmarks');"
            "from agentrl.datastore import TrajectoryBuffer; from buffer_data import make;"
            f"b = (b for i in range(0, {rows}, 1000) for b in make(1000, i, mean_tokens=100).to_batches());"
            f"TrajectoryBuffer({str(tmp_path / str(rows))!r}).append(b, stage='s', fingerprint='f');"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
        )
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    # 48,000 more rows are 120 MiB of Arrow data; ids of the append are all that may stay
    assert peak(96_000) < peak(48_000) + 80


@pytest.mark.slow
def test_rows_of_a_million_tokens_are_bounded_by_bytes(tmp_path: Path) -> None:
    code = (
        "import resource; from agentrl.datastore import TrajectoryBuffer; from agentrl.datastore.upkeep import compact;"
        "from store_rows import build; n = 1_000_000;"
        "row = lambda i: build(i, input_ids=[j % 50_000 for j in range(n)], n_tokens=n, n_action_tokens=0,"
        " action_mask=[False] * n, logprobs=[float('nan')] * n, messages=[]);"
        f"b = TrajectoryBuffer({str(tmp_path)!r});"
        "b.append((row(i) for i in range(60)), stage='s', fingerprint='f');"
        "[b.append([row(60 + i)], stage='s', fingerprint='f', shard=1 + i) for i in range(4)]; compact(b);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert int(done.stdout) < 1536  # MiB
