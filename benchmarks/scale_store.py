"""The store with many small rows: time and peak memory of each operation, each in a process of its own.

    python benchmarks/scale_store.py                 200,000 rows
    SCALE=small python benchmarks/scale_store.py     20,000 rows, under a minute
    SCALE=million python benchmarks/scale_store.py   a million rows
    SCALE=large python benchmarks/scale_store.py     10 million rows
    CHECK=1 ...                                      exit code 1 if a target is missed

Figures that have a target of their own in CPU seconds are of one process that asks twice, or of opening a table. Then
comes a synthetic log of 125,000 files (12,500 if small), none of which exists.

The rows are simulated: 16 tokens and two messages each; ids, task, outcome, policy version and tokens differ. Each
operation has a process of its own, and most are commands as a user gives them. So each is a first query, of which only
the system's cache of files is warm. Memory is the peak of the process, the command's own start included.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from synthetic_log import open_log, sizes, write_log

from agentrl.datastore import TrajectoryBuffer
from agentrl.schemas.arrow import to_table
from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA, Message, Termination, Trajectory

ROWS = {"small": 20_000, "million": 1_000_000, "large": 10_000_000}.get(os.environ.get("SCALE", ""), 200_000)
SHARD = ROWS // 50
BATCH = 10_000
FILES = 12_500 if ROWS == 20_000 else 125_000
"""Files of the synthetic log: a billion rows in files of 8,192."""
LONG = 800 if ROWS == 20_000 else 6_400
"""Rows of 20,000 tokens, about 110 KB each."""
LIMIT_GIB = 3.0
"""Peak memory that no operation may exceed, whatever the number of rows."""

PIPELINE = """
name: scale-store
stages:
  solved: {uses: trajectories.select, with: {version: VERSION, where: "success and level = 3"}}
  drawn: {uses: trajectories.select, with: {version: VERSION, draw: {strategy: diversity, n: 1000}}}
"""

lines: list[str] = []


def report(what: str, seconds: float, gib: float) -> None:
    verdict = "met" if gib < LIMIT_GIB else "MISSED"
    lines.append(verdict)
    print(f"{what:<66} {seconds:>9.2f} s {gib:>7.2f} GiB  < {LIMIT_GIB:g} GiB  {verdict}", flush=True)


def target(what: str, value: float, unit: str, limit: float) -> None:
    """Report a figure that must not exceed a limit."""
    lines.append("met" if value <= limit else "MISSED")
    print(f"{what:<66} {value:>9.2f} {unit:<14} <= {limit:g}  {lines[-1]}", flush=True)


def answer(*command: str) -> list[float]:
    """The numbers that a part of this file prints, in a process of its own."""
    return [float(word) for word in subprocess.check_output([sys.executable, __file__, *command], text=True).split()]


def measured(what: str, *command: str) -> str:
    """Run a command, report its time and peak memory, and give what it printed."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}\n{printed}")
    report(what, time.perf_counter() - start, used.ru_maxrss / 2**20)
    return printed


def pattern() -> pa.Table:
    """:data:`BATCH` rows that differ in nothing but their tokens and what :func:`batch` sets."""
    messages = [
        Message(role="user", content="who is the boss of Ann?", token_start=0, token_end=8),
        Message(role="assistant", content="Bob", token_start=8, token_end=16),
    ]
    row = Trajectory(
        trajectory_id="",
        episode_id="",
        task_id="",
        source="model",
        env="lookup",
        split="train",
        prompt="who is the boss of Ann?",
        reward=0.0,
        success=False,
        termination=Termination.ANSWERED,
        n_steps=1,
        n_tokens=16,
        n_action_tokens=8,
        messages=messages,
        tokenizer="simulated",
        input_ids=list(range(16)),
        action_mask=[False] * 8 + [True] * 8,
        logprobs=[float("nan")] * 8 + [-0.5] * 8,
    )
    rows = to_table([row], TRAJECTORY_SCHEMA).take(pa.array(np.zeros(BATCH, dtype=np.int64)))
    tokens = pa.array(np.random.default_rng(7).integers(0, 32000, BATCH * 16, dtype=np.int32))
    ids = pa.ListArray.from_arrays(np.arange(0, BATCH * 16 + 1, 16, dtype=np.int32), tokens)
    field = TRAJECTORY_SCHEMA.field("input_ids")
    return rows.set_column(TRAJECTORY_SCHEMA.get_field_index("input_ids"), field, ids.cast(field.type))


