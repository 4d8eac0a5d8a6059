"""Curation of many rows: what it finds, what it costs, and how that grows. Each line is a figure, its target and `met`
or `MISSED`.

    python benchmarks/scale_data.py                 20,000 rows with planted duplicates; 100,000 and 1,000,000 sketches
    ROWS=100000 python benchmarks/scale_data.py     the number of rows; a million take most of an hour
    SKETCHES=10000000 ...                           the larger number of synthetic sketches
    CHECK=1 ...                                     exit code 1 if a target is missed

Rows are those of benchmarks/duplicates.py: of about 500 words, 10 % near duplicates, 3 % at the border, and 15 % from
40 templates whose pairs are all below the threshold. CPU seconds are of the process and all that it started. Synthetic
sketches have the same shares; they go through bands, buckets and estimates, each number in a process of its own, and on
two nodes of Ray.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from duplicates import Planted
from scale_peers import PEERS, cpu

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.curation import duplicates
from agentrl.datastore.curation.curate import curate
from agentrl.datastore.curation.division import Division
from agentrl.datastore.curation.kernels import Sketch
from agentrl.datastore.curation.pieces import PIECE_ROWS, Evidence, Piece
from agentrl.datastore.curation.rules import Rules
from agentrl.datastore.curation.sketches import VALUES
from agentrl.datastore.shards.divide import Divide, Run, in_this_process
from agentrl.datastore.shards.engines import WORTH_IT, running
from agentrl.datastore.shards.shard import Shard
from agentrl.schemas.pipeline import ShardEngine

ROWS = int(os.environ.get("ROWS", "20000"))
SKETCHES = (100_000, int(os.environ.get("SKETCHES", "1000000")))
THRESHOLD = 0.8
APPENDED = 20_000
"""Rows that are held as objects at once, to append them."""
NEAR = Rules.model_validate({"rules": [{"rule": "near_duplicates", "threshold": THRESHOLD, "scope": "all"}]}).rules
SKETCH = Sketch(("actions",))
missed: list[str] = []


def report(what: str, value: float, target: float, unit: str, least: bool = False, digits: int = 2) -> None:
    met = value >= target if least else value <= target
    missed.extend([] if met else [what])
    aim = f"{'>=' if least else '<='} {target:g}"
    print(f"{what:<72} {value:>12,.{digits}f} {unit:<8} {aim:>9}  {'met' if met else 'MISSED'}", flush=True)


def curated(buffer: TrajectoryBuffer, engine: ShardEngine) -> tuple[list[str], float, float]:
    """The ids that are left, CPU seconds and seconds."""
    began, wall = cpu(), time.perf_counter()
    with tempfile.TemporaryDirectory() as work, running(engine, Path(work), ignored) as run:
        ids = curate(buffer, NEAR, divide=Divide(run, engine.shards, Path(work))).ids.to_pylist()
    return ids, cpu() - began, time.perf_counter() - wall


def forget(buffer: TrajectoryBuffer) -> None:
    subprocess.run(["rm", "-rf", str(Path(buffer.store) / "tmp" / "evidence")], check=True)


class Judged(NamedTuple):
    """How many rows were dropped, how many of them wrongly, and of pairs of .8 to .85 and of at least .85 the share of
    which a row was dropped, and how many there are."""

    dropped: int
    wrong: int
    border: tuple[float, int]
    near: tuple[float, int]


def judged(planted: Planted, ids: Iterable[int]) -> Judged:
    """What is right and wrong of the rows that are left."""
    kept = np.zeros(len(planted.texts), dtype=bool)
    kept[list(ids)] = True
    pairs = [(row, int(other)) for row, other in enumerate(planted.copy_of) if other >= 0]
    exact = np.array([planted.similarity(*pair) for pair in pairs])
    hit = np.array([not (kept[row] and kept[other]) for row, other in pairs])
    dropped = np.flatnonzero(~kept).tolist()
    wrong = sum(
        all(planted.similarity(row, other) < THRESHOLD for other in planted.family(row) if kept[other])
        for row in dropped
    )
    border, near = (exact >= THRESHOLD) & (exact < 0.85), exact >= 0.85
    shares = ((float(hit[inside].mean()), int(inside.sum())) for inside in (border, near))
    return Judged(len(dropped), wrong, *shares)


def peers(planted: Planted, ours: float) -> None:
    """Print what other packages make of the same texts, beside our rows for each CPU second."""
    interpreter = os.environ.get("PEERS", "")
    if not Path(interpreter).is_file():
        print("peers: PEERS names no interpreter that has them; `make bench-scale-data` does")
        return
    with tempfile.TemporaryDirectory() as name:
        texts, out = Path(name, "texts.parquet"), Path(name, "kept.json")
        prefix = ["write text " if template >= 0 else "" for template in planted.template]  # as our rule reads a call
        whole = [before + text for before, text in zip(prefix, planted.texts, strict=True)]
        pq.write_table(pa.table({"id": range(len(whole)), "text": whole}), texts)
        for peer in PEERS:
            command = [interpreter, str(Path(__file__).with_name("scale_peers.py")), peer, str(texts), str(out)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{peer}: failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            made = json.loads(out.read_text())
            speed, result = len(whole) / made["cpu_s"], judged(planted, made["kept"])
            print(
                f"{peer}: {speed:,.0f} rows/s, peak {made['peak_mb']:,.0f} MB; {result.wrong:,} of "
                f"{result.dropped:,} rows dropped wrongly; pairs found at 0.8 to 0.85 {result.border[0]:.3f}, above "
                f"{result.near[0]:.3f}"
            )
            report(f"  rows per CPU second, of those of {peer}", ours / speed, 1, "times", True)


def end_to_end() -> None:
    planted = Planted(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        buffer, first_rows = TrajectoryBuffer(folder), ROWS * 99 // 100
        rows = planted.trajectories()
        for start in range(0, first_rows, APPENDED):
            some = list(islice(rows, min(APPENDED, first_rows - start)))
            buffer.append(some, stage="bench", fingerprint=f"bench-{start}")
        curated(TrajectoryBuffer(folder), ShardEngine(type="here"))  # imports, and tables of constants
        forget(buffer)
        ids, first, wall = curated(buffer, ShardEngine(type="here"))
        speed = first_rows / first
        report("near_duplicates, all rows, end to end", speed, 4_000, "rows/s", True, 0)
        print(f"  {first:.1f} CPU s, {wall:.1f} s")
        verified = sum(len(np.load(path)) for path in Path(folder).glob("tmp/evidence/grams-*/verified/*.npy"))
        report("verified pairs for each row", verified / ROWS, 5, "")
        forget(buffer)
        again, both, wall_2 = curated(buffer, ShardEngine(type="processes", workers=2))
        report("ids that differ with two processes", len(set(ids) ^ set(again)), 0, "ids", digits=0)
        two_processes(both / first, wall / wall_2)
        forget(buffer)
        by_jobs(buffer, ids)
        forget(buffer)
        peaks(folder)
        for shards in (1, 7, 64):
            forget(buffer)
            again, _, _ = curated(buffer, ShardEngine(type="here", shards=shards))
            report(f"ids that differ in {shards} shards", len(set(ids) ^ set(again)), 0, "ids", digits=0)
        buffer.append(list(rows), stage="bench", fingerprint="later")
        ids, second, _ = curated(buffer, ShardEngine(type="here"))
        report("second curation, after 1 % new rows, of the first's CPU", 100 * second / first, 5, "%")
    result = judged(planted, [int(name[-6:]) for name in ids])
    report(f"rows dropped wrongly, of {result.dropped:,}", result.wrong, 0, "rows", digits=0)
    report(f"pairs found at 0.8 to 0.85, of {result.border[1]:,}", result.border[0], 0.95, "", True, 3)
    report(f"pairs found at 0.85 to 1, of {result.near[1]:,}", result.near[0], 0.99, "", True, 3)
    peers(planted, speed)


def two_processes(cpu_times: float, wall_times: float) -> None:
    """Report what two processes cost and bring, if there are so many rows that they are used without being asked for:
    below, a worker's start counts too much."""
    if ROWS < WORTH_IT * PIECE_ROWS:
        print(
            f"two processes, not judged below {WORTH_IT * PIECE_ROWS:,} rows, where one is the default: "
            f"{cpu_times:.2f} times the CPU seconds, {wall_times:.2f} times as fast"
        )
        return
    report("CPU seconds with two processes, of those of one", cpu_times, 1.25, "times")
    report(f"  by the clock, at a load of {os.getloadavg()[0]:.1f}", wall_times, 1.8, "times", True)


