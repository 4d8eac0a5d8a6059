"""What is left after a storm, judged: each fault is one line of JSON on the standard output.

    python verdict.py STORE PLAIN DIARIES SEED

STORE was in the storm. PLAIN is a folder for the store in which the same was done undisturbed. Nobody else may be at
work on either.
"""

import json
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import polars as pl
from actors import number_of, rows
from diary import ROWS, shards
from store_rows import FP

from agentrl.datastore import Catalog, TrajectoryBuffer, upkeep
from agentrl.datastore.upkeep import retention
from agentrl.pipelines.run.runs import all_runs


def counts(store: str) -> Counter[int]:
    """How often the table holds each row of the appenders."""
    names = TrajectoryBuffer(store).scan().filter(pl.col("fingerprint") == FP).select("trajectory_id").collect()
    return Counter(map(number_of, names["trajectory_id"]))


def kept(store: str, acknowledged: set[int]) -> Iterator[str]:
    """Every acknowledged row is there once, every other shard whole or not at all."""
    result = counts(store)
    if doubled := [number for number, count in result.items() if count > 1]:
        yield f"{len(doubled)} rows are doubled, such as {doubled[:3]}"
    by_shard = Counter(number // ROWS for number in result)
    if lost := sorted(acknowledged - set(by_shard)):
        yield f"{len(lost)} acknowledged shards are lost, such as {lost[:3]}"
    if parts := [shard for shard, count in by_shard.items() if count != ROWS]:
        yield f"{len(parts)} shards are there in part, such as {parts[:3]}"


def unsound(store: str, allowed: set[str]) -> Iterator[str]:
    """What `agentrl buffer check` finds."""
    for finding in upkeep.check(TrajectoryBuffer(store)):
        if finding.kind not in allowed:
            yield f"check: {finding.kind}: {finding.what}: {finding.advice}"


def finish(store: str, wanted: set[int], seed: int) -> Iterator[str]:
    """Do, undisturbed, all that the storm has begun."""
    buffer = TrajectoryBuffer(store)
    for shard in sorted(wanted):
        buffer.append(rows(shard), stage="rollout", fingerprint=FP, shard=shard)
    yield from run(store, seed)


def undisturbed(plain: str, wanted: set[int], seed: int) -> Iterator[str]:
    """Do the same in a store of its own: the rows in one append, for rows are equal whatever append they came with."""
    every = (row for shard in sorted(wanted) for row in rows(shard))
    TrajectoryBuffer(plain).append(every, stage="rollout", fingerprint=FP)
    yield from run(plain, seed)


def run(store: str, seed: int) -> Iterator[str]:
    """The pipeline run that comes last in the storm."""
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "storm.yaml", "--no-prefect", "--store", store]
    done = subprocess.run([*command, "--set", f"seed={seed}"], capture_output=True, text=True, timeout=120)
    if done.returncode:
        yield f"a run after the storm gives exit code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"


def contents(store: str) -> dict[str, dict[str, str]]:
    """Digests of the outputs of every artifact."""
    return {
        f"{manifest.ingredients.stage}/{manifest.fingerprint}": {
            name: output.digest for name, output in manifest.outputs.items()
        }
        for manifest in Catalog(store).all()
    }


def different(store: str, plain: str, wanted: set[int]) -> Iterator[str]:
    """Rows and artifacts that differ from those of the undisturbed store."""
    ids = [row.trajectory_id for shard in sorted(wanted) for row in rows(shard)]
    if TrajectoryBuffer(store).digest(ids) != TrajectoryBuffer(plain).digest(ids):
        yield f"the digest of {len(ids)} rows differs from that of an undisturbed store"
    mine = contents(store)
    for artifact, digests in contents(plain).items():
        if mine.get(artifact) != digests:
            yield f"artifact {artifact} holds {mine.get(artifact)}, undisturbed {digests}"


def at_work(store: str) -> Iterator[str]:
    """Runs that are said to be at work, though all were killed."""
    if running := [run["run_id"] for run in all_runs(Catalog(store)) if run["state"] == "running"]:
        yield f"{len(running)} runs that were killed count as running, such as {running[0]}"


def leftovers(store: str) -> Iterator[str]:
    """What still lies about when everything unneeded was thrown away."""
    catalog = Catalog(store)
    storage = catalog.storage
    strays = [key for key in storage.keys("") if key.endswith(".tmp") or "/.part-" in key or "quarantine-" in key]
    root = Path(store) if "://" not in store else storage.working_folder()
    strays += [str(path) for path in root.rglob("*.tmp")]
    for folder in ("tmp/trash", "tmp/staging", "trash", "staging"):
        strays += [str(path) for path in (root / folder).glob("*")]
    known = {f"artifacts/{manifest.ingredients.stage}/{manifest.fingerprint}" for manifest in catalog.all()}
    strays += [key for key in storage.keys("artifacts") if "/".join(key.split("/")[:3]) not in known]
    live = {name.rpartition("/")[2] for name in TrajectoryBuffer(store).table().file_uris()}
    strays += [name for name, _ in retention.stored_files(TrajectoryBuffer(store)) if name not in live]
    if strays:
        yield f"{len(strays)} strays, such as {sorted(set(strays))[:5]}"


def tidy(store: str) -> Iterable[str]:
    """Throw away what nothing needs."""
    from agentrl.datastore.artifacts import unfinished as leftovers
    from agentrl.datastore.table import open_writers as marks
    from agentrl.pipelines.results.gc import collect

    retention.GRACE = marks.STALE = leftovers.GRACE = timedelta(0)  # nobody else is at work
    buffer = TrajectoryBuffer(store)
    upkeep.compact(buffer)
    collect(Catalog(store), 0)
    upkeep.vacuum(buffer, retention_hours=0, dry_run=False)
    return ()


def judge(store: str, plain: str, diaries: Path, seed: int) -> Iterator[str]:
    started, acknowledged = (shards(diaries, what) for what in ("started", "acknowledged"))
    steps: list[Callable[[], Iterable[str]]] = [
        lambda: kept(store, acknowledged),
        lambda: unsound(store, {"orphan"}),  # what killed appends had written
        lambda: at_work(store),
        lambda: finish(store, started, seed),
        lambda: undisturbed(plain, started, seed),
        lambda: kept(store, started),
        lambda: different(store, plain, started),
        lambda: tidy(store),
        lambda: kept(store, started),
        lambda: unsound(store, set()),
        lambda: leftovers(store),
    ]
    for step in steps:
        try:
            yield from step()
        except Exception:
            yield traceback.format_exc()[-1200:]


def main() -> None:
    for fault in judge(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])):
        print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    main()
