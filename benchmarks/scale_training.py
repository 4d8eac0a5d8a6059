"""Supervised training from a large selection: memory beyond what the model takes, and time to the first step.

Each run is a process of its own that calls the stage as the executor does, on a selection of all rows of a buffer in
shuffled order. What the model and the libraries take is the peak of the same run over 64 rows.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = 448
SEED = 7
FEW = 64
STEPS, BATCH = 4, 8
RANKS = 2

GIB = 2**30

Report = Callable[..., None]


def measure(folder: Path, small: bool, report: Report) -> None:
    """Report the lines of one process and of DeepSpeed ranks."""
    rows = 5_000 if small else 200_000
    tokens, size = fill(folder, rows, chunk=min(rows, 20_000))
    report(f"rows; tokens {tokens:,}; on disk {size / GIB:.2f} GiB", f"{rows:,}")
    for name, ranks in (("one process", 0), (f"DeepSpeed, ZeRO 2, {RANKS} ranks", RANKS)):
        few, all_ = run(folder, FEW, ranks), run(folder, rows, ranks)
        first = all_["first_step"]
        report(f"{name}: stage's beginning to the end of the first step", f"{first:.1f} s", "< 10 s", first < 10)
        report(f"{name}: the same over {FEW} rows", f"{few['first_step']:.1f} s")
        report(f"{name}: processor time of the stage", f"{all_['cpu']:.1f} s")
        grown = (all_["peak"] - few["peak"]) / GIB
        report(f"{name}: peak memory of the stage's process", f"{all_['peak'] / GIB:.2f} GiB")
        report(f"{name}: beyond that over {FEW} rows", f"{grown:.2f} GiB", "< 3 GiB", grown < 3)
        if ranks:
            grown = (max(all_["ranks"]) - max(few["ranks"])) / GIB
            report(f"{name}: peak memory of a rank", f"{max(all_['ranks']) / GIB:.2f} GiB")
            report(f"{name}: beyond that over {FEW} rows", f"{grown:.2f} GiB", "< 3 GiB", grown < 3)


def fill(folder: Path, rows: int, chunk: int) -> tuple[int, int]:
    """Make a tiny model, and a buffer of rows that it can be trained on. Returns tokens, and bytes on disk."""
    import buffer_data

    from agentrl.datastore import TrajectoryBuffer
    from agentrl.models.policy import Policy
    from agentrl.models.tiny import TinySize, init_model, train_tokenizer

    tokenizer = train_tokenizer([" ".join(buffer_data.WORDS)], VOCABULARY)
    policy = Policy(init_model(tokenizer, SEED, TinySize(context=2048)), tokenizer, "tiny")
    policy.save(folder / "model")
    buffer = TrajectoryBuffer(folder / "store")
    tokens = 0
    ids: list[str] = []
    for number, first in enumerate(range(0, rows, chunk)):
        table = spoken(buffer_data.make(chunk, first, SEED), policy.tokenizer_fingerprint, len(tokenizer))
        tokens += int(np.sum(table["n_tokens"].to_numpy()))
        ids += table["trajectory_id"].to_pylist()
        buffer.append(table, stage="rollout", fingerprint="bench", shard=number)
    np.random.default_rng(SEED).shuffle(ids)
    for count in (FEW, rows):
        pq.write_table(selection(ids[:count]), folder / f"selection-{count}.parquet")
    files = (folder / "store").rglob("*.parquet")
    return tokens, sum(file.stat().st_size for file in files)


def spoken(table: pa.Table, tokenizer: str, vocabulary: int) -> pa.Table:
    """The rows as if sampled with this tokenizer."""
    position = table.schema.get_field_index("input_ids")
    column = table["input_ids"].combine_chunks()
    values = pa.array(column.values.to_numpy() % vocabulary)
    ids = pa.ListArray.from_arrays(column.offsets, values, type=column.type)
    table = table.set_column(position, table.schema.field(position), ids)
    position = table.schema.get_field_index("tokenizer")
    return table.set_column(position, table.schema.field(position), pa.array([tokenizer] * len(table)))


def selection(ids: list[str]) -> pa.Table:
    """What the file of a selection holds; its own schema would need an import that ``pipelines.py`` here hides."""
    return pa.table({"trajectory_id": ids, "weight": np.ones(len(ids), np.float32)})


def run(folder: Path, rows: int, ranks: int) -> dict[str, Any]:
    """Train in a process of its own. Returns ``first_step`` and ``cpu`` in seconds, ``peak`` in bytes, and the peaks of
    the ``ranks``."""
    command = [sys.executable, "-P", __file__, str(folder), str(rows), str(ranks)]
    peaks: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    if "agentrl.training.launch" in child.cmdline():
                        peaks[child.pid] = max(peaks.get(child.pid, 0), child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.05)
        assert process.stdout is not None
        output = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"training of {rows} rows ended with {process.returncode}")
    return {**json.loads(output.splitlines()[-1]), "ranks": sorted(peaks.values())}


def train(folder: Path, rows: int, ranks: int) -> None:
    """What the process does."""
    from agentrl.datastore import TrajectoryBuffer
    from agentrl.pipelines.handles import Model, Trajectories
    from agentrl.pipelines.stage import Context
    from agentrl.pipelines.stages.train import SFTConfig, sft

    config: dict[str, Any] = {"steps": STEPS, "batch": BATCH, "optimizer": {"lr": 1e-4, "micro_tokens": 4096}}
    if ranks:
        config["deepspeed"] = {"zero": 2, "processes": ranks}
    work = folder / f"work-{rows}-{ranks}"
    (work / "scratch").mkdir(parents=True)
    (work / "artifact").mkdir()
    started, first = time.perf_counter(), []
    buffer = TrajectoryBuffer(folder / "store")
    chosen = Trajectories(folder / f"selection-{rows}.parquet", "rollout", "trajectories", "bench", buffer)
    model = Model(folder / "model", "start", "model", "bench")

    def progress(done: int, total: int | None = None, **metrics: float | int | str) -> None:
        first.append(time.perf_counter() - started)

    context = Context("sft", "bench", "bench", 0, buffer, work / "artifact", work / "scratch", progress)
    sft(context, SFTConfig.model_validate(config), trajectories=[chosen], model=model)
    used = psutil.Process().cpu_times()
    seconds = used.user + used.system + used.children_user + used.children_system
    print(json.dumps({"first_step": first[0], "cpu": seconds, "peak": peak_memory()}))


def peak_memory() -> int:
    """Bytes of this process alone. psutil knows no peak on Linux, and ``ru_maxrss`` would count what the process was
    forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
