"""The actors of a storm. Each is a process that does one thing with the store again and again, until it is ended.

python actors.py ROLE STORE DIARIES NUMBER SEED
python actors.py run STORE DIARIES NUMBER SEED    one pipeline run, with the arguments of `agentrl run` after them
"""

import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from diary import ROWS, Diary, shards
from store_rows import FP, build

from agentrl.datastore import Catalog, TrajectoryBuffer
from agentrl.datastore.errors import NoBufferError, StoreError
from agentrl.schemas.trajectory import Trajectory

PATIENCE = 8
"""Failures in a row after which an actor says that the store is of no use."""

LEASE_SECONDS = 4.0
"""Short, so that a process that the storm has stopped loses its lease."""

CHECKPOINT_EVERY = 10
"""Often, so that checkpoints are cut off, too."""


def rows(shard: int) -> list[Trajectory]:
    return [build(number) for number in range(shard * ROWS, (shard + 1) * ROWS)]


def number_of(trajectory_id: str) -> int:
    return int(trajectory_id[-6:])


class Actor:
    """The store, the diary, and everything random."""

    def __init__(self, store: str, folder: Path, name: str, number: int, seed: int) -> None:
        self.store, self.folder, self.number = store, folder, number
        self.diary = Diary(folder, name)
        self.random = random.Random(seed)
        self.buffer = TrajectoryBuffer(store)

    def until_ended(self, act: Callable[[], None], pause_s: float) -> None:
        """Act for ever. What the store refuses is said; any other error is a crash, and the storm has found a fault."""
        failures = 0  # in a row
        while True:
            try:
                act()
                failures = -1
            except NoBufferError:
                if shards(self.folder, "acknowledged"):
                    self.diary.say("violation", text="there is no buffer any more")
            except (StoreError, OSError) as error:
                self.diary.say("error", type=type(error).__name__, text=str(error)[:500])
            except Exception:
                self.diary.say("crash", text=traceback.format_exc()[-3000:])
            failures += 1
            if failures == PATIENCE:
                self.diary.say("violation", text=f"{PATIENCE} failures in a row")
            time.sleep(self.random.uniform(0, pause_s))

    def append(self) -> None:
        """The next shard. Two actors each append the same shards, as two runs of one stage do."""
        mine = {shard for shard in shards(self.folder, "acknowledged") if shard % 2 == self.number % 2}
        shard = next(number for number in range(self.number % 2, sys.maxsize, 2) if number not in mine)
        if self.random.random() < 0.3:  # one that a faster twin has begun, too
            shard = max(0, shard - 2)
        self.diary.say("started", shard=shard)
        result = self.buffer.append(rows(shard), stage="rollout", fingerprint=FP, shard=shard)
        self.diary.say("acknowledged", shard=shard, skipped=result.skipped)

    def compact(self) -> None:
        import resource

        from agentrl.datastore.upkeep import compact

        result = compact(self.buffer)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        self.diary.say("compacted", **result, peak_mib=peak)

    def vacuum(self) -> None:
        from agentrl.datastore.upkeep import vacuum

        self.diary.say("vacuumed", files=len(vacuum(self.buffer, retention_hours=0, dry_run=False)))

    def collect(self) -> None:
        from agentrl.pipelines.results.gc import collect

        self.diary.say("collected", artifacts=len(collect(Catalog(self.store), 1).artifacts))

    def read(self) -> None:
        """Shards are whole or absent, rows are there once, and what was acknowledged before is there."""
        acknowledged = shards(self.folder, "acknowledged")
        frame = self.buffer.scan().select("trajectory_id", "fingerprint").collect()
        matches = [number_of(name) for name, fp in frame.rows() if fp == FP]
        self.judge(Counter(matches), acknowledged)
        if matches:
            some = self.random.sample(sorted(set(matches)), min(5, len(matches)))
            read = self.buffer.read([build(number).trajectory_id for number in some], ["input_ids", "prompt"])
            wanted = [(build(number).input_ids, build(number).prompt) for number in some]
            if [(row["input_ids"], row["prompt"]) for row in read.to_pylist()] != wanted:
                self.diary.say("violation", text=f"rows {some} were read with another content")
        self.diary.say("read", rows=len(matches))

    def judge(self, actual: Counter[int], acknowledged: set[int]) -> None:
        by_shard = Counter(number // ROWS for number in actual)
        faults = {
            "doubled rows": [number for number, count in actual.items() if count > 1],
            "shards in part": [shard for shard, count in by_shard.items() if count != ROWS],
            "acknowledged shards without rows": sorted(acknowledged - set(by_shard)),
        }
        for what, which in faults.items():
            if which:
                self.diary.say("violation", text=f"{len(which)} {what}, such as {which[:5]}")

    def run(self) -> None:
        """One pipeline run; a traceback out of the command is a fault."""
        from agentrl.flows.cli import main

        sys.argv = ["agentrl", "run", *sys.argv[6:], "--store", self.store]
        try:
            main()
        except SystemExit as end:
            self.diary.say("run", code=end.code or 0)
            raise
        except Exception:
            self.diary.say("crash", text=traceback.format_exc()[-3000:])
            raise


ROLES: dict[str, tuple[Callable[[Actor], None], float]] = {
    "appender": (Actor.append, 0.1),
    "compactor": (Actor.compact, 0.3),
    "vacuumer": (Actor.vacuum, 0.3),
    "reader": (Actor.read, 0.2),
    "collector": (Actor.collect, 1.0),
}
"""What each does, and the most seconds it rests in between."""


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    import agentrl.datastore.storage.lease
    import agentrl.datastore.table.commit

    agentrl.datastore.storage.lease.LEASE_SECONDS = LEASE_SECONDS
    agentrl.datastore.table.commit.CHECKPOINT_EVERY = CHECKPOINT_EVERY
    role, store, folder, number, seed = sys.argv[1:6]
    actor = Actor(store, Path(folder), f"{role}-{number}", int(number), int(seed))
    if role == "run":
        actor.run()
    act, pause_s = ROLES[role]
    signal.signal(signal.SIGTERM, interrupt)  # in the midst of whatever it does
    try:
        actor.until_ended(lambda: act(actor), pause_s)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
