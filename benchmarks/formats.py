"""How fast each format is read, and in how much memory.

    python benchmarks/formats.py [FORMAT ...]      100,000 rows of each format
    SCALE=small python benchmarks/formats.py       2,000 rows, in under a minute
    FILES=FOLDER ...                               keep the files there, and take those that are there already
    CHECK=1 ...                                    exit code 1 if a target is missed

For each format a file of rows with four turns, two tool calls and, if the format has them, tokens; formats of a
session per file have as many files. In files of JSON Lines 2,000 rows come again and again. ``read`` gives checked
Arrow tables, as an append takes them, with as many processes as an import has. It is held against plain parsing of the
same files by the standard library in one process (``json.loads`` of each line, or ``json.load``; Parquet and
``datasets`` folders ``to_pylist``) that keeps nothing: at most twice its time by the clock, on this machine's
processors. The second ratio, in brackets, is of the processor time of all processes. The third one, ``tables alone``,
is the share that no reader can avoid: processor time in one process for the checked tables of rows that are there
already, without parsing and without a format's own rules. Each task runs in a process of its own, and the shortest of
``RUNS=2`` runs counts. Memory is the sum of the proportional sets (PSS) of that process and
its workers, looked at ten times a second, interpreter and libraries included: at most 500 MB.
``import`` appends the rows to a buffer, with memory as its target. At the small scale starting costs more than reading:
there all is read in one process, and only the processor time is shown. Each line prints the figure, the target, and
``met`` or ``MISSED``.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import psutil
from formats_data import write

from agentrl.datastore.formats import FORMATS, detect, workers
from agentrl.datastore.formats.columns import batches
from agentrl.datastore.formats.notes import Notes
from agentrl.datastore.formats.source import Source
from agentrl.datastore.formats.workers import File, read_files

SMALL = os.environ.get("SCALE") == "small"
ROWS = 2_000 if SMALL else 100_000
DISTINCT = 2_000
"""Rows that differ in a file of JSON Lines."""
MANY_FILES = ["swe-agent", "mini-swe-agent", "claude-code"]
APART = ["otel", "inspect", "huggingface"]
"""Formats whose rows must all differ, since equal ones would be one, or whose files cannot be appended to."""
IMPORTED = ["openai-chat", "verifiers-v1"]
MEMORY_MB = 500
RATIO = 2.0
SMALL_RATIO = 12.0
"""In processor time of one process: a guard against what makes reading slower, and not the target."""
RUNS = int(os.environ.get("RUNS", "2"))


def parse(paths: list[Path]) -> None:
    """The same files, parsed plainly and kept nowhere."""
    for path in paths:
        if path.suffix == ".jsonl":
            with path.open() as file:
                for line in file:
                    json.loads(line)
        elif path.suffix == ".parquet":
            import pyarrow.parquet as pq

            for batch in pq.ParquetFile(path).iter_batches(256):
                batch.to_pylist()
        elif path.suffix == ".eval":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    json.loads(archive.read(name))
        elif path.is_dir():
            from datasets import load_from_disk

            dataset = load_from_disk(str(path))
            for start in range(0, len(dataset), 256):
                dataset.select(range(start, min(len(dataset), start + 256))).data.table.to_pylist()
        else:
            with path.open() as file:
                json.load(file)


def work(task: str, name: str, paths: list[Path], folder: Path) -> int:
    """Rows of one task, in this process and its workers."""
    if task == "parse":
        parse(paths)
        return 0
    if task == "read":
        notes = Notes()
        files = [File(Source(path, notes), FORMATS[name]) for path in paths]
        return sum(batch.table.num_rows for batch in read_files(files))
    from agentrl.datastore import TrajectoryBuffer
    from agentrl.datastore.formats.imports import import_paths

    with tempfile.TemporaryDirectory(dir=folder) as store:
        return import_paths(TrajectoryBuffer(Path(store) / "store"), paths).rows


@dataclass(frozen=True)
class Measured:
    rows: int
    seconds: float
    cpu_seconds: float
    peak_mb: float


def child(task: str, name: str, folder: Path) -> None:
    """Measure one task in this process, and print it."""
    paths = files(name, folder)
    start, cpu = time.perf_counter(), cpu_seconds()
    rows = work(task, name, paths, folder)
    print(json.dumps([rows, time.perf_counter() - start, cpu_seconds() - cpu]))


def cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measured(task: str, name: str, folder: Path, runs: int = 1) -> Measured:
    """One task in a process of its own, the shortest of some runs."""
    matches = []
    for _ in range(runs):
        command = [sys.executable, __file__, "--task", task, name, str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, memory_mb(process.pid))
            time.sleep(0.1)
        assert process.returncode == 0
        assert process.stdout
        matches.append(Measured(*json.loads(process.stdout.read().splitlines()[-1]), peak))
    return replace(
        min(matches, key=lambda measure: measure.seconds), peak_mb=max(measure.peak_mb for measure in matches)
    )


def memory_mb(pid: int) -> float:
    """Proportional set size of a process and its children."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for item in [process, *process.children()]:
            with contextlib.suppress(psutil.Error):
                total += item.memory_full_info().pss / 2**20
    return total