def by_jobs(buffer: TrajectoryBuffer, ids: list[str]) -> None:
    """Print how long arrays of jobs take, and report whether they leave the same rows, if a Slurm answers."""
    if not shutil.which("sinfo") or subprocess.run(["sinfo"], capture_output=True, check=False).returncode:
        print("jobs of Slurm: not run, since sinfo does not answer here (tests: make test-slurm)")
        return
    with tempfile.TemporaryDirectory() as work, running(ShardEngine(type="slurm"), Path(work), ignored) as run:
        began = time.perf_counter()
        run([Shard("nothing", "time:sleep", (0,))], "nothing")
        alone = time.perf_counter() - began
    again, own, took = curated(buffer, ShardEngine(type="slurm"))
    report("ids that differ with jobs of Slurm", len(set(ids) ^ set(again)), 0, "ids", digits=0)
    print(f"  {took:.1f} s, {own:.1f} CPU s of the driver; a job that does nothing {alone:.1f} s")


def peaks(store: str) -> None:
    """Report the peak memory of a process that curates a store with two workers, and that of the larger worker: memory
    of their own, without the pages of files that they map, which the system may take back."""
    command = [sys.executable, __file__, "curate", store]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    driver, worker, mapped = map(float, done.stdout.split())
    report("peak of the driver, with two processes", driver, 1_500, "MB", digits=0)
    report("peak of a worker", worker, 600, "MB", digits=0)
    print(f"  with mapped files {mapped:,.0f} MB")


