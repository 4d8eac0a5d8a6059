"""The trajectory buffer against Hugging Face datasets, JSON lines scanned with Polars, and LanceDB, on the same rows.

    python benchmarks/buffer.py                 200,000 trajectories, about 100 M tokens
    SCALE=small python benchmarks/buffer.py     under a minute
    CHECK=1 ...                                 exit code 1 if a target is missed

Each line is a figure, its target and `met` or `MISSED`. Rows are made before anything is timed; each time is the median
of several runs in one process with the system's caches of files warm, so the order of the sides has no effect. `first`
in a target judges the first query after opening the buffer, as every later process asks it: its scalar columns have
copies on the disk. `warm` judges one whose columns or footers are in memory. Datasets has its files mapped in both. The
first query of all on a machine, without copies, is printed beside them.
"""

import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import buffer_data
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from scale_training import peak_memory

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.read.scalar_cache import ScalarCopies
from agentrl.datastore.read.token_cache import warm
from agentrl.datastore.search.exact import nearest

SMALL = os.environ.get("SCALE") == "small"
ROWS = 5_000 if SMALL else 200_000
CHUNK = 2_500 if SMALL else 20_000
VECTORS = 50_000 if SMALL else 1_000_000
DIMENSIONS = 256
SEED = 7

TITLES = {"store": "buffer", "arrow": "datasets (Arrow)", "rows.jsonl": "JSON lines", "lance": "LanceDB"}

lines: list[tuple[str, str, str, str]] = []


