"""A process that appends, for tests that kill it or run many at once.

    python append_worker.py STORE FIRST LAST ROWS

Appends the shards FIRST to LAST - 1 with ROWS rows each, and prints the number of each when it is done.
"""

import sys

from store_rows import FP, build

from agentrl.datastore import TrajectoryBuffer


def main() -> None:
    store, first, last, rows = sys.argv[1], *map(int, sys.argv[2:5])
    buffer = TrajectoryBuffer(store)
    for shard in range(first, last):
        if not buffer.has(FP, shard):
            made = (build(number) for number in range(shard * rows, (shard + 1) * rows))
            buffer.append(made, stage="rollout", fingerprint=FP, shard=shard)
        print(shard, flush=True)


if __name__ == "__main__":
    main()