def curate_alone(store: str) -> None:
    """Print the peak of this process, that of its larger worker, and that with mapped files, in MB, of a curation by
    two workers."""
    engine = ShardEngine(type="processes", workers=2)
    own, at_work = {"self": 0.0, "worker": 0.0}, threading.Event()

    def look() -> None:
        while not at_work.wait(0.02):
            own["self"] = max(own["self"], of_status("self", "RssAnon"))
            for child in psutil.Process().children():
                with contextlib.suppress(OSError):
                    own["worker"] = max(own["worker"], of_status(str(child.pid), "RssAnon"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with tempfile.TemporaryDirectory() as work, running(engine, Path(work), ignored) as run:
            curate(TrajectoryBuffer(store), NEAR, divide=Divide(run, None, Path(work)))
            mapped = max(of_status(str(child.pid), "VmHWM") for child in psutil.Process().children())
    finally:
        at_work.set()
        watcher.join()
    print(own["self"], own["worker"], mapped)


def of_status(process: str, name: str) -> float:
    """What the system says of a process, in MB; of its peak, getrusage() has that of the process that started it."""
    status = Path("/proc", process, "status").read_text()
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(name)), 0.0)


def pieces(rows: int, kept: Path) -> Iterator[Piece]:
    """Pieces of a file that does not exist, with evidence: 13 % of rows like another one of the piece, 15 % of 40
    templates at a similarity of .755."""
    random, templates = np.random.default_rng(0), np.random.default_rng(1).integers(0, 2**31, (40, VALUES), np.uint32)
    for start in range(0, rows, PIECE_ROWS):
        size = min(PIECE_ROWS, rows - start)
        values = random.integers(0, 2**31, (size, VALUES), np.uint32)
        kind = random.random(size)
        like = np.flatnonzero(kind < 0.13)
        originals = values[random.integers(0, size, len(like))]
        same = random.random((len(like), VALUES)) < random.uniform(0.8, 1, (len(like), 1))
        values[like] = np.where(same, originals, values[like])
        templated = np.flatnonzero(kind > 0.85)
        same = random.random((len(templated), VALUES)) < 0.869  # of two rows .755 are equal
        values[templated] = np.where(same, templates[random.integers(0, 40, len(templated))], values[templated])
        piece = Piece("drawn.parquet", start, start + size, np.arange(size, dtype=np.uint32),
                      np.arange(start, start + size, dtype=np.uint32))  # fmt: skip
        path = piece.path(SKETCH, kept, kept)
        path.parent.mkdir(parents=True, exist_ok=True)
        lists = pa.FixedSizeListArray.from_arrays(values.ravel(), VALUES)
        sizes = pa.FixedSizeListArray.from_arrays(np.full(size, 500, np.uint32), 1)
        batch = pa.RecordBatch.from_arrays([lists, sizes], ["sketch", "sizes"])
        with pa.ipc.new_file(path, batch.schema) as writer:
            writer.write_batch(batch)
        yield piece