def batch(rows: pa.Table, first: int) -> pa.RecordBatch:
    """The rows numbered from ``first``, 16 of each task."""
    number = np.arange(first, first + rows.num_rows)
    success = np.random.default_rng(first).random(rows.num_rows) < 0.3
    columns = {
        "trajectory_id": [f"rollout-00000007-{value:08d}" for value in number.tolist()],
        "episode_id": [f"episode-{value:08d}" for value in number.tolist()],
        "task_id": [f"task-{value // 16:07d}" for value in number.tolist()],
        "sample_index": (number % 16).astype(np.int32),
        "level": (number // 16 % 6).astype(np.int32),
        "policy_version": (number * 100 // ROWS).astype(np.int32),
        "reward": success.astype(float),
        "success": success,
    }
    for name, values in columns.items():
        index = TRAJECTORY_SCHEMA.get_field_index(name)
        field = TRAJECTORY_SCHEMA.field(index)
        rows = rows.set_column(index, field, pa.array(values, field.type))
    return rows.combine_chunks().to_batches()[0]


def fill(store: str) -> None:
    """Append all rows in 50 commits, each streamed in batches."""
    buffer = TrajectoryBuffer(store)
    rows = pattern()
    for shard, start in enumerate(range(0, ROWS, SHARD)):
        parts = (
            batch(rows.slice(0, min(BATCH, start + SHARD - first)), first)
            for first in range(start, start + SHARD, BATCH)
        )
        buffer.append(parts, stage="rollout", fingerprint="simulated", shard=shard)


def read_some(store: str, count: int) -> None:
    random = np.random.default_rng(7).choice(ROWS, count, replace=False)
    ids = [f"rollout-00000007-{number:08d}" for number in random.tolist()]
    assert TrajectoryBuffer(store).read(ids, ["input_ids", "action_mask", "logprobs"]).num_rows == count


def digest_some(store: str, count: int) -> None:
    buffer = TrajectoryBuffer(store)
    ids = [f"rollout-00000007-{number:08d}" for number in range(0, ROWS, ROWS // count)]
    assert buffer.digest(ids)


def look(store: str) -> None:
    """Print the CPU seconds of reading the tokens of 64 random ids, and all rows of a task: the first that this process
    asks for, and others after that."""
    import deltalake  # noqa: F401
    import polars  # noqa: F401

    buffer, random = TrajectoryBuffer(store), np.random.default_rng(os.getpid())
    for _ in range(2):
        ids = [f"rollout-00000007-{number:08d}" for number in random.choice(ROWS, 64, replace=False).tolist()]
        start = time.process_time()
        assert buffer.read(ids, ["input_ids", "action_mask", "logprobs"]).num_rows == len(ids)
        print(time.process_time() - start)
    for _ in range(2):
        start = time.process_time()
        assert buffer.attempts(f"task-{random.integers(ROWS // 16):07d}", ["trajectory_id", "reward"]).num_rows == 16
        print(time.process_time() - start)


def look_ups(store: str) -> None:
    """Look-ups: the first process makes the indexes, the second one has them. What a process asks for first also opens
    the table and loads modules, so the targets are for what it asks for next."""
    for who in ("by a process without an index", "by the next process"):
        figures = answer("look", store)
        for what, seconds in zip(("64 random ids", "64 others", "a group", "another group"), figures, strict=True):
            if "other" in what and who == "by the next process":
                target(f"{what}, {who}", seconds, "CPU s", 0.3)
            else:
                print(f"{what + ', ' + who:<66} {seconds:>9.2f} CPU s")
    mib = folder_mib(Path(store) / "tmp/rows")
    print(f"  the indexes of ids and tasks take {mib:,.1f} MiB, {mib * 2**20 / ROWS:.0f} bytes a row")


def fill_long(store: str) -> None:
    """Append :data:`LONG` rows of 20,000 tokens that do not compress, in commits of 400."""
    random, buffer, tokens = np.random.default_rng(7), TrajectoryBuffer(store), 20_000
    for shard in range(LONG // 400):
        rows = []
        for number in range(shard * 400, shard * 400 + 400):
            user = Message(role="user", content="go on", token_start=0, token_end=8)
            answered = Message(role="assistant", content="so", token_start=8, token_end=tokens)
            row = Trajectory(
                trajectory_id=f"long-{number:06d}",
                episode_id=f"episode-{number:06d}",
                task_id=f"task-{number // 16:05d}",
                source="model",
                env="lookup",
                split="train",
                prompt="go on",
                reward=None,
                success=None,
                termination=Termination.ANSWERED,
                n_steps=1,
                n_tokens=tokens,
                n_action_tokens=tokens - 8,
                messages=[user, answered],
                tokenizer="simulated",
                input_ids=random.integers(0, 150_000, tokens).tolist(),
                action_mask=[False] * 8 + [True] * (tokens - 8),
                logprobs=[float("nan")] * 8 + (-random.random(tokens - 8)).tolist(),
            )
            rows.append(row)
        buffer.append(rows, stage="rollout", fingerprint="long", shard=shard)


def long_rows(store: str) -> None:
    """Compaction to a file of its full size, whose memory must not grow with it."""
    measured(f"append {LONG:,} rows of 20,000 tokens", __file__, "long", store)
    measured("compact them", "-m", "agentrl.flows.cli", "buffer", "compact", "--store", store)
    sizes_of_files = [Path(uri).stat().st_size / 2**20 for uri in TrajectoryBuffer(store).table().file_uris()]
    print(f"  {len(sizes_of_files)} files, the largest of {max(sizes_of_files):,.0f} MiB")


def many_files(store: str) -> None:
    """The log of a table of :data:`FILES` files."""
    measured(f"write a log of {FILES:,} files, and its checkpoint", __file__, "log", store, str(FILES))
    commits, checkpoints = sizes(store)
    print(f"  log {commits / 1e6:,.0f} MB, {commits / FILES:,.0f} bytes a file")
    target("  all checkpoints, as a multiple of the log", checkpoints / commits, "", 2)
    seconds, peak = answer("open", store)
    target(f"  open {FILES:,} files", seconds, "CPU s", 1)
    target("  peak of the process", peak, "MB", 500)


def folder_mib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-scale-store-"))
    store, pipeline = str(folder / "store"), folder / "scale-store.yaml"
    command = ("-m", "agentrl.flows.cli")
    try:
        print(f"{ROWS:,} rows; load average at the start {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
        measured(f"append {ROWS:,} rows in 50 commits", __file__, "fill", store)
        table = TrajectoryBuffer(store).table()
        print(
            f"  {len(table.file_uris())} files, {folder_mib(folder):,.0f} MiB, of them the log {log_mib(store):.1f} MiB"
        )
        measured("compact", *command, "buffer", "compact", "--store", store)
        table = TrajectoryBuffer(store).table()
        print(f"  {len(table.file_uris())} files")
        pipeline.write_text(PIPELINE.replace("VERSION", str(table.version())))
        measured("vacuum", *command, "buffer", "vacuum", "--yes", "--retention-hours", "0", "--store", store)
        print(f"  {folder_mib(folder):,.0f} MiB")
        measured("stats", *command, "buffer", "stats", "--store", store)
        query = "select policy_version, avg(success) as rate from trajectories group by policy_version"
        measured("success rate of each policy version, by SQL", *command, "buffer", "query", query, "--store", store)
        measured("plan a pipeline that selects and draws", *command, "plan", str(pipeline), "--store", store)
        measured("run it: two selections with their digests", *command, "run", str(pipeline), "--store", store)
        measured("plan it again", *command, "plan", str(pipeline), "--store", store)
        sample = ("buffer", "sample", "1000", "--strategy", "success_first")
        measured("sample 1,000 rows, successes first", *command, *sample, "--store", store)
        measured("digest of 5 % of the rows, scattered", __file__, "digest", store, str(ROWS // 20))
        measured("tokens of 64 random ids", __file__, "read", store, "64")
        measured("tokens of 5 % of the rows, random", __file__, "read", store, str(ROWS // 20))
        shutil.rmtree(folder / "store/tmp/rows", ignore_errors=True)
        look_ups(store)
        many_files(str(folder / "log"))
        long_rows(str(folder / "long"))
        print(f"load average at the end {os.getloadavg()[0]:.1f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if "MISSED" in lines and os.environ.get("CHECK"):
        sys.exit(1)


def log_mib(store: str) -> float:
    return folder_mib(Path(store) / "trajectories/_delta_log")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["fill", store]:
            fill(store)
        case ["read", store, count]:
            read_some(store, int(count))
        case ["long", store]:
            fill_long(store)
        case ["look", store]:
            look(store)
        case ["log", store, count]:
            write_log(store, int(count))
        case ["open", store]:
            open_log(store)
        case ["digest", store, count]:
            digest_some(store, int(count))
        case _:
            main()
