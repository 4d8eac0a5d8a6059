"""How long upkeep takes on a table of many small commits, and what one append costs on it.

    python benchmarks/upkeep.py [COMMITS]

Prints one line per measurement; the bound for vacuum and for stats is 5 s each over 2,000 commits.
"""

import sys
import tempfile
import time
from collections.abc import Callable

import pyarrow as pa
from buffer_data import make

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.upkeep import check, compact, vacuum

ROWS = 4


def timed(what: str, act: Callable[[], object], bound_s: float | None = None) -> None:
    start = time.perf_counter()
    act()
    took = time.perf_counter() - start
    verdict = "" if bound_s is None else f", bound {bound_s:g} s: {'met' if took <= bound_s else 'MISSED'}"
    print(f"{what}: {took:.2f} s{verdict}", flush=True)


def fill(buffer: TrajectoryBuffer, commits: int) -> None:
    table = make(commits * ROWS, 0, mean_tokens=50)
    ids = pa.array([f"bench-{number:08d}" for number in range(table.num_rows)])
    table = table.set_column(table.schema.get_field_index("trajectory_id"), table.schema.field("trajectory_id"), ids)
    for shard in range(commits):
        buffer.append(table.slice(shard * ROWS, ROWS), stage="bench", fingerprint="bench", shard=shard)


def main() -> None:
    commits = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory() as folder:
        buffer = TrajectoryBuffer(folder)
        start = time.perf_counter()
        fill(buffer, commits)
        took = time.perf_counter() - start
        print(f"{commits} appends of {ROWS} rows: {took:.1f} s, {commits / took:.1f} per second", flush=True)
        fresh = TrajectoryBuffer(folder)
        timed("open the table", fresh.table)
        timed("stats", TrajectoryBuffer(folder).stats, 5)
        timed("vacuum of nothing, retention of a week", lambda: vacuum(buffer), 5)
        timed("compact", lambda: compact(buffer))
        timed("vacuum at retention 0", lambda: vacuum(buffer, retention_hours=0, dry_run=False), 5)
        timed("stats after it", TrajectoryBuffer(folder).stats, 5)
        timed("check", lambda: check(buffer))


if __name__ == "__main__":
    main()