def pairs_of(rows: int, folder: Path, run: Run) -> tuple[int, float]:
    """How many pairs of synthetic sketches are to be compared, and CPU seconds of this process."""
    evidence = Evidence(SKETCH, list(pieces(rows, folder / "kept")), folder / "kept", folder)
    division = Division(TrajectoryBuffer(folder / "store").storage, [], folder / "kept", folder, run)
    began = cpu()
    pairs = duplicates.candidates(evidence, np.zeros(rows, np.uint64), THRESHOLD, division)
    return len(pairs), cpu() - began


def reduce(rows: int) -> None:
    """Print CPU seconds, the peak in MB, and pairs for each row."""
    with tempfile.TemporaryDirectory() as name:
        pairs, took = pairs_of(rows, Path(name), in_this_process)
    print(took, of_status("self", "VmHWM"), pairs / rows)


def on_ray() -> None:
    """The same on two nodes of Ray, of one CPU each. CPU seconds are of this process and of the nodes' workers."""
    if importlib.util.find_spec("ray") is None:
        print("two nodes of Ray: not run, since ray is not installed")
        return
    import ray
    from ray.cluster_utils import Cluster

    def of_workers() -> float:
        workers = [child for child in psutil.Process().children(True) if child.name().startswith("ray::")]
        return sum(sum(worker.cpu_times()[:2]) for worker in workers)

    cluster, took = Cluster(initialize_head=True, head_node_args={"num_cpus": 1}), list[float]()
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    for rows in (SKETCHES[0], *SKETCHES):  # the first time workers load their modules
        with tempfile.TemporaryDirectory() as name, running(ShardEngine(type="ray"), Path(name), ignored) as run:
            began = of_workers()
            own = pairs_of(rows, Path(name), run)[1]
            took.append(own + of_workers() - began)
    for rows, seconds in zip(SKETCHES, took[1:], strict=True):
        print(f"{rows:,} synthetic sketches on two nodes of Ray: {seconds * 1e7 / rows:.1f} CPU s/10 M")
    report("  exponent of CPU seconds in rows", exponent(took[1:]), 1.05, "", digits=3)
    ray.shutdown()
    cluster.shutdown()


def ignored(*state: object) -> None:
    pass


def exponent(took: list[float]) -> float:
    return float(np.log(took[1] / took[0]) / np.log(SKETCHES[1] / SKETCHES[0]))


def growth() -> None:
    took = []
    for rows in SKETCHES:
        command = [sys.executable, __file__, "reduce", str(rows)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, peak, pairs = map(float, done.stdout.split())
        took.append(seconds)
        report(f"{rows:,} synthetic sketches through bands and buckets", seconds * 1e7 / rows, 60, "s/10 M", digits=1)
        report("  peak of the process", peak, 2048, "MB", digits=0)
        report("  pairs to verify for each row", pairs, 5, "")
    report("  exponent of CPU seconds in rows", exponent(took), 1.05, "", digits=3)


def main() -> None:
    if sys.argv[1:2] == ["reduce"]:
        reduce(int(sys.argv[2]))
        return
    if sys.argv[1:2] == ["curate"]:
        curate_alone(sys.argv[2])
        return
    print(f"{ROWS:,} rows; load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    growth()
    on_ray()
    end_to_end()
    print("not run here: four processes and fifty kills (tests, `-m slow`, of "
          "test_divided_curation.py); 125,000 files (make bench-scale-store)")  # fmt: skip
    if missed and os.environ.get("CHECK"):
        sys.exit(1)


if __name__ == "__main__":
    main()