def tables_alone(name: str, folder: Path) -> float:
    """Processor seconds per row for checked tables of rows that are there already, the least of three runs."""
    rows = ((source, row) for source in map(Source, files(name, folder)) for row in FORMATS[name].rows(source))
    there = list(islice(rows, DISTINCT))
    runs = []
    for _ in range(3):
        start = time.process_time()
        for batch in batches(there):
            del batch
        runs.append(time.process_time() - start)
    return min(runs) / len(there)


def files(name: str, folder: Path) -> list[Path]:
    paths = sorted((folder / name).iterdir())
    alone = len(paths) == 1 and paths[0].is_dir() and name != "huggingface"
    return sorted(paths[0].iterdir()) if alone else paths


def main() -> int:
    chosen = sys.argv[1:] or list(FORMATS)
    if unknown := set(chosen) - FORMATS.keys():
        print(f"there is no format {', '.join(sorted(unknown))}; formats are {', '.join(FORMATS)}")
        return 2
    with tempfile.TemporaryDirectory() as position:
        folder = Path(os.environ.get("FILES", position))
        missed = 0
        for name in chosen:
            write_files(name, folder)
            missed += (small if SMALL else full)(name, folder)
            if "FILES" not in os.environ:
                shutil.rmtree(folder / name)
    return int(bool(missed) and os.environ.get("CHECK") == "1")


def write_files(name: str, folder: Path) -> None:
    """The files of a format, unless they are there already."""
    if (folder / name).exists():
        return
    working = folder / f"{name}.part"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    lines = FORMATS[name].suffix in (".jsonl", "") and name not in MANY_FILES and name not in APART
    paths = write(name, working, DISTINCT if lines else ROWS)
    if lines:  # the same rows again and again
        content = paths[0].read_bytes()
        with paths[0].open("ab") as file:
            for _ in range(ROWS // DISTINCT - 1):
                file.write(content)
    assert detect(Source(paths[0])) == name, (name, detect(Source(paths[0])))
    working.rename(folder / name)


def full(name: str, folder: Path) -> int:
    """Targets missed by one format."""
    plain, read = (measured(task, name, folder, RUNS) for task in ("parse", "read"))
    assert read.rows >= ROWS - 1, (name, read)
    ratio, cpu_ratio = read.seconds / plain.seconds, read.cpu_seconds / plain.cpu_seconds
    alone = tables_alone(name, folder) * read.rows / plain.cpu_seconds
    figure = f"{name}: read {read.rows / read.seconds:,.0f} rows/s, {ratio:.2f}x of plain parsing ({cpu_ratio:.2f}x"
    figure += f", tables alone {alone:.2f}x)"
    missed = line(figure, ratio <= RATIO, f"{RATIO:g}x")
    missed += line(f"{name}: read in {read.peak_mb:.0f} MB", read.peak_mb <= MEMORY_MB, f"{MEMORY_MB} MB")
    if name in IMPORTED:
        done = measured("import", name, folder)
        figure = f"{name}: import {done.rows / done.seconds:,.0f} rows/s in {done.peak_mb:.0f} MB"
        missed += line(figure, done.peak_mb <= MEMORY_MB, f"{MEMORY_MB} MB")
    return missed


def small(name: str, folder: Path) -> int:
    """Targets missed by one format, in this process: a fraction of a second is too short for others."""
    workers.MOST_WORKERS = 1
    cpu = []
    for task in ("parse", "read"):
        paths, runs = files(name, folder), []
        for _ in range(3):
            start = time.process_time()
            work(task, name, paths, folder)
            runs.append(time.process_time() - start)
        cpu.append(min(runs))
    figure = f"{name}: read {ROWS / cpu[1]:,.0f} rows/s, {cpu[1] / cpu[0]:.2f}x of plain parsing, in one process"
    figure += f" (tables alone {tables_alone(name, folder) * ROWS / cpu[0]:.2f}x)"
    return line(figure, cpu[1] <= SMALL_RATIO * cpu[0], f"{SMALL_RATIO:g}x")


def line(figure: str, met: bool, target: str) -> bool:
    print(f"{figure} (target {target}): {'met' if met else 'MISSED'}", flush=True)
    return not met


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        sys.exit(main())