def median(action: Callable[[], Any], runs: int = 5) -> float:
    """Seconds; the first run warms up and does not count."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def report(what: str, figure: str, target: str = "", met: bool | None = None) -> None:
    verdict = "" if met is None else ("met" if met else "MISSED")
    lines.append((what, figure, target, verdict))
    print(f"{what:<66} {figure:>16}  {target:<14} {verdict}", flush=True)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms"


def ratio(what: str, theirs: float, ours: float, least: float, query: str) -> None:
    report(what, f"{theirs / ours:,.1f}x", f">= {least:g}x {query}", theirs / ours >= least)


def size(path: Path) -> int:
    return (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    )


def chunks() -> list[pa.Table]:
    return [buffer_data.make(CHUNK, first, SEED) for first in range(0, ROWS, CHUNK)]


# writing


def write_all(folder: Path) -> TrajectoryBuffer:
    """The same rows in each format. Buffer and plain Parquet take turns, chunk by chunk."""
    import datasets

    datasets.disable_progress_bars()
    buffer = TrajectoryBuffer(folder / "store")
    plain = ours = 0.0
    (folder / "parquet").mkdir()
    (folder / "arrow").mkdir()
    tokens = 0
    with (folder / "rows.jsonl").open("w") as text:
        for number, table in enumerate(chunks()):
            tokens += int(np.sum(table["n_tokens"].to_numpy()))
            start = time.perf_counter()
            pq.write_table(table, folder / f"parquet/{number:03d}.parquet", compression="zstd")
            plain += time.perf_counter() - start
            start = time.perf_counter()
            buffer.append(table, stage="rollout", fingerprint="bench", shard=number)
            ours += time.perf_counter() - start
            for part in table.to_batches(max_chunksize=1000):
                for row in part.to_pylist():
                    row["created_at"] = row["created_at"].isoformat()
                    row["logprobs"] = [None if value != value else value for value in row["logprobs"]]
                    text.write(json.dumps(row) + "\n")
            arrow = str(folder / f"arrow/{number:03d}.arrow")
            with pa.OSFile(arrow, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table, max_chunksize=1000)
            _lance(folder, table, number)
            del table
            gc.collect()
    report(f"trajectories; tokens {tokens:,}", f"{ROWS:,}")
    report("pyarrow.parquet with ZSTD, default settings: write", f"{plain:.2f} s")
    report("buffer: append, checked and committed", f"{ours:.2f} s")
    report("append, speed against pyarrow.parquet", f"{plain / ours:.2f}x", ">= 0.8x", plain / ours >= 0.8)
    return buffer


def _lance(folder: Path, table: pa.Table, number: int) -> None:
    import lancedb

    database = lancedb.connect(str(folder / "lance"))
    if number == 0:
        database.create_table("rows", table)
    else:
        database.open_table("rows").add(table)


# queries


def queries(buffer: TrajectoryBuffer, folder: Path) -> None:
    hf = _hf(folder)
    lance = _lance_frame(folder)
    frames: dict[str, Callable[[], pl.LazyFrame]] = {
        "buffer": buffer.scan,
        "JSON lines": lambda: pl.scan_ndjson(folder / "rows.jsonl", schema_overrides={"logprobs": pl.List(pl.Float32)}),
    }
    questions: dict[str, tuple[Callable[[pl.LazyFrame], pl.LazyFrame], Callable[[], Any], list[str]]] = {
        "success rate by environment": (
            lambda rows: rows.group_by("env").agg(pl.col("success").mean()).sort("env"),
            lambda: _hf_groups(hf, "env", "success"),
            ["env", "success"],
        ),
        "best of 16 per task": (
            lambda rows: (
                rows.filter(pl.col("reward") == pl.col("reward").max().over("task_id"))
                .group_by("task_id")
                .agg(pl.col("trajectory_id").min())
            ),
            lambda: _hf_best(hf),
            ["task_id", "trajectory_id", "reward"],
        ),
        "pass rate of each group": (
            lambda rows: rows.group_by("task_id").agg(pl.col("success").mean()),
            lambda: _hf_groups(hf, "task_id", "success"),
            ["task_id", "success"],
        ),
    }
    for what, (ask, ask_hf, columns) in questions.items():
        expected = ask(buffer.scan()).collect().sort(pl.all())
        ours = median(lambda ask=ask: ask(frames["buffer"]()).collect(), 25)
        theirs = median(ask_hf, 3)
        text = median(lambda ask=ask: ask(frames["JSON lines"]()).collect(), 1)
        with_lance = median(lambda ask=ask, columns=columns: ask(lance(columns).lazy()).collect(), 3)
        assert ask(frames["JSON lines"]()).collect().sort(pl.all()).equals(expected)
        assert ask(lance(columns).lazy()).collect().sort(pl.all()).equals(expected)
        first = median(lambda ask=ask: ask(TrajectoryBuffer(folder / "store").scan()).collect(), 3)
        unread = median(lambda ask=ask: _without_copies(folder, ask), 3)
        report(f"{what}: buffer, once its columns are in memory", ms(ours))
        report(f"{what}: buffer, first query after opening it", ms(first))
        report(f"{what}: buffer, the same without copies of columns", ms(unread))
        report(f"{what}: datasets / JSON lines / LanceDB", f"{ms(theirs)} / {ms(text)} / {ms(with_lance)}")
        ratio(f"{what}: against datasets", theirs, ours, 10, "warm")
        ratio(f"{what}: against datasets", theirs, first, 1, "first")
        ratio(f"{what}: against JSON lines", text, ours, 50, "warm")
        ratio(f"{what}: against JSON lines", text, first, 20, "first")


def _without_copies(folder: Path, ask: Callable[[pl.LazyFrame], pl.LazyFrame]) -> None:
    """The first query on a machine; it makes the copies that later processes find."""
    buffer = TrajectoryBuffer(folder / "store")
    shutil.rmtree(ScalarCopies(buffer.storage).folder)
    ask(buffer.scan()).collect()


def _hf(folder: Path) -> Any:
    import datasets

    parts = [datasets.Dataset.from_file(str(path)) for path in sorted((folder / "arrow").glob("*.arrow"))]
    return datasets.concatenate_datasets(parts)


def _hf_groups(rows: Any, by: str, value: str) -> dict[Any, float]:
    """The usual way with the library: a filter for few groups, one pass over the columns for many."""
    names = rows.unique(by)
    if len(names) <= 8:
        result = {}
        for name in names:
            chosen = rows.select_columns([by, value]).filter(
                lambda batch, name=name: [row == name for row in batch],
                batched=True,
                input_columns=by,
                load_from_cache_file=False,
            )
            result[name] = float(np.mean(chosen[value][:]))
        return result
    groups: dict[Any, list[float]] = {}
    for batch in rows.select_columns([by, value]).iter(batch_size=10_000):
        for key, row in zip(batch[by], batch[value], strict=True):
            groups.setdefault(key, []).append(row)
    return {key: sum(values) / len(values) for key, values in groups.items()}


def _hf_best(rows: Any) -> list[int]:
    best: dict[str, tuple[float, int]] = {}
    number = 0
    for batch in rows.select_columns(["task_id", "reward"]).iter(batch_size=10_000):
        for task, reward in zip(batch["task_id"], batch["reward"], strict=True):
            if task not in best or reward > best[task][0]:
                best[task] = (reward, number)
            number += 1
    return rows.select([index for _, index in best.values()])["trajectory_id"][:]


def _lance_frame(folder: Path) -> Callable[[list[str]], pl.DataFrame]:
    import lancedb

    table = lancedb.connect(str(folder / "lance")).open_table("rows")

    def read(columns: list[str]) -> pl.DataFrame:
        return pl.DataFrame(table.search().select(columns).limit(ROWS).to_arrow())

    return read


# rows


def rows(buffer: TrajectoryBuffer, folder: Path) -> None:
    random = np.random.default_rng(SEED)
    ids = [f"rollout-{SEED:08x}-{number:06d}" for number in range(ROWS)]
    picked = iter(random.choice(ids, 200).tolist())
    seconds = median(lambda: buffer.get(next(picked)), 100)
    report("one trajectory by id, median of 100", ms(seconds), "< 15 ms warm", seconds < 0.015)
    many = [random.choice(ids, 64, replace=False).tolist() for _ in range(18)]
    turn = iter(many)
    result = buffer.get_many(many[0])
    assert [row.trajectory_id for row in result] == many[0]
    batch = median(lambda: buffer.get_many(next(turn)), 10)
    report("64 random ids in one get_many, median of 10", ms(batch), "< 150 ms warm", batch < 0.15)
    first = median(lambda: TrajectoryBuffer(folder / "store").get_many(next(turn)), 5)
    report("64 random ids, first read after opening it", ms(first))
    frame = buffer.scan().select("trajectory_id", "task_id", "success").collect().sort("trajectory_id")
    tenth = frame["task_id"].unique().sort().gather_every(10).to_list()
    scattered = frame.filter(pl.col("task_id").is_in(tenth), pl.col("success"))["trajectory_id"].to_list()
    stretch = frame["trajectory_id"].slice(ROWS // 3, ROWS // 20).to_list()
    anywhere = sorted(random.choice(ids, ROWS // 20, replace=False).tolist())
    loads = {
        "successes of every tenth task": scattered,
        "rows at random": anywhere,
        "rows in one stretch, as one stage run writes": stretch,
    }
    for what, wanted in loads.items():
        _load(buffer, folder, what, wanted, 3 if wanted is stretch else None)
    start = time.perf_counter()
    copied = warm(buffer)
    report("copies of the token columns: made once, by `agentrl buffer warm`", f"{time.perf_counter() - start:.2f} s")
    report("  size on disk", f"{copied['bytes'] / 2**20:,.0f} MiB")
    for what, wanted in loads.items():
        _load(buffer, folder, f"{what}, with copies", wanted, 2)


def _load(buffer: TrajectoryBuffer, folder: Path, what: str, wanted: list[str], least: float | None) -> None:
    """``least``: how many times faster than datasets the buffer must be; None only prints."""
    columns = ["input_ids", "action_mask", "logprobs"]
    hf = _hf(folder)
    numbers = [int(name[-6:]) for name in wanted]
    wanted_set = set(wanted)

    def by_filter() -> Any:
        kept = hf.filter(
            lambda batch: [row in wanted_set for row in batch],
            batched=True,
            input_columns="trajectory_id",
            load_from_cache_file=False,
        )
        return kept.select_columns(columns).with_format("arrow")[:]

    ours = median(lambda: buffer.read(wanted, columns), 3)
    first = median(lambda: TrajectoryBuffer(folder / "store").read(wanted, columns), 3)
    select = median(lambda: hf.select(numbers).select_columns(columns).with_format("arrow")[:], 3)
    theirs = median(by_filter, 3)
    assert buffer.read(wanted, columns)["input_ids"].to_pylist() == by_filter()["input_ids"].to_pylist()
    report(f"load {len(wanted) / ROWS:.1%}, {what}: buffer", ms(ours))
    report("  datasets, filter by id / select by known row number", f"{ms(theirs)} / {ms(select)}")
    report("  buffer, first read after opening it", ms(first))
    if least is None:
        report("  against datasets, filter by id, warm / first", f"{theirs / ours:,.1f}x / {theirs / first:,.1f}x")
        return
    ratio("  against datasets, filter by id", theirs, ours, least, "warm")
    ratio("  against datasets, filter by id", theirs, first, 2, "first")


# search


def search() -> None:
    """In a process of its own, so that its memory is its own."""
    random = np.random.default_rng(SEED)
    vectors = random.standard_normal((VECTORS, DIMENSIONS), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = random.normal(size=(30, DIMENSIONS)).astype(np.float32)
    allowed = np.sort(random.choice(VECTORS, VECTORS // 100, replace=False))
    shape = f"{VECTORS:,} x {DIMENSIONS}"
    for name, subset in (("", None), (", 1 % filter", allowed)):
        turn = iter(np.tile(queries, (2, 1)))
        taken = median(lambda turn=turn, subset=subset: nearest(vectors, next(turn), 10, subset), 30)
        positions = np.arange(VECTORS) if subset is None else subset
        hits = 0
        for query in queries[:10]:
            parts = np.array_split(positions, 32)
            scores = np.concatenate([vectors[part].astype(np.float64) @ query for part in parts])
            truth = positions[np.argsort(-scores, kind="stable")[:10]]
            hits += len(set(truth.tolist()) & set(nearest(vectors, query, 10, subset)[0].tolist()))
        recall = hits / 100
        report(f"exact top 10 of {shape}{name}, median of 30", ms(taken), "< 80 ms", taken < 0.08)
        report(f"recall@10 against float64 brute force{name}", f"{recall:.3f}", ">= 0.99", recall >= 0.99)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="bench-buffer-"))
    try:
        report(f"load average at the start, {os.cpu_count()} cores", f"{os.getloadavg()[0]:.1f}")
        buffer = write_all(folder)
        for name in ("store", "parquet", "arrow", "rows.jsonl", "lance"):
            report(f"size on disk: {TITLES.get(name, name)}", f"{size(folder / name) / 2**20:,.0f} MiB")
        queries(buffer, folder)
        rows(buffer, folder)
        report("peak memory so far", f"{peak_memory() / 2**30:.2f} GiB")
        done = subprocess.run([sys.executable, __file__, "search"], check=False, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="")
        report("load average at the end", f"{os.getloadavg()[0]:.1f}")
        missed = any(line[3] == "MISSED" for line in lines) or "MISSED" in done.stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if missed and os.environ.get("CHECK"):
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["search"]:
        search()
        report("search: peak memory", f"{peak_memory() / 2**30:.2f} GiB")
    else:
        main()
